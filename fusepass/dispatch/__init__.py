"""Which compiled graph serves a call: signatures, specialisations, and what serves a model that cannot be captured."""
