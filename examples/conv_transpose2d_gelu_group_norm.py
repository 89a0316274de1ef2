"""A transposed 2-D convolution, GELU and GroupNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    """float[N, 64, H, W] -> float[N, 64, H+2, W+2]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(64, 64, kernel_size=3)
        self.group_norm = nn.GroupNorm(num_groups=8, num_channels=64)

    def forward(self, x: Tensor) -> Tensor:
        return self.group_norm(F.gelu(self.conv_transpose(x)))


def make_model() -> nn.Module:
    """The model in training mode, as built."""
    return Model()


def make_inputs(device: str, full: bool) -> tuple[Tensor]:
    """A batch that fills a GPU, or a small one that a CPU does in milliseconds."""
    return (torch.rand((128, 64, 256, 256) if full else (2, 64, 24, 24), device=device),)
