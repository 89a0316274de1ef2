"""Depthwise convolutions as plain arithmetic: each result is a window over one channel of the input.

There is nothing to multiply on tensor cores and little to multiply at all: such a convolution is bound by memory, and
what it becomes is a pointwise kernel on any device, for any floating type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, linear
from fusepass.codegen.ir.program import Buffer, LibraryCall, Program, Ref, Role

_MOST_POINTS = 64  # of a window: its taps are written out

CONVOLUTIONS = ("aten.convolution.default", "aten._convolution.default")
"""Targets of library convolutions, whose first nine arguments mean the same. The second one is told how to compute."""


@dataclass(frozen=True)
class Depthwise:
    """A convolution of each channel by itself; the weight is (channels * copies, 1, *kernel), or (channels, copies, *kernel) where `transposed`."""

    source: Buffer
    weight: Buffer
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool

    @property
    def points(self) -> tuple[int, ...]:
        """How many taps an element has along each axis: of a transposed one, every so-manieth."""
        steps = self.stride if self.transposed else (1,) * len(self.stride)
        return tuple(ceil(size / step) for size, step in zip(self.weight.shape[2:], steps, strict=True))


def depthwise_of(program: Program, call: LibraryCall) -> Depthwise | None:
    """The call as a convolution of each channel by itself, of inputs of the region; None where it is something else."""
    if call.target not in CONVOLUTIONS:
        return None
    source, weight, bias, stride, padding, dilation, transposed, _, groups = call.args[:9]
    operands = [program.buffer(ref.buffer) for ref in (source, weight) if isinstance(ref, Ref)]
    if bias is not None or len(operands) != 2 or groups == 1 or not program.buffer(call.result).numel:
        return None
    x, w = operands
    if any(each.role is not Role.INPUT or not each.dtype.is_float or not each.numel for each in operands):
        return None
    spatial = len(x.shape) - 2
    geometry = (per_axis(stride, spatial), per_axis(padding, spatial), per_axis(dilation, spatial))
    found = Depthwise(x, w, *geometry, transposed=bool(transposed))
    if groups != x.shape[1] or not (transposed or w.shape[1] == 1) or prod(found.points) > _MOST_POINTS:
        return None
    # Which taps an element has is simple where these do not lie apart.
    simple = not transposed or all(1 in pair for pair in zip(found.stride, found.dilation, strict=True))
    return found if simple else None


def per_axis(value: object, spatial: int) -> tuple[int, ...]:
    """An argument of a convolution with one number per spatial axis, which may be one for all."""
    assert isinstance(value, tuple)
    return value * spatial if len(value) == 1 else value


def depthwise_value(builder: Builder, what: Depthwise, result: Buffer, axes: Sequence[Axis]) -> Expr:
    """The element of `result`, in its type, at `axes`, its dimensions. Taps outside of the input are not taken."""
    source, weight, dtype = what.source, what.weight, what.source.dtype.compute
    sample, channel, *positions = map(axis_index, axes)
    points = tuple(Axis(f"{result.name}_k{number}", size) for number, size in enumerate(what.points))
    taps, places = zip(
        *(
            _tap(what, number, position, axis_index(point))
            for number, (position, point) in enumerate(zip(positions, points, strict=True))
        ),
        strict=True,
    )
    copies = result.shape[1] // source.shape[1]
    of = channel // copies
    x = builder.load(source.name, linear([sample, of, *places], source.strides), source.dtype)
    weights = [of, channel % copies] if what.transposed else [channel, channel * 0]
    w = builder.load(weight.name, linear([*weights, *taps], weight.strides), weight.dtype)
    product = builder.apply(Op.MUL, builder.cast(x, dtype), builder.cast(w, dtype))
    inside = tuple(
        Bound(index, 0, size)
        for index, size in zip((*places, *taps), (*source.shape[2:], *weight.shape[2:]), strict=True)
    )
    total = builder.window(ReduceOp.SUM, points, builder.masked(inside, product, builder.const(0.0, dtype)))
    return builder.cast(total, result.dtype)


def _tap(what: Depthwise, axis: int, position: Index, point: Index) -> tuple[Index, Index]:
    """The kernel position of the `point`-th tap that an element has along an axis, and the place of the input that it reads.

    Of a transposed one with a stride, these taps are those that the element's phase has; see `codegen.ir.convolution`.
    """
    stride, padding, dilation = what.stride[axis], what.padding[axis], what.dilation[axis]
    if not what.transposed:
        return point, position * stride - padding + point * dilation
    at = position + padding
    if stride == 1:
        return point, at - point * dilation
    return at % stride + point * stride, at // stride - point
