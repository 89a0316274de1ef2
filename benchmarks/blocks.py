"""The blocks that networks are made of: convolutions with normalisation, branches, attention, gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Sequential):
    """Layers whose result is added to their input."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        return x + result


class Beside(nn.Sequential):
    """A tensor, and what layers make of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, super().forward(x)


class Sum(nn.ModuleList):
    """What several branches make of one tensor, added."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (branch(x) for branch in self)
        for result in others:
            first = first + result
        return first


class Concatenate(nn.ModuleList):
    """What several branches make of one tensor, one behind the other along the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


class SqueezeExcite(nn.Module):
    """Channels scaled by a small network of their means."""

    def __init__(self, channels: int, squeezed: int, gate: Callable[[Tensor], Tensor] = torch.sigmoid) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.expand(F.relu(self.reduce(means))))


class Attention(nn.Module):
    """Self-attention over (N, L, C), its softmax written out."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        n, length, channels = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * (channels // self.heads) ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(n, length, channels))


class CausalAttention(Attention):
    """Self-attention in which nothing looks ahead, by PyTorch's own operator."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, channels = x.shape
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, length, channels))


class Gated(nn.Module):
    """The gated feed-forward layer of today's language models: down(silu(gate(x)) * up(x))."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(channels, hidden, bias=False), nn.Linear(channels, hidden, bias=False)
        self.down = nn.Linear(hidden, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def convolution(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, groups: int = 1, after: nn.Module | None = None
) -> nn.Sequential:
    """A convolution that keeps the image's size (but for its stride), normalised over the batch, then `after`."""
    same = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(same, nn.BatchNorm2d(outputs), *([after] if after else []))


def feed_forward(width: int, hidden: int) -> tuple[nn.Module, ...]:
    """Two linear layers with a GELU between them."""
    return nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
