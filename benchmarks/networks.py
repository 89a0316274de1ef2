"""Networks and blocks of them: of plain layers, recurrences and tables here, the others in files of their own.

They are a group of their own, outside of the usual run: ``python benchmarks/run.py --group networks``. As with `CHAINS`, they
show what a model can expect that is not among the others: a network as a whole, and not a chain of it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.blocks import Residual, feed_forward
from benchmarks.convolutional import CONVOLUTIONAL
from benchmarks.layers import Apply, Group, Input, Workload
from benchmarks.transformers import TRANSFORMERS


class _DilatedGate(nn.Module):
    """A layer of WaveNet: tanh times sigmoid of one convolution, added to the input."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.both = nn.Conv1d(channels, 2 * channels, 3, padding=dilation, dilation=dilation)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = self.both(x).chunk(2, 1)
        return x + self.out(torch.tanh(signal) * torch.sigmoid(gate))


def _dilated(channels: int, dilation: int) -> tuple[nn.Module, ...]:
    return nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation), nn.BatchNorm1d(channels), nn.ReLU()


def _points(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """The same layer for each point of a cloud."""
    return nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs), nn.ReLU()


class _Transposed(nn.Sequential):
    """Layers along the second axis of (N, L, C)."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x.transpose(1, 2))
        return result.transpose(1, 2)


def _mixer(length: int, width: int) -> tuple[nn.Module, ...]:
    return (
        Residual(nn.LayerNorm(width), _Transposed(*feed_forward(length, 2 * length))),
        Residual(nn.LayerNorm(width), *feed_forward(width, 4 * width)),
    )


class _StateSpace(nn.Module):
    """The diagonal blocks of Mamba-2 over (N, L, H, P): what decays with time is a matrix of weights for each chunk."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x, decay, b, c = (y.unflatten(1, (-1, self.chunk)) for y in (x, decay, b, c))
        total = torch.cumsum(-decay.permute(0, 1, 3, 2), -1)
        seen = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=x.device).tril()
        weights = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, float("-inf")).exp()
        scores = torch.einsum("nklhs,nkmhs->nkhlm", c, b) * weights
        return torch.einsum("nkhlm,nkmhp->nklhp", scores, x).flatten(1, 2)


class _Recurrent(nn.Module):
    """What a recurrent layer of the library makes of a sequence, without its state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


class _LSTMByHand(nn.Module):
    """A recurrence written as a loop over (N, L, C)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.given, self.recurrent = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], self.recurrent.in_features)
        for step in self.given(x).unbind(1):
            i, f, g, o = (step + self.recurrent(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


class _NetVLAD(nn.Module):
    """Differences of local features (N, L, C) from the centres of soft clusters, summed and normalised twice."""

    def __init__(self, width: int, clusters: int) -> None:
        super().__init__()
        self.assign, self.norm = nn.Linear(width, clusters, bias=False), nn.BatchNorm1d(clusters)
        self.centres = nn.Parameter(0.1 * torch.randn(width, clusters))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.norm(self.assign(x).flatten(0, 1)).softmax(-1).unflatten(0, x.shape[:2])
        sums = x.transpose(1, 2) @ weights - self.centres * weights.sum(1, keepdim=True)
        return F.normalize(F.normalize(sums, dim=1).flatten(1), dim=1)


def _columns(fields: int, vocabulary: int, width: int, hidden: int) -> tuple[nn.Module, ...]:
    """The deep part of DeepFM: embeddings of a table's columns through plain layers."""
    return (
        nn.Embedding(vocabulary, width), nn.Flatten(), nn.Linear(fields * width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 1),
    )  # fmt: skip


class _Interactions(nn.Module):
    """DLRM: products of every pair of embeddings, beside what plain layers make of numbers."""

    def __init__(self, numbers: int, fields: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.numbers = nn.Sequential(nn.Linear(numbers, width), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(width + (fields + 1) ** 2, width), nn.ReLU(), nn.Linear(width, 1), nn.Sigmoid()
        )

    def forward(self, numbers: Tensor, fields: Tensor) -> Tensor:
        dense = self.numbers(numbers)
        every = torch.cat([dense[:, None], self.embed(fields)], 1)
        return self.top(torch.cat([dense, (every @ every.transpose(1, 2)).flatten(1)], 1))


class _Waves(nn.Module):
    """Sines and cosines of coordinates, at doubling frequencies."""

    def __init__(self, octaves: int) -> None:
        super().__init__()
        self.octaves = octaves

    def forward(self, x: Tensor) -> Tensor:
        angles = [x * 2.0**k for k in range(self.octaves)]
        return torch.cat([x, *(wave(angle) for angle in angles for wave in (torch.sin, torch.cos))], -1)


class _GraphConvolution(nn.Module):
    """Features of a graph's nodes, averaged over neighbours by a dense adjacency."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1e-6).rsqrt()
        average = degree * adjacency * degree.transpose(-2, -1)
        hidden = F.relu(average @ self.first(x))
        return (average @ self.second(hidden)).log_softmax(-1)


class _Variational(nn.Module):
    """A variational autoencoder, its noise given."""

    def __init__(self, width: int, hidden: int, latent: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.Sigmoid())

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, logarithm = self.encode(x).chunk(2, -1)
        return self.decode(mean + noise * torch.exp(0.5 * logarithm))


def _plain(*widths: int) -> tuple[nn.Module, ...]:
    """Linear layers with ReLU between them."""
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return tuple(layers[:-1])


# A table, as in workloads.py.
# fmt: off
_OTHERS = tuple(Workload(name, layers, *shapes, Group.NETWORKS, *more) for name, layers, shapes, *more in (
    ("mlp", lambda s: _plain(s.of(4096), s.of(8192), s.of(8192), s.of(4096)), ((1024, 4096), (4, 128))),
    ("mlp_of_many_layers", lambda s: _plain(*[s.of(1024)] * 18), ((1024, 1024), (4, 32))),
    ("mlp_mixer", lambda s: tuple(m for _ in range(2) for m in _mixer(s.of(224), s.of(512))), ((64, 224, 512), (2, 7, 16))),
    ("nerf", lambda s: (_Waves(10), *_plain(63, s.of(256), s.of(256), s.of(256), s.of(256), 4)), ((65536, 3), (17, 3))),
    ("variational_autoencoder", lambda s: (_Variational(784, s.of(512), s.of(64)),), (
        (Input((8192, 784)), Input((8192, 64))), (Input((3, 784)), Input((3, 2))))),
    ("graph_convolutions", lambda s: (_GraphConvolution(s.of(1024), s.of(256), 7),), (
        (Input((4096, 1024)), Input((4096, 4096))), (Input((9, 32)), Input((9, 9))))),
    ("table_of_columns", lambda s: _columns(39, s.of(100000), 16, s.of(416)), (
        (Input((8192, 39), 100000),), (Input((6, 39), 3125),))),
    ("interactions_of_columns", lambda s: (_Interactions(13, 26, s.of(100000), s.of(64)),), (
        (Input((8192, 13)), Input((8192, 26), 100000)), (Input((4, 13)), Input((4, 26), 3125)))),
    ("netvlad", lambda s: (_NetVLAD(s.of(512), 32),), ((256, 100, 512), (2, 9, 16))),
    ("pointnet", lambda s: (
        *_points(3, s.of(64)), *_points(s.of(64), s.of(128)), *_points(s.of(128), s.of(1024)),
        Apply(lambda x: x.amax(-1)), *_plain(s.of(1024), s.of(256), 40)), ((64, 3, 4096), (3, 3, 20))),
    ("temporal_convolutions", lambda s: tuple(m for k in range(5) for m in _dilated(s.of(64), 2**k)),
        ((32, 64, 16384), (2, 2, 40))),
    ("wavenet_layers", lambda s: tuple(_DilatedGate(s.of(64), 2**k) for k in range(4)), ((8, 64, 16384), (2, 2, 24))),
    ("gru", lambda s: (_Recurrent(nn.GRU(s.of(256), s.of(512), 2, batch_first=True)),), ((32, 256, 256), (2, 5, 8))),
    ("lstm", lambda s: (_Recurrent(nn.LSTM(s.of(256), s.of(512), 2, batch_first=True)),), ((32, 256, 256), (2, 5, 8))),
    ("lstm_by_hand", lambda s: (_LSTMByHand(s.of(256), s.of(512)),), ((256, 16, 256), (2, 3, 8))),
    ("state_space_chunks", lambda s: (_StateSpace(s.of(64)),), (
        tuple(map(Input, ((16, 512, 8, 64), (16, 512, 8), (16, 512, 8, 16), (16, 512, 8, 16)))),
        tuple(map(Input, ((2, 6, 2, 4), (2, 6, 2), (2, 6, 2, 3), (2, 6, 2, 3)))))),
))
# fmt: on

NETWORKS = CONVOLUTIONAL + TRANSFORMERS + _OTHERS
"""In the order in which they are measured."""
