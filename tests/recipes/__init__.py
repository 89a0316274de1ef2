"""The recipes of docs/recipes.md as tests."""
