"""Everything that shows breadth, in one run: random models, operators and models of other people (docs/testing.md)."""
