"""Depthwise convolutions as plain arithmetic: each result is a window over one channel of the input.

There is nothing to multiply on tensor cores and little to multiply at all: such a convolution is bound by memory, and
what it becomes is a pointwise kernel on any device, for any floating type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, Bound, axis_index, linear
from fusepass.codegen.ir.program import Buffer, LibraryCall, Program, Ref, Role

_MOST_POINTS = 64  # of a window: its taps are written out

CONVOLUTIONS = ("aten.convolution.default", "aten._convolution.default")
"""Targets of library convolutions, whose first nine arguments mean the same. The second one is told how to compute."""


@dataclass(frozen=True)
class Depthwise:
    """A convolution of each channel by itself; the weight is (channels * copies, 1, *kernel)."""

    source: Buffer
    weight: Buffer
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


def depthwise_of(program: Program, call: LibraryCall) -> Depthwise | None:
    """The call as a convolution of each channel by itself, of inputs of the region; None where it is something else."""
    if call.target not in CONVOLUTIONS:
        return None
    source, weight, bias, stride, padding, dilation, transposed, _, groups = call.args[:9]
    operands = [program.buffer(ref.buffer) for ref in (source, weight) if isinstance(ref, Ref)]
    if transposed or bias is not None or len(operands) != 2 or groups == 1 or not program.buffer(call.result).numel:
        return None
    x, w = operands
    if any(each.role is not Role.INPUT or not each.dtype.is_float or not each.numel for each in operands):
        return None
    if groups != x.shape[1] or w.shape[1] != 1 or prod(w.shape[2:]) > _MOST_POINTS:
        return None
    spatial = len(x.shape) - 2
    return Depthwise(x, w, *(per_axis(each, spatial) for each in (stride, padding, dilation)))


def per_axis(value: object, spatial: int) -> tuple[int, ...]:
    """An argument of a convolution with one number per spatial axis, which may be one for all."""
    assert isinstance(value, tuple)
    return value * spatial if len(value) == 1 else value


def depthwise_value(builder: Builder, what: Depthwise, result: Buffer, axes: Sequence[Axis]) -> Expr:
    """The element of `result`, in its type, at `axes`, its dimensions. Taps outside of the input are not taken."""
    source, weight, dtype = what.source, what.weight, what.source.dtype.compute
    sample, channel, *positions = map(axis_index, axes)
    taps = tuple(Axis(f"{result.name}_k{number}", size) for number, size in enumerate(weight.shape[2:]))
    places = [
        position * stride - padding + axis_index(tap) * dilation
        for position, tap, stride, padding, dilation in zip(
            positions, taps, what.stride, what.padding, what.dilation, strict=True
        )
    ]
    of = channel // (weight.shape[0] // source.shape[1])
    x = builder.load(source.name, linear([sample, of, *places], source.strides), source.dtype)
    nothing = channel * 0
    w = builder.load(weight.name, linear([channel, nothing, *map(axis_index, taps)], weight.strides), weight.dtype)
    product = builder.apply(Op.MUL, builder.cast(x, dtype), builder.cast(w, dtype))
    inside = tuple(Bound(place, 0, size) for place, size in zip(places, source.shape[2:], strict=True))
    total = builder.window(ReduceOp.SUM, taps, builder.masked(inside, product, builder.const(0.0, dtype)))
    return builder.cast(total, result.dtype)
