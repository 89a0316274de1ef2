"""What runs at a call: fused regions, the path without Python, replayed launches, fallbacks that are counted."""
