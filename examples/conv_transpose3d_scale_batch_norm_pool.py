"""A transposed 3-D convolution, a scale, BatchNorm and global average pooling."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """float[N, 64, D, H, W] -> float[N, 128, 1, 1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(64, 128, kernel_size=5)
        self.scale = 2.0
        self.batch_norm = nn.BatchNorm3d(128)
        self.pool = nn.AdaptiveAvgPool3d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_transpose(x) * self.scale
        return self.pool(self.batch_norm(x))


def make_model() -> nn.Module:
    """The model in training mode, as built: BatchNorm uses the batch's statistics and updates its buffers."""
    return Model()


def make_inputs(device: str, full: bool) -> tuple[Tensor]:
    """A batch that fills a GPU, or a small one that a CPU does in milliseconds."""
    return (torch.rand((16, 64, 16, 32, 32) if full else (2, 64, 3, 6, 6), device=device),)
