"""Depthwise convolutions as plain arithmetic: each result is a window over one channel of the input.

There is nothing to multiply on tensor cores and little to multiply at all: such a convolution is bound by memory, and
what it becomes is a pointwise kernel on any device, for any floating type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, Index, axis_index, linear
from fusepass.codegen.ir.program import Buffer, LibraryCall, Program
from fusepass.codegen.passes.geometry import Geometry, geometry_of, within

_MOST_POINTS = 300  # of a window: threads of staged tiles have their taps written out, for up to 16 results


@dataclass(frozen=True)
class Depthwise:
    """A convolution of each channel by itself; the weight is (channels * copies, 1, *kernel), or (channels, copies, *kernel) where transposed."""

    of: Geometry

    @property
    def points(self) -> tuple[int, ...]:
        """How many taps an element has along each axis: of a transposed one, every so-manieth."""
        steps = self.of.stride if self.of.transposed else (1,) * len(self.of.stride)
        return tuple(ceil(size / step) for size, step in zip(self.of.weight.shape[2:], steps, strict=True))


def depthwise_of(program: Program, call: LibraryCall) -> Depthwise | None:
    """The call as a convolution of each channel by itself, of inputs of the region; None where it is something else."""
    of = geometry_of(program, call)
    if of is None or of.groups == 1 or of.groups != of.source.shape[1]:
        return None
    if not (of.source.dtype.is_float and of.weight.dtype.is_float) or not (of.transposed or of.weight.shape[1] == 1):
        return None
    # Which taps an element has is simple where these do not lie apart.
    simple = not of.transposed or all(1 in pair for pair in zip(of.stride, of.dilation, strict=True))
    found = Depthwise(of)
    return found if simple and prod(found.points) <= _MOST_POINTS else None


def depthwise_value(builder: Builder, what: Depthwise, result: Buffer, place: Sequence[Index]) -> Expr:
    """The element of `result`, in its type, at `place`, a position along each dimension. Taps outside of the input are not taken."""
    source, weight, dtype = what.of.source, what.of.weight, what.of.source.dtype.compute
    sample, channel, *positions = place
    points = tuple(Axis(f"{result.name}_k{number}", size) for number, size in enumerate(what.points))
    taps, places = zip(
        *(
            _tap(what.of, number, position, axis_index(point))
            for number, (position, point) in enumerate(zip(positions, points, strict=True))
        ),
        strict=True,
    )
    copies = result.shape[1] // source.shape[1]
    of = channel // copies
    x = builder.load(source.name, linear([sample, of, *places], source.strides), source.dtype)
    weights = [of, channel % copies] if what.of.transposed else [channel, channel * 0]
    w = builder.load(weight.name, linear([*weights, *taps], weight.strides), weight.dtype)
    product = builder.apply(Op.TERM, builder.cast(x, dtype), builder.cast(w, dtype))
    inside = within((*places, *taps), (*source.shape[2:], *weight.shape[2:]))
    total = builder.window(ReduceOp.SUM, points, builder.masked(inside, product, builder.const(0.0, dtype)))
    return builder.cast(total, result.dtype)


def _tap(what: Geometry, axis: int, position: Index, point: Index) -> tuple[Index, Index]:
    """The kernel position of the `point`-th tap that an element has along an axis, and the place of the input that it reads.

    Of a transposed one with a stride, these taps are those that the element's phase has; see `codegen.ir.convolution`.
    """
    stride, padding, dilation = what.stride[axis], what.padding[axis], what.dilation[axis]
    if not what.transposed:
        return point, position * stride - padding + point * dilation
    at = position + padding
    if stride == 1:  # the last tap first: windows that move as positions do are laid out in output tiles
        tap = point * -1 + (what.weight.shape[2 + axis] - 1)
        return tap, at - tap * dilation
    return at % stride + point * stride, at // stride - point
