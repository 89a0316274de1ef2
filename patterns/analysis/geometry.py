"""Which elements a convolution multiplies with which weights, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fusepass.patterns.arguments import arguments

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """The window of a pool along a dimension."""

    size: int
    stride: int

    def reach(self, count: int) -> int:
        """How many elements `count` windows extend over."""
        return (count - 1) * self.stride + self.size


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution.

    Attributes:
        extent, kernel, out: the sizes of the input, of the weight and of the result along it.
        stride, padding, dilation: as `aten.convolution` takes them.
        transposed: whether the convolution is.
    """

    extent: int
    kernel: int
    out: int
    stride: int
    padding: int
    dilation: int
    transposed: bool

    def read(self, tap: int) -> range:
        """The positions in the input that weight `tap` is multiplied with, over all positions of the result.

        A convolution reads ``out * stride + tap * dilation - padding``; a transposed one adds position ``i`` of the
        input to ``i * stride + tap * dilation - padding`` of the result. What falls outside is not there.
        """
        offset = tap * self.dilation - self.padding
        inside = self.out if self.transposed else self.extent
        first = max(0, -(offset // self.stride))  # the smallest n with n * stride + offset >= 0
        stop = min(self.extent if self.transposed else self.out, (inside - 1 - offset) // self.stride + 1)
        if stop <= first:
            return range(0)
        if self.transposed:
            return range(first, stop)
        return range(first * self.stride + offset, (stop - 1) * self.stride + offset + 1, self.stride)


@dataclass(frozen=True)
class Geometry:
    """How a convolution moves over its input: one number for each spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def arguments(self) -> tuple[object, ...]:
        """What ``aten.convolution`` takes after input, weight and bias."""
        lists = (list(self.stride), list(self.padding), list(self.dilation))
        return (*lists, self.transposed, list(self.output_padding), self.groups)

    def only(self, axes: Sequence[int], groups: int) -> Geometry:
        """The same on some of the axes; without any, at a single position."""

        def pick(values: tuple[int, ...], default: int) -> tuple[int, ...]:
            return tuple(values[axis] for axis in axes) or (default,)

        picked = (pick(self.stride, 1), pick(self.padding, 0), pick(self.dilation, 1))
        return Geometry(*picked, self.transposed, pick(self.output_padding, 0), groups)


@dataclass(frozen=True)
class Convolution:
    """A call of ``aten.convolution``, transposed or not.

    Attributes:
        node: the call; ``[samples, channels, *spatial]``.
        x: its input, with samples.
        weight: ``[out, in / groups, *kernel]``, transposed ``[in, out / groups, *kernel]``.
        bias: ``[out]`` or None.
        geometry: its other arguments.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    geometry: Geometry

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(self.node.meta["val"].shape)

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.shape) - 2

    def axis(self, number: int) -> Axis:
        """A spatial axis; the first is 0."""
        extent, kernel, out = (part.meta["val"].shape[2 + number] for part in (self.x, self.weight, self.node))
        how = self.geometry
        return Axis(extent, kernel, out, how.stride[number], how.padding[number], how.dilation[number], how.transposed)

    @staticmethod
    def of(node: fx.Node) -> Convolution | None:
        """The convolution that `node` calls, if it does."""
        if node.target is not aten.convolution.default:
            return None
        given = arguments(node)
        x, weight = (given[name].meta["val"].shape for name in ("input", "weight"))
        rank = len(weight) - 2
        if len(x) != len(weight) or rank < 1:
            return None
        geometry = Geometry(
            stride=_each(given["stride"], rank),
            padding=_each(given["padding"], rank),
            dilation=_each(given["dilation"], rank),
            transposed=given["transposed"],
            output_padding=_each(given["output_padding"], rank),
            groups=given["groups"],
        )
        return Convolution(node, given["input"], given["weight"], given["bias"], geometry)


def _each(values: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(values) * rank if len(values) == 1 else tuple(values)
