"""A U-Net (Ronneberger et al., 2015) as diffusion models use it, with GroupNorm, SiLU and a step's embedding, in inference.

`python examples/unet.py [cpu|cuda]`
"""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from show import show
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions behind normalisations; the embedding is added between them."""

    def __init__(self, channels: int, out: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.step = nn.Linear(embedding, out)
        self.around = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x))) + self.step(F.silu(step))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(out))) + self.around(x)


class UNet(nn.Module):
    """(float[N, 3, H, W], float[N]) -> float[N, 3, H, W]; H and W are multiples of 4."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Block(width, width, 4 * width), Block(width, 2 * width, 4 * width)])
        self.middle = Block(2 * width, 2 * width, 4 * width)
        self.up = nn.ModuleList([Block(4 * width, width, 4 * width), Block(2 * width, width, 4 * width)])
        self.norm, self.last = nn.GroupNorm(4, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10000.0) / half))
        angles = step[:, None] * rates
        embedded = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x, embedded)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, embedded)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], 1), embedded)
        return self.last(F.silu(self.norm(x)))


def main(device: str, *, small: bool = False) -> bool:
    """Shows it; `small` for tests. Says whether the results were right."""
    torch.manual_seed(0)
    model = UNet(8 if small else 64).to(device).eval()
    count, size = (1, 8) if small else (8, 64)
    return show(
        "UNet", model, (torch.rand(count, 3, size, size, device=device), torch.arange(count, device=device) * 10.0)
    )


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"))
