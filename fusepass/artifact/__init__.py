"""A compiled model as one file: graphs as data, libraries, tensors, and what a call must look like."""
