"""What was done to a model and why, as frozen values, as text and as JSON."""
