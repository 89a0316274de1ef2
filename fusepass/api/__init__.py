"""What users call: `optimize` and `explain` behind the light import, and the module that they are given back."""
