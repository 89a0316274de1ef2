"""Matrix products, and what becomes of their sums."""
