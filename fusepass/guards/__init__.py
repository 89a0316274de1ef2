"""What a captured graph was made for, noticed when it changes: Python state, globals, code, tensors."""
