"""Small models of the kinds that people write: each makes inputs for itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        make: builds it.
        inputs: positional arguments for it.
        floor: least share of its operators that must be fused, in evaluation.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    floor: float = 0.0


class Residual(nn.Module):
    """A block with a skip connection."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut, self.after = body, shortcut or nn.Identity(), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.body(x) + self.shortcut(x))


def _basic(inputs: int, outputs: int, stride: int) -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
    )  # fmt: skip
    short = (
        nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        if stride > 1
        else None
    )
    return Residual(body, short, nn.ReLU(inplace=True))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        _basic(8, 8, 1), _basic(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._double(3, 8), self._double(8, 16)])
        self.middle = self._double(16, 32)
        self.ups = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.merge = nn.ModuleList([self._double(32, 16), self._double(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.ups, self.merge, strict=True):
            x = up(x)
            skip = skips.pop()
            x = F.pad(x, (0, skip.shape[-1] - x.shape[-1], 0, skip.shape[-2] - x.shape[-2]))
            x = merge(torch.cat([skip, x], 1))
        return self.head(x).softmax(1)


class DenseBlock(nn.Module):
    def __init__(self, channels: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + i * growth), nn.ReLU(), nn.Conv2d(channels + i * growth, growth, 3, padding=1)
            )
            for i in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def densenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), DenseBlock(8, 4, 3), nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1), nn.AvgPool2d(2),
        DenseBlock(10, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(18, 5),
    )  # fmt: skip


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, rank: int = 2) -> None:
        super().__init__()
        conv = nn.Conv2d if rank == 2 else nn.Conv3d
        self.dims = tuple(range(2, 2 + rank))
        self.reduce, self.expand = conv(channels, 4, 1), conv(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean(self.dims, keepdim=True)
        return x * F.hardsigmoid(self.expand(F.relu(self.reduce(scale))))


def mobilenet() -> nn.Module:
    block = nn.Sequential(
        nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24, momentum=0.01), nn.Hardswish(inplace=True),
        nn.Conv2d(24, 24, 5, padding=2, groups=24, bias=False), nn.BatchNorm2d(24), nn.Hardswish(), SqueezeExcite(24),
        nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8),
    )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish(), Residual(block), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 16), nn.Hardswish(), nn.Dropout(0.0), nn.Linear(16, 4),
    )  # fmt: skip


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.gamma * self.narrow(F.gelu(self.wide(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 4, 4), ConvNeXtBlock(12), ConvNeXtBlock(12), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        if self.causal:
            scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
        if padding is not None:
            scores = scores + (1.0 - padding[:, None, None, :].to(scores.dtype)) * -1e4
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16) * 0.1)
        self.position = nn.Parameter(torch.randn(1, 17, 16) * 0.1)
        self.blocks = nn.Sequential(Block(16, 2, False), Block(16, 2, False))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(30, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([Block(16, 4, True), Block(16, 4, True)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).log_softmax(-1)


@dataclass
class Encoded:
    hidden: Tensor
    pooled: Tensor
    layers: tuple[Tensor, ...] = ()


class BERT(nn.Module):
    """Post-norm layers, a padding mask by keyword, results in a dict with a list inside."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(30, 16, padding_idx=0), nn.Embedding(2, 16)
        self.attention = nn.ModuleList([Attention(16, 2), Attention(16, 2)])
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(5)])
        self.mlps = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)])
        self.pool = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)

    def encode(self, ids: Tensor, mask: Tensor | None) -> Encoded:
        x = self.norms[0](self.words(ids) + self.kinds(torch.zeros_like(ids)))
        layers = [x]
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = self.norms[1 + 2 * i](x + self.drop(attention(x, mask)))
            x = self.norms[2 + 2 * i](x + self.drop(mlp(x)))
            layers.append(x)
        return Encoded(x, torch.tanh(self.pool(x[:, 0])), tuple(layers))

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        encoded = self.encode(batch["ids"], batch.get("mask"))
        return {"last": encoded.hidden, "pooled": encoded.pooled, "all": list(encoded.layers), "none": None, "n": 2}


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.rnn(x)
        return torch.tanh(self.head(y)) * 2, state


class GRUByHand(nn.Module):
    """A cell written out, run for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(6, 24), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 8)
        outputs = []
        for step in x.unbind(1):
            xr, xz, xn = self.x(step).chunk(3, -1)
            hr, hz, hn = self.h(h).chunk(3, -1)
            z = torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
            outputs.append(h)
        return torch.stack(outputs, 1)


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (16, 1, 1)), nn.ConvTranspose2d(16, 16, 4), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 8, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(4))
        self.residual = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4))
        self.skip = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4))
        self.end = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        skips: Tensor | float = 0.0
        for dilated, residual, skip in zip(self.dilated, self.residual, self.skip, strict=True):
            y = dilated(F.pad(x, (dilated.dilation[0], 0)))
            a, b = y.chunk(2, 1)
            y = torch.tanh(a) * torch.sigmoid(b)
            skips = skips + skip(y)
            x = x + residual(y)
        return self.end(F.relu(skips))


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Sequential(
            nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1), nn.BatchNorm1d(32), nn.ReLU()
        )
        self.align = nn.Linear(32, 9)
        self.head = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        first = self.local(points.transpose(1, 2)).max(2)[0]
        transform = self.align(first).view(-1, 3, 3) * 0.1 + torch.eye(3, dtype=points.dtype, device=points.device)
        moved = torch.bmm(points, transform)
        return self.head(torch.max(self.local(moved.transpose(1, 2)), 2, keepdim=False).values), transform


class VAE(nn.Module):
    """Deterministic: the noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.ELU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(128, 8)
        )
        self.decoder = nn.Sequential(
            nn.Linear(4, 128),
            nn.ELU(),
            nn.Unflatten(1, (8, 4, 4)),
            nn.ConvTranspose2d(8, 8, 4, 2, 1),
            nn.ELU(),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
        )

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, 1)
        y = torch.sigmoid(self.decoder(mean + noise * (0.5 * log_var).exp()))
        divergence = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
        return y, F.binary_cross_entropy(y, x.sigmoid(), reduction="mean") + divergence


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return (x + self.channels(self.norm2(x))).mean(1)


class Swin(nn.Module):
    """One shifted-window block: roll, partition, attention with a relative bias, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(49, 2) * 0.1)
        grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        offset = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + 3
        self.register_buffer("index", offset[..., 0] * 7 + offset[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        y = torch.roll(self.norm(x), shifts=(-2, -2), dims=(1, 2))
        y = y.view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = self.qkv(y).reshape(-1, 16, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (c // 2) ** -0.5) @ k.mT + self.table[self.index.view(-1)].view(16, 16, 2).permute(2, 0, 1)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c))
        y = y.view(n, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(n, h, w, c)
        return x + torch.roll(y, shifts=(2, 2), dims=(1, 2))


class NeRF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(4))
        self.layers = nn.ModuleList([nn.Linear(27, 16), nn.Linear(16, 16), nn.Linear(16 + 27, 16)])
        self.density, self.colour = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, points: Tensor) -> Tensor:
        angles = (points[..., None] * self.frequencies * torch.pi).flatten(-2)
        encoded = torch.cat([points, angles.sin(), angles.cos()], -1)
        h = encoded
        for i, layer in enumerate(self.layers):
            h = F.relu(layer(torch.cat([h, encoded], -1) if i == 2 else h))
        alpha = 1 - torch.exp(-F.relu(self.density(h)) * 0.1)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1] + 1e-10], 1), 1)
        return (through * alpha * torch.sigmoid(self.colour(h))).sum(1)


def squeeze_excite_3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1),
        nn.InstanceNorm3d(8, affine=True),
        nn.PReLU(8),
        SqueezeExcite(8, 3),
        nn.AvgPool3d(2),
        nn.Conv3d(8, 2, 1),
    )


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class Llama(nn.Module):
    """Rotary positions, grouped keys, SwiGLU, RMS norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(16), RMSNorm(16)
        self.q, self.kv, self.o = nn.Linear(16, 16, False), nn.Linear(16, 16, False), nn.Linear(16, 16, False)
        self.gate, self.up, self.down = nn.Linear(16, 40, False), nn.Linear(16, 40, False), nn.Linear(40, 16, False)

    def rotate(self, x: Tensor) -> Tensor:
        t, d = x.shape[-2:]
        like = {"dtype": x.dtype, "device": x.device}
        angle = torch.arange(t, **like)[:, None] * 10000.0 ** (-torch.arange(0, d, 2, **like) / d)
        angle = torch.cat([angle, angle], -1)
        a, b = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        y = self.norm1(x)
        q = self.rotate(self.q(y).view(n, t, 4, 4).transpose(1, 2))
        k, v = self.kv(y).view(n, t, 2, 2, 4).permute(2, 0, 3, 1, 4)
        k, v = (z[:, :, None].expand(n, 2, 2, t, 4).reshape(n, 4, t, 4) for z in (self.rotate(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, 16)
        x = x + self.o(y)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def parametrised() -> nn.Module:
    """Weights computed in every forward."""
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.GELU(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)),
        nn.GLU(),
    )


class ControlFlow(nn.Module):
    """Branches on shapes, flags, None and the presence of a keyword; nested containers in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, items: list[Any], scale: float = 1.0, *, bias: Tensor | None = None) -> Any:
        (x, (y, flag)) = items
        if x.shape[0] > 2:
            x = x - x.mean(0)
        if flag and self.training:
            x = F.relu(x)
        elif y is not None:
            x = x + y
        z = self.layer(x) * scale
        if bias is not None:
            z = z + bias
        return [z.sigmoid(), {"pair": (z, x), "extra": None}], z.shape[0]


class Counter(nn.Module):
    """Buffers that forward changes by hand: an average, a ring of old values, a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("ring", torch.zeros(3, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        self.average.mul_(0.9).add_(mean, alpha=0.1)
        self.ring = torch.cat([self.ring[1:], mean[None]])
        self.count += 1
        return (x - self.average) / (1 + self.ring.abs().mean(0)) * self.count


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(F.gelu(self.norm(self.a(x))))
        return y.float().softmax(-1) + x


class MoE(nn.Module):
    """A soft mixture: every expert runs, gates weigh them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return torch.stack([e(x) for e in self.experts], -1).mul(weights.unsqueeze(-2)).sum(-1)


class Yolo(nn.Module):
    """A detection head: grids, anchors, in-place slices, several scales."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Conv2d(4, 2 * 7, 1), nn.Conv2d(8, 2 * 7, 1)])
        self.register_buffer("anchors", torch.tensor([[[1.0, 2.0], [3.0, 1.5]], [[2.0, 2.0], [4.0, 5.0]]]))

    def forward(self, maps: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
        found, raw = [], []
        for x, head, anchors in zip(maps, self.heads, self.anchors, strict=True):
            n, _, h, w = x.shape
            y = head(x).view(n, 2, 7, h, w).permute(0, 1, 3, 4, 2).contiguous()
            raw.append(y)
            rows, columns = (torch.arange(extent, device=y.device) for extent in (h, w))
            gy, gx = torch.meshgrid(rows, columns, indexing="ij")
            grid = torch.stack((gx, gy), 2).to(y.dtype)
            z = y.sigmoid()
            z[..., 0:2] = (z[..., 0:2] * 2 - 0.5 + grid) * 8
            z[..., 2:4] = (z[..., 2:4] * 2) ** 2 * anchors[:, None, None, :]
            found.append(z.view(n, -1, 7))
        return torch.cat(found, 1), raw


class Upsampler(nn.Module):
    """Super resolution: pixel shuffle, bilinear skip, clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, padding_mode="reflect"),
            nn.PReLU(),
            nn.Conv2d(12, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)).clamp(0, 1)


class GNN(nn.Module):
    """A graph attention layer on a dense adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(6, 8, bias=False)
        self.source, self.target = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.weight(x)
        e = F.leaky_relu((h @ self.source)[:, None] + (h @ self.target)[None, :], 0.2)
        return F.elu(torch.where(adjacency > 0, e, torch.full_like(e, -9e15)).softmax(1) @ h)


def _images(channels: int = 3, size: int = 16, n: int = 2) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(n, channels, size, size),)


def _batch() -> tuple[Any, ...]:
    mask = torch.ones(2, 7)
    mask[1, 5:] = 0
    return ({"ids": torch.randint(1, 30, (2, 7)), "mask": mask},)


ZOO: dict[str, Entry] = {
    "resnet": Entry(resnet, _images(), 0.75),
    "unet": Entry(UNet, _images(size=13), 0.95),
    "densenet": Entry(densenet, _images(), 0.85),
    "mobilenet": Entry(mobilenet, _images(), 0.85),
    "convnext": Entry(convnext, _images(), 0.8),
    "vit": Entry(ViT, _images(), 0.55),
    "gpt": Entry(GPT, lambda: (torch.randint(0, 30, (2, 9)),), 0.7),
    "bert": Entry(BERT, _batch, 0.75),
    "lstm": Entry(LSTM, lambda: (torch.randn(3, 5, 6),), 0.35),
    "gru": Entry(GRUByHand, lambda: (torch.randn(3, 4, 6),), 0.75),
    "generator": Entry(generator, lambda: (torch.randn(3, 16),), 0.85),
    "wavenet": Entry(WaveNet, lambda: (torch.randn(2, 1, 37),), 0.85),
    "pointnet": Entry(PointNet, lambda: (torch.randn(4, 29, 3),), 0.75),
    "vae": Entry(VAE, lambda: (torch.randn(3, 1, 16, 16), torch.randn(3, 4)), 0.9),
    "mixer": Entry(Mixer, lambda: (torch.randn(2, 16, 12),), 0.8),
    "swin": Entry(Swin, lambda: (torch.randn(2, 8, 8, 8),), 0.6),
    "nerf": Entry(NeRF, lambda: (torch.randn(5, 7, 3),), 0.8),
    "squeeze_excite_3d": Entry(squeeze_excite_3d, lambda: (torch.randn(2, 2, 6, 6, 6),), 0.9),
    "llama": Entry(Llama, lambda: (torch.randn(2, 6, 16),), 0.5),
    "parametrised": Entry(parametrised, lambda: (torch.randn(5, 6),)),
    "control_flow": Entry(ControlFlow, lambda: ([torch.randn(5, 4), (torch.randn(5, 4), True)], 0.5)),
    "counter": Entry(Counter, lambda: (torch.randn(5, 6),)),
    "autocast": Entry(Autocast, lambda: (torch.randn(5, 8),)),
    "mixture": Entry(MoE, lambda: (torch.randn(5, 8),), 0.5),
    "yolo": Entry(Yolo, lambda: ((torch.randn(2, 4, 5, 5), torch.randn(2, 8, 3, 3)),)),
    "upsampler": Entry(Upsampler, _images(size=6)),
    "graph_attention": Entry(GNN, lambda: (torch.randn(9, 6), (torch.rand(9, 9) > 0.5).float())),
}
