"""Models of torchvision, timm and transformers through `fusepass.optimize`: nothing here was written for this project."""
