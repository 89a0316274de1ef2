"""Jobs in many processes at once: what the search in random models, the sweep of models and the whole proof run on."""
