"""Convolutions to few channels as plain arithmetic: each result is a window over all channels of the input.

A tensor core multiplies by at least 8 columns, and libraries lay convolutions out for 32 or more. With few results for each position
of the input there is little to multiply, and such a convolution comes near to what memory allows without them. Its kernel
has all results of a position as stores of their own, so that a thread has them together and the input is read once. A result of a
transposed convolution with a stride has few of the taps; those of the neighbours that belong to the same position of the input, its
*phases*, are results of one position, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.convolution import has_few_results
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, Index, axis_index, linear
from fusepass.codegen.ir.program import Buffer, Kernel, LibraryCall, Program
from fusepass.codegen.passes.axes import split_axis
from fusepass.codegen.passes.geometry import Geometry, geometry_of, within
from fusepass.codegen.passes.rewrite import rewrite_kernel


@dataclass(frozen=True)
class FewResults:
    """A convolution of all channels; the weight is (results, channels, *kernel), or (channels, results, *kernel) where transposed."""

    of: Geometry

    @property
    def phases(self) -> tuple[int, ...]:
        """Results of a position along each axis."""
        return self.of.stride if self.of.transposed else (1,) * len(self.of.stride)

    @property
    def lowest(self) -> tuple[int, ...]:
        """The first place of the input that a result has a tap for, counted from its position times the stride, or from its position."""
        if not self.of.transposed:
            return tuple(-pad for pad in self.of.padding)
        sizes = self.of.weight.shape[2:]
        return tuple(
            -((size - 1 - pad) // step) for size, pad, step in zip(sizes, self.of.padding, self.of.stride, strict=True)
        )

    @property
    def points(self) -> tuple[int, ...]:
        """Places of the input along each axis that the results of a position have taps for."""
        sizes = self.of.weight.shape[2:]
        if not self.of.transposed:
            return sizes
        highest = ((step - 1 + pad) // step for step, pad in zip(self.of.stride, self.of.padding, strict=True))
        return tuple(high - low + 1 for high, low in zip(highest, self.lowest, strict=True))


def few_results_of(program: Program, call: LibraryCall) -> FewResults | None:
    """The call as a convolution to few channels, of inputs of the region that lie along positions; None where it is something else."""
    of, result = geometry_of(program, call), program.buffer(call.result)
    if of is None or of.groups != 1 or of.source.strides[-1] != 1:
        return None
    dtype = result.dtype
    if not (dtype is DType.F32 or dtype.is_half) or any(each.dtype is not dtype for each in (of.source, of.weight)):
        return None
    found = FewResults(of)
    # Phases are results of one position where all positions have all of them, and taps of neighbouring places where none lie apart.
    whole = all(size % step == 0 for size, step in zip(result.shape[2:], found.phases, strict=True))
    if not whole or (of.transposed and max(of.dilation) > 1):
        return None
    return found if has_few_results(result.shape[1], of.weight.shape[2:], found.phases) else None


def few_results_value(builder: Builder, what: FewResults, result: Buffer, axes: Sequence[Axis]) -> Expr:
    """The element of `result`, in its type, at `axes`, its dimensions. Places outside of the input are zeros, as the library's are."""
    geometry, dtype = what.of, what.of.source.dtype.compute
    source, weight = geometry.source, geometry.weight
    sample, of, *positions = map(axis_index, axes)
    channel = Axis(f"{result.name}_c", source.shape[1])
    points = tuple(Axis(f"{result.name}_k{number}", size) for number, size in enumerate(_points(what)))
    places, taps = [], []
    for number, (position, point) in enumerate(zip(positions, map(axis_index, points[-len(positions) :]), strict=True)):
        step, low = geometry.stride[number], what.lowest[number]
        if geometry.transposed:
            place = position // step + point + low
            taps.append(position % step + geometry.padding[number] - (point + low) * step)
        else:
            place = position * step + point * geometry.dilation[number] + low
            taps.append(point)
        places.append(place)
    x = builder.load(source.name, linear([sample, axis_index(channel), *places], source.strides), source.dtype)
    between = [axis_index(channel), of] if geometry.transposed else [of, axis_index(channel)]
    w = builder.load(weight.name, linear([*between, *taps], weight.strides), weight.dtype)
    zero = builder.const(0.0, dtype)
    there = builder.masked(within(places, source.shape[2:]), builder.cast(x, dtype), zero)
    product = builder.apply(Op.MUL, there, builder.cast(w, dtype))
    taken = builder.masked(within(taps, weight.shape[2:]), product, zero)
    return builder.cast(builder.window(ReduceOp.SUM, (channel, *points), taken), result.dtype)


def _points(what: FewResults) -> tuple[int, ...]:
    """Points of a window: along two axes at least, as patches have."""
    return (1,) * (2 - len(what.points)) + what.points


def results_together(kernel: Kernel, builder: Builder, what: FewResults) -> Kernel:
    """`kernel`, whose rows are the dimensions of the result, with stores of its own for each result of a position."""
    _, of, *positions = kernel.rows
    kernel = _each(kernel, builder, of)
    for position, step in zip(positions, what.phases, strict=True):
        if step > 1:
            kernel = split_axis(kernel, builder, position, step)
            kernel = _each(kernel, builder, kernel.rows[kernel.rows.index(Axis(f"{position.name}i", step))])
    return kernel


def _each(kernel: Kernel, builder: Builder, axis: Axis) -> Kernel:
    """`kernel` without the row axis `axis`: its stores once for each place there."""
    rows = tuple(row for row in kernel.rows if row != axis)
    made = [rewrite_kernel(kernel, builder, {axis: Index(place)}) for place in range(axis.size)]
    return replace(kernel, rows=rows, stores=tuple(store for each in made for store in each.stores))
