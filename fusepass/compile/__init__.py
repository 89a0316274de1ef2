"""From an ATen graph to a rewritten one: the pipeline and its passes over the graph."""
