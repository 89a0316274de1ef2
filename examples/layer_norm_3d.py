"""LayerNorm alone, over three axes: four million values have one mean."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """float[N, 64, 256, 256] -> the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm((64, 256, 256))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(x)


def make_model() -> nn.Module:
    """The model in training mode, as built."""
    return Model()


def make_inputs(device: str, full: bool) -> tuple[Tensor]:
    """A batch that fills a GPU, or one sample for a CPU."""
    return (torch.rand((16 if full else 1, 64, 256, 256), device=device),)
