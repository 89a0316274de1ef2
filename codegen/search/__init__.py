"""The search space: in which ways a region may be generated, and which are worth a try."""
