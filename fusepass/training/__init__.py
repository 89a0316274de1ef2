"""The torch.compile backend: joint graphs of AOTAutograd, cut into forward and backward."""
