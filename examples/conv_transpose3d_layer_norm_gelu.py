"""A transposed 3-D convolution, LayerNorm over the last axis, GELU and a scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    """float[N, 32, D, H, 32] -> float[N, 64, 2D, 2H, 64]; LayerNorm's 64 is the width, not the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(32, 64, kernel_size=4, stride=2, padding=1)
        self.layer_norm = nn.LayerNorm(64)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_transpose(x)
        x = F.gelu(self.layer_norm(x))
        return x * self.scale


def make_model() -> nn.Module:
    """The model in training mode, as built."""
    return Model()


def make_inputs(device: str, full: bool) -> tuple[Tensor]:
    """A batch that fills a GPU, or a small one that a CPU does in milliseconds."""
    return (torch.rand((32, 32, 16, 32, 32) if full else (2, 32, 4, 4, 32), device=device),)
