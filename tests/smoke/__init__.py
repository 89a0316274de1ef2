"""What is run with each PyTorch and Python that is to be served: a little of everything that meets their private interfaces."""
