"""Workloads drawn at random: operators, and chains behind a convolution or a linear layer, on shapes that nobody chose.

What is tuned for named workloads may be slow beside them. ``python benchmarks/run.py --drawn 7:100`` measures the first hundred of seed 7.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from operator import add, mul

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.layers import Apply, Group, Input, Size, With, Workload

Made = tuple[Sequence[nn.Module], tuple[Input, ...]]
"""Layers, and what the first of them takes."""

_DTYPES = (torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16)
_ELEMENTS = {Size.FULL: (2**21, 2**26), Size.REDUCED: (2**8, 2**10)}
_MULTIPLY_ADDS = {Size.FULL: (2**29, 2**36), Size.REDUCED: (2**12, 2**15)}
_ACTIVATIONS = (
    F.relu, F.gelu, F.silu, F.mish, F.hardswish, F.softplus, F.elu, torch.tanh, torch.sigmoid, torch.abs, torch.square,
)  # fmt: skip
_CONVOLUTIONS = {
    False: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    True: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Draw:
    """What is drawn for one workload at one size; the same for the same seed and number."""

    def __init__(self, seed: int, number: int, size: Size) -> None:
        self.random = random.Random(f"{seed} {number}")
        self.size = size

    def length(self, low: int, high: int) -> int:
        """Between both, as likely as its logarithm; half of the time one with few digits in base two."""
        found = round(math.exp(self.random.uniform(math.log(low), math.log(max(high, low)))))
        digits = self.random.choice((0, 0, 1, 2, 4, 4))
        unit = 1 << max(found.bit_length() - digits, 0) if digits else 1
        return max(found // unit * unit, low)

    def between(self, bounds: dict[Size, tuple[int, int]]) -> int:
        low, high = bounds[self.size]
        return round(math.exp(self.random.uniform(math.log(low), math.log(high))))

    def shape(self, rank: int) -> tuple[int, ...]:
        """Sizes of which each may be the large one."""
        left, sizes = self.between(_ELEMENTS), [1] * rank
        *others, last = self.random.sample(range(rank), rank)
        for dim in others:
            sizes[dim] = self.length(1, max(int(left ** self.random.uniform(0.1, 0.7)), 1))
            left = max(left // sizes[dim], 1)
        sizes[last] = max(left, 2)
        return tuple(sizes)

    def image(self) -> tuple[int, ...]:
        """Samples, channels, and images that are about square, at least 8 x 8."""
        samples, channels, elements = self.length(1, 64), self.length(1, 256), self.between(_ELEMENTS)
        side = max(math.isqrt(elements // (samples * channels)), 8)
        return samples, channels, side, max(side + self.random.choice((0, 0, 0, 1, -1, side // 2)), 8)

    def activation(self) -> Callable[[Tensor], Tensor]:
        return self.random.choice(_ACTIVATIONS)


# ---- single operators


def _of_dim(operator: Callable[..., Tensor], draw: Draw) -> Made:
    shape = draw.shape(draw.random.choice((2, 2, 3, 4)))
    dim = draw.random.choice([dim for dim, size in enumerate(shape) if size > 1])
    before = [Apply(draw.activation())] if draw.random.random() < 0.4 else []
    return [*before, Apply(partial(operator, dim=dim))], (Input(shape),)


def _of_last(norm: Callable[[int], nn.Module], draw: Draw) -> Made:
    shape = draw.shape(draw.random.choice((2, 3)))
    return [norm(shape[-1]), Apply(draw.activation())], (Input(shape),)


def _of_images(layer: Callable[[Draw, int], nn.Module], draw: Draw) -> Made:
    shape = draw.image()
    return [layer(draw, shape[1]), Apply(draw.activation())], (Input(shape),)


def _of_pairs(loss: Callable[[Tensor, Tensor], Tensor], draw: Draw) -> Made:
    shape = draw.shape(2)
    return [Apply(loss)], (Input(shape), Input(shape))


def _of_kinds(draw: Draw) -> Made:
    samples, kinds = draw.shape(2)
    return [Apply(F.cross_entropy)], (Input((samples, kinds)), Input((samples,), below=kinds))


def _group_norm(draw: Draw, channels: int) -> nn.Module:
    return nn.GroupNorm(draw.random.choice([n for n in (1, 2, 4, 8, 32) if channels % n == 0]), channels)


def _pool(draw: Draw, channels: int) -> nn.Module:
    kind, window = draw.random.choice((nn.MaxPool2d, nn.AvgPool2d)), draw.random.choice((2, 3, 5))
    return kind(window, draw.random.choice((1, 2, window)), draw.random.choice((0, window // 2)))


def _normalised(x: Tensor, dim: int) -> Tensor:
    return (x - x.mean(dim, keepdim=True)) / (x.std(dim, keepdim=True, correction=0) + 1e-5)


def _gated(x: Tensor, dim: int) -> Tensor:
    return F.glu(x.narrow(dim, 0, x.shape[dim] // 2 * 2), dim)


def _hinge(x: Tensor, y: Tensor) -> Tensor:
    return (1 - x * y).clamp(min=0).mean()


SINGLE: dict[str, Callable[[Draw], Made]] = {
    "softmax": partial(_of_dim, torch.softmax),
    "log_softmax": partial(_of_dim, torch.log_softmax),
    "logsumexp": partial(_of_dim, torch.logsumexp),
    "sum": partial(_of_dim, torch.sum),
    "mean": partial(_of_dim, partial(torch.mean, keepdim=True)),
    "maximum": partial(_of_dim, torch.amax),
    "variance": partial(_of_dim, partial(torch.var, correction=0)),
    "normalised": partial(_of_dim, _normalised),
    "unit": partial(_of_dim, F.normalize),
    "cumsum": partial(_of_dim, torch.cumsum),
    "gated": partial(_of_dim, _gated),
    "flip": partial(_of_dim, lambda x, dim: x.flip(dim)),
    "roll": partial(_of_dim, lambda x, dim: x.roll(max(x.shape[dim] // 3, 1), dim)),
    "cat": partial(_of_dim, lambda x, dim: torch.cat((x, x.narrow(dim, 0, 1)), dim)),
    "turned": partial(_of_dim, lambda x, dim: x.transpose(dim, -1).clone(memory_format=torch.contiguous_format)),
    "layer_norm": partial(_of_last, nn.LayerNorm),
    "rms_norm": partial(_of_last, nn.RMSNorm),
    "group_norm": partial(_of_images, _group_norm),
    "instance_norm": partial(_of_images, lambda draw, channels: nn.InstanceNorm2d(channels)),
    "batch_norm": partial(_of_images, lambda draw, channels: nn.BatchNorm2d(channels)),
    "pool": partial(_of_images, _pool),
    "adaptive_pool": partial(_of_images, lambda draw, channels: nn.AdaptiveAvgPool2d(draw.random.choice((1, 2, 3, 7)))),
    "upsample": partial(
        _of_images, lambda draw, channels: nn.Upsample(scale_factor=2, mode=draw.random.choice(("nearest", "bilinear")))
    ),
    "bias": partial(_of_images, lambda draw, channels: With(add, channels, 1, 1)),
    "mse": partial(_of_pairs, F.mse_loss),
    "hinge": partial(_of_pairs, _hinge),
    "cosine": partial(_of_pairs, F.cosine_similarity),
    "cross_entropy": _of_kinds,
}
"""Operators by what they are called in names of workloads."""

# ---- chains


def _linear(draw: Draw) -> tuple[nn.Module, int, int, tuple[int, ...]]:
    widest = 4096 if draw.size is Size.FULL else 32
    inside, outside = draw.length(4, widest), draw.length(2, widest)
    rows = max(min(draw.between(_MULTIPLY_ADDS) // (inside * outside), 2**17), 4)
    return nn.Linear(inside, outside), outside, 0, (rows, inside)


def _convolution(draw: Draw) -> tuple[nn.Module, int, int, tuple[int, ...]]:
    transposed, axes = draw.random.random() < 0.25, draw.random.choice((1, 2, 2, 2, 2, 3))
    widest = 256 if draw.size is Size.FULL else 16
    inside, outside = draw.length(3, widest), draw.length(3, widest)
    window = draw.random.choice((1, 3, 3, 3, 5, 7) if axes < 3 else (2, 3))
    stride, padding = draw.random.choice((1, 1, 2)), draw.random.choice((0, window // 2))
    groups = draw.random.choice((1, 1, 1, 1, 1, inside))
    outside = inside if groups > 1 else outside
    points = max(draw.between(_MULTIPLY_ADDS) * groups // (inside * outside * window**axes), 16)
    points = min(points, 2**27 // max(inside, outside))
    side = max(min(round((points / draw.length(1, 32)) ** (1 / axes)), {1: 2**16, 2: 512, 3: 64}[axes]), window + 1)
    layer = _CONVOLUTIONS[transposed][axes - 1](inside, outside, window, stride, padding, groups=groups)
    sides = (side, *(max(side + draw.random.choice((0, 0, 1)), window) for _ in range(axes - 1)))
    return layer, outside, axes, (max(points // side**axes, 2), inside, *sides)


def _follower(draw: Draw, channels: int, axes: int) -> nn.Module:
    """What keeps the number of channels, and of axes."""
    dim = 1 if axes else -1
    kinds: list[Callable[[], nn.Module]] = [
        lambda: Apply(draw.activation()),
        lambda: Apply(draw.activation()),
        lambda: With(draw.random.choice((add, mul)), channels, *[1] * axes),
        lambda: Apply(partial(torch.softmax, dim=dim)),
        lambda: Apply(partial(torch.clamp, min=-1.0, max=0.5)),
        (lambda: _BATCH_NORMS[axes - 1](channels)) if axes else (lambda: nn.LayerNorm(channels)),
        (lambda: _group_norm(draw, channels)) if axes else (lambda: nn.BatchNorm1d(channels)),
    ]
    return draw.random.choice(kinds)()


def _chain(anchor: Callable[[Draw], tuple[nn.Module, int, int, tuple[int, ...]]], draw: Draw) -> Made:
    layer, channels, axes, shape = anchor(draw)
    behind = [_follower(draw, channels, axes) for _ in range(draw.random.choice((1, 2, 2, 3)))]
    if draw.random.random() < 0.3:
        dims = tuple(range(2, 2 + axes)) or (1,)
        behind.append(Apply(partial(torch.mean, dim=dims, keepdim=True)))
    return [layer, *behind], (Input(shape),)


CHAINS: dict[str, Callable[[Draw], Made]] = {
    "convolution": partial(_chain, _convolution),
    "linear": partial(_chain, _linear),
}


def drawn(seed: int, number: int) -> Workload:
    """Workload `number` of those that `seed` gives; three in five are single operators."""
    chooser = random.Random(f"kind {seed} {number}")
    among = SINGLE if chooser.random() < 0.6 else CHAINS
    name = chooser.choice([*among])
    dtype, training = chooser.choice(_DTYPES), chooser.random() < 0.5

    def made(size: Size) -> Made:
        with torch.device("meta"):
            return among[name](Draw(seed, number, size))

    def layers(size: Size) -> tuple[nn.Module, ...]:
        return tuple(among[name](Draw(seed, number, size))[0])

    inputs = {size: made(size)[1] for size in Size}
    return Workload(
        f"drawn_{seed}_{number}_{name}", layers, inputs[Size.FULL], inputs[Size.REDUCED], Group.DRAWN, dtype, training
    )


def called(name: str) -> Workload:
    """The workload that has `name`."""
    _, seed, number, _ = name.split("_", 3)
    return drawn(int(seed), int(number))
