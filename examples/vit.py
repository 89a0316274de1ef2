"""A vision transformer (Dosovitskiy et al., An Image is Worth 16x16 Words, 2020) in inference.

`python examples/vit.py [cpu|cuda]`
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from show import show
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """float[N, 3, size, size] -> float[N, classes]."""

    def __init__(
        self, size: int = 224, patch: int = 16, width: int = 384, depth: int = 12, heads: int = 6, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


def main(device: str, *, small: bool = False) -> bool:
    """Shows it; `small` for tests. Says whether the results were right."""
    torch.manual_seed(0)
    model = ViT(16, 8, 16, 1, 2, 10) if small else ViT()
    image = torch.rand((2, 3, 16, 16) if small else (32, 3, 224, 224), device=device)
    return show("ViT", model.to(device).eval(), (image,))


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"))
