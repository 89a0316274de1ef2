"""ResNet-18 (He et al., Deep Residual Learning for Image Recognition, 2015) in inference.

`python examples/resnet.py [cpu|cuda]`
"""

from __future__ import annotations

import sys

import torch
from show import show
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3 x 3 convolutions and what goes around them."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wider, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(wider)
        self.conv2 = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(wider)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels != wider:
            self.around = nn.Sequential(nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(out)) + self.around(x)).relu()


class ResNet(nn.Module):
    """float[N, 3, H, W] -> float[N, classes]; `width` channels in the first stage, `depth` blocks in each of four."""

    def __init__(self, width: int = 64, depth: int = 2, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, channels = [], width
        for stage in range(4):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Block(channels, width << stage, stride))
                channels = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def main(device: str, *, small: bool = False) -> bool:
    """Shows it; `small` for tests. Says whether the results were right."""
    torch.manual_seed(0)
    model = ResNet(8, 1, 10) if small else ResNet()
    image = torch.rand((1, 3, 32, 32) if small else (32, 3, 224, 224), device=device)
    return show("ResNet", model.to(device).eval(), (image,))


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"))
