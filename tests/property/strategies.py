"""Hypothesis strategies for the mission models: shapes, dtypes, parameters, modes and memory formats vary."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Chain(enum.Enum):
    """Which of the five models."""

    LAYER_NORM_GELU = "convt3d_layernorm_gelu_scale"
    BATCH_NORM_SUBTRACT_MEAN = "convt3d_batchnorm_submean"
    GELU_GROUP_NORM = "convt2d_gelu_groupnorm"
    SCALE_BATCH_NORM_POOL = "convt3d_scale_batchnorm_gap"
    LAYER_NORM = "layernorm"


@dataclass(frozen=True)
class Case:
    """A model with an input it accepts. `text` says how both were made, for a failure's message."""

    model: nn.Module
    input: Tensor
    text: str

    @property
    def dtype(self) -> torch.dtype:
        return self.input.dtype


class After(nn.Module):
    """Layers one after the other, and a function at the end."""

    def __init__(self, layers: list[nn.Module], function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.function(x)


@dataclass(frozen=True)
class ConvTranspose:
    """Arguments of a transposed convolution, the same along each axis but for the kernel."""

    inputs: int
    outputs: int
    kernel: tuple[int, ...]
    stride: int
    padding: int
    output_padding: int
    dilation: int
    groups: int
    bias: bool

    def layer(self) -> nn.Module:
        """The layer, 2-D or 3-D by its kernel."""
        make = nn.ConvTranspose2d if len(self.kernel) == 2 else nn.ConvTranspose3d
        return make(
            self.inputs,
            self.outputs,
            self.kernel,  # type: ignore[arg-type]
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            groups=self.groups,
            bias=self.bias,
            dilation=self.dilation,
        )

    def output_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The formula of `torch.nn.ConvTranspose3d`'s documentation."""
        return tuple(
            (size - 1) * self.stride - 2 * self.padding + self.dilation * (kernel - 1) + self.output_padding + 1
            for size, kernel in zip(sizes, self.kernel, strict=True)
        )


@st.composite
def conv_transposes(draw: st.DrawFn, axes: int) -> ConvTranspose:
    """Transposed convolutions over `axes` axes, with all their options."""
    groups = draw(st.sampled_from([1, 1, 1, 2]))
    stride = draw(st.integers(1, 3))
    return ConvTranspose(
        inputs=groups * draw(st.integers(1, 4)),
        outputs=groups * draw(st.integers(1, 4)),
        kernel=draw(st.tuples(*[st.integers(1, 4)] * axes)),
        stride=stride,
        padding=draw(st.integers(0, 2)),
        output_padding=draw(st.integers(0, stride - 1)),
        dilation=draw(st.sampled_from([1, 1, 2])),
        groups=groups,
        bias=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, chain: Chain) -> Case:
    """Models of one kind with an input; float32 is drawn half of the time."""
    axes = 2 if chain in (Chain.GELU_GROUP_NORM, Chain.LAYER_NORM) else 3
    batch = draw(st.integers(1, 3))
    sizes = draw(st.tuples(*[st.integers(1, 6)] * axes))
    if chain is Chain.LAYER_NORM:
        channels, head = draw(st.integers(1, 6)), ()
        shape: tuple[int, ...] = (batch, channels, *sizes)
    else:
        convolution = draw(conv_transposes(axes))
        channels, head = convolution.inputs, (convolution,)
        shape = (batch, convolution.outputs, *convolution.output_sizes(sizes))
        assume(min(shape) >= 1)
    training = draw(st.booleans())
    seed = draw(st.integers(0, 1000))
    dtype = draw(st.sampled_from(DTYPES) | st.just(torch.float32))
    last = draw(st.booleans())
    torch.manual_seed(seed)
    tail, text = draw(_tails(chain, shape))
    model = After([h.layer() for h in head] + tail[0], tail[1]).to(dtype).train(training)
    memory_format = _memory_format(axes, last)
    for parameter in model.parameters():
        if parameter.dim() == axes + 2:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
    x = torch.rand(batch, channels, *sizes).to(dtype).contiguous(memory_format=memory_format)
    mode = "training" if training else "evaluation"
    return Case(model, x, f"{[*head, *text]} on {dtype}{list(x.shape)}, {memory_format}, {mode}, seed {seed}")


def _memory_format(axes: int, last: bool) -> torch.memory_format:
    if not last:
        return torch.contiguous_format
    return torch.channels_last if axes == 2 else torch.channels_last_3d


Tail = tuple[list[nn.Module], Callable[[Tensor], Tensor]]


@st.composite
def _tails(draw: st.DrawFn, chain: Chain, shape: tuple[int, ...]) -> tuple[Tail, list[Any]]:
    """What follows the convolution, whose output has `shape`: layers, a last function, and both in words."""
    affine = draw(st.booleans())
    scale = draw(st.sampled_from([1.0, 2.0, -0.37]))
    approximate = draw(st.sampled_from(["none", "tanh"]))
    match chain:
        case Chain.LAYER_NORM | Chain.LAYER_NORM_GELU:
            normalised = shape[-draw(st.integers(1, len(shape) - 1)) :]
            layer = nn.LayerNorm(normalised, elementwise_affine=affine)
            if chain is Chain.LAYER_NORM:
                return ([layer], _identity), [layer]
            return ([layer], lambda x: F.gelu(x, approximate=approximate) * scale), [
                layer,
                f"gelu({approximate}) * {scale}",
            ]
        case Chain.GELU_GROUP_NORM:
            groups = draw(st.sampled_from([g for g in range(1, shape[1] + 1) if shape[1] % g == 0]))
            assume(prod(shape) // groups > 1)
            layers = [nn.GELU(approximate), nn.GroupNorm(groups, shape[1], affine=affine)]
            return (layers, _identity), layers
        case Chain.BATCH_NORM_SUBTRACT_MEAN | Chain.SCALE_BATCH_NORM_POOL:
            assume(prod(shape) // shape[1] > 1)
            tracking = draw(st.booleans())
            momentum = draw(st.sampled_from([0.1, 0.7, None]))
            norm = nn.BatchNorm3d(shape[1], affine=affine, track_running_stats=tracking, momentum=momentum)
            if chain is Chain.BATCH_NORM_SUBTRACT_MEAN:
                return ([norm], _subtract_mean), [norm, "- mean"]
            return ([_Scale(scale), norm, nn.AdaptiveAvgPool3d(1)], _identity), [scale, norm, "pool"]


class _Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _identity(x: Tensor) -> Tensor:
    return x


def _subtract_mean(x: Tensor) -> Tensor:
    return x - torch.mean(x, dim=(2, 3, 4), keepdim=True)
