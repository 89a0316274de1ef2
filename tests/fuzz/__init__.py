"""Looks for wrong answers in random models: `python -m tests.fuzz` (docs/testing.md)."""
