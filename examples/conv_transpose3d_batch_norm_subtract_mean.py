"""A transposed 3-D convolution, BatchNorm, and the mean of each sample's channel taken away."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """float[N, 16, D, H, W] -> float[N, 32, 2D-1, 2H-1, 2W-1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(16, 32, kernel_size=3, stride=2, padding=1)
        self.batch_norm = nn.BatchNorm3d(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch_norm(self.conv_transpose(x))
        return x - torch.mean(x, dim=(2, 3, 4), keepdim=True)


def make_model() -> nn.Module:
    """The model in training mode, as built: BatchNorm uses the batch's statistics and updates its buffers."""
    return Model()


def make_inputs(device: str, full: bool) -> tuple[Tensor]:
    """A batch that fills a GPU, or a small one that a CPU does in milliseconds."""
    return (torch.rand((16, 16, 16, 32, 32) if full else (4, 16, 4, 8, 8), device=device),)
