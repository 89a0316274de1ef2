"""Convolutions as implicit matrix products: where their operands are, how they are multiplied, and what becomes of their sums."""
