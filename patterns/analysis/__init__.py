"""What rules ask of a graph before they rewrite it."""
