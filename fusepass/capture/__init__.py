"""From a model to one flat ATen graph: forward runs once for real, or is traced, and is kept from changing anything."""
