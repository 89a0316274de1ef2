"""Networks of attention, and blocks of them: language models, images as sequences of patches, two sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.blocks import Attention, CausalAttention, Gated, Residual
from benchmarks.layers import Apply, Group, Input, Workload

_BFLOAT16 = torch.bfloat16
_ROWS, _FEW = (16, 512, 768), (2, 5, 24)


class _MaskedAttention(Attention):
    """Attention in which nothing looks ahead, as people write it by hand."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, channels = x.shape
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-2, -1) / (channels // self.heads) ** 0.5).masked_fill(~seen, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, channels))


class _MultiHead(nn.MultiheadAttention):
    """PyTorch's module as it is called most often: it computes the weights, too, which nobody uses."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        value: Tensor = super().forward(x, x, x)[0]
        return value


class _LinearAttention(Attention):
    """Attention whose softmax is replaced by positive features of keys and queries: keys and values come together first."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, channels = x.shape
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        total = q @ k.sum(-2).unsqueeze(-1)
        return self.out((q @ (k.transpose(-2, -1) @ v) / total).transpose(1, 2).reshape(n, length, channels))


class _CrossAttention(nn.Module):
    """Queries of one sequence meet keys and values of another."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(channels)
        self.q, self.kv, self.out = (nn.Linear(channels, count * channels) for count in (1, 2, 1))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.q(self.norm(x)), *self.kv(context).chunk(2, -1))
        )
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _RotaryAttention(nn.Module):
    """Causal attention of today's language models: rotated queries and keys, several queries for each key."""

    def __init__(self, channels: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.width = heads, shared, channels // heads
        self.q, self.out = nn.Linear(channels, channels, bias=False), nn.Linear(channels, channels, bias=False)
        self.kv = nn.Linear(channels, 2 * shared * self.width, bias=False)

    def _rotated(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
        frequency = 10000.0 ** -(torch.arange(0, self.width, 2, device=x.device, dtype=torch.float32) / self.width)
        angle = torch.cat([position[:, None] * frequency] * 2, -1)
        first, second = x.chunk(2, -1)
        return x * angle.cos().to(x.dtype) + torch.cat([-second, first], -1) * angle.sin().to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        k, v = (y.unflatten(-1, (self.shared, self.width)).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
        k, v = (y.repeat_interleave(self.heads // self.shared, 1) for y in (self._rotated(k), v))
        y = F.scaled_dot_product_attention(self._rotated(q), k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class _WindowAttention(nn.Module):
    """Attention inside windows of an image (N, H, W, C) that is rolled by half of one, with a bias for each pair of places."""

    def __init__(self, channels: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.side = heads, side
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.bias = nn.Parameter(torch.randn(heads, side * side, side * side))

    def forward(self, x: Tensor) -> Tensor:
        n, height, width, channels = x.shape
        rows, columns, half = height // self.side, width // self.side, self.side // 2
        y = x.roll((-half, -half), (1, 2)).view(n, rows, self.side, columns, self.side, channels)
        y = self.qkv(y.transpose(2, 3).reshape(-1, self.side * self.side, channels))
        q, k, v = y.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + self.bias).softmax(-1)
        y = self.out((weights @ v).transpose(1, 2).reshape(-1, self.side * self.side, channels))
        y = y.view(n, rows, columns, self.side, self.side, channels).transpose(2, 3)
        return y.reshape(n, height, width, channels).roll((half, half), (1, 2))


def _layer(width: int, attention: nn.Module) -> tuple[nn.Module, ...]:
    """A transformer's layer that normalises first."""
    return (
        Residual(nn.LayerNorm(width), attention),
        Residual(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)),
    )


def _gpt(width: int, heads: int, layers: int) -> tuple[nn.Module, ...]:
    return tuple(m for _ in range(layers) for m in _layer(width, CausalAttention(width, heads)))


def _llama(width: int, heads: int, shared: int, hidden: int) -> tuple[nn.Module, ...]:
    return (
        Residual(nn.RMSNorm(width), _RotaryAttention(width, heads, shared)),
        Residual(nn.RMSNorm(width), Gated(width, hidden)),
    )


class _Tokens(nn.Module):
    """Embeddings of tokens (N, L) and of their places, added."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))


class _Patches(nn.Module):
    """An image as a sequence of patches behind a token of its class, each with an embedding of its place."""

    def __init__(self, side: int, count: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, side, side)
        self.kind, self.places = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, count + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.project(x).flatten(2).transpose(1, 2)
        return torch.cat([self.kind.expand(x.shape[0], -1, -1), patches], 1) + self.places


# A table, as in workloads.py.
# fmt: off
TRANSFORMERS = tuple(Workload(name, layers, *shapes, Group.NETWORKS, *more) for name, layers, shapes, *more in (
    ("gpt_layers", lambda s: _gpt(s.of(768), 12, 2), (_ROWS, _FEW)),
    ("bfloat16_gpt_layers", lambda s: _gpt(s.of(768), 12, 4), ((16, 1024, 768), _FEW), _BFLOAT16),
    ("bfloat16_gpt_layers_one_prompt", lambda s: _gpt(s.of(768), 12, 4), ((1, 128, 768), (1, 5, 24)), _BFLOAT16),
    ("gpt_attention_by_hand", lambda s: (Residual(nn.LayerNorm(s.of(768)), _MaskedAttention(s.of(768), 12)),), (_ROWS, _FEW)),
    ("bfloat16_gpt_attention_by_hand", lambda s: (Residual(nn.LayerNorm(s.of(768)), _MaskedAttention(s.of(768), 12)),),
        (_ROWS, _FEW), _BFLOAT16),
    ("half_attention_by_hand", lambda s: (Attention(s.of(1024), 16),), ((8, 1024, 1024), (2, 5, 32)), torch.float16),
    ("bfloat16_multihead_attention", lambda s: (_MultiHead(s.of(1024), 16, batch_first=True),), ((8, 1024, 1024), (2, 5, 32)),
        _BFLOAT16),
    ("gpt_of_tokens", lambda s: (
        _Tokens(s.of(50272), s.of(1024), s.of(768)), *_gpt(s.of(768), 12, 1), nn.LayerNorm(s.of(768)),
        nn.Linear(s.of(768), s.of(50272), bias=False)), (
        (Input((8, 512), 50272),), (Input((2, 5), 1571),))),
    ("bert_embeddings", lambda s: (_Tokens(s.of(30528), s.of(512), s.of(768)), nn.LayerNorm(s.of(768))), (
        (Input((64, 512), 30528),), (Input((2, 5), 954),))),
    ("encoder_layer", lambda s: (
        nn.TransformerEncoderLayer(s.of(1024), 8, s.of(4096), dropout=0.0, batch_first=True),),
        ((16, 512, 1024), (2, 5, 32))),
    ("bfloat16_llama_layer", lambda s: _llama(s.of(2048), 16, 4, s.of(5632)), ((8, 1024, 2048), (2, 5, 64)), _BFLOAT16),
    ("vit", lambda s: (
        _Patches(16, s.of(196), s.of(512)), *_gpt(s.of(512), 8, 4), nn.LayerNorm(s.of(512)),
        Apply(lambda x: x[:, 0]), nn.Linear(s.of(512), 10)), ((32, 3, 224, 224), (2, 3, 32, 48))),
    ("swin_attention", lambda s: (Residual(nn.LayerNorm(s.of(128)), _WindowAttention(s.of(128), 4, 7)),),
        ((32, 56, 56, 128), (2, 7, 14, 4))),
    ("bfloat16_swin_attention", lambda s: (Residual(nn.LayerNorm(s.of(128)), _WindowAttention(s.of(128), 4, 7)),),
        ((32, 56, 56, 128), (2, 7, 14, 4)), _BFLOAT16),
    ("linear_attention", lambda s: (_LinearAttention(s.of(768), 12),), (_ROWS, _FEW)),
    ("cross_attention", lambda s: (_CrossAttention(s.of(1024), 16),), (
        (Input((16, 1024, 1024)), Input((16, 128, 1024))), (Input((2, 5, 32)), Input((2, 3, 32))))),
))
# fmt: on
