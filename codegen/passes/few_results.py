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
from fusepass.codegen.ir.expr import Builder, Expr, Load, Op, ReduceOp, Window, walk
from fusepass.codegen.ir.index import Axis, axis_index, linear
from fusepass.codegen.ir.program import Buffer, Kernel, LibraryCall, Program, Reduction
from fusepass.codegen.passes.axes import each_place, split_axis
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
    # Phases are results of one position where some have all of them, and taps of neighbouring places where none lie apart.
    some = all(size >= step for size, step in zip(result.shape[2:], found.phases, strict=True))
    if not some or (of.transposed and max(of.dilation) > 1):
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
    product = builder.apply(Op.TERM, there, builder.cast(w, dtype))
    taken = builder.masked(within(taps, weight.shape[2:]), product, zero)
    return builder.cast(builder.window(ReduceOp.SUM, (channel, *points), taken), result.dtype)


def _points(what: FewResults) -> tuple[int, ...]:
    """Points of a window: along two axes at least, as output tiles have."""
    return (1,) * (2 - len(what.points)) + what.points


def results_together(kernel: Kernel, builder: Builder, what: FewResults) -> tuple[Kernel, ...]:
    """`kernel`, whose rows are the dimensions of the result, with stores of its own for each result of a position; behind it what computes,
    one by one, results at the end of an axis that no position has all phases of."""
    _, of, *positions = kernel.rows
    rest: list[Kernel] = []
    for position, step in zip(positions, what.phases, strict=True):
        whole = Axis(position.name, position.size - position.size % step)
        if whole != position:
            left = Axis(f"{position.name}_left", position.size % step)
            behind = _moved(kernel, builder, position, left, whole.size)
            rest.append(replace(_by_channel(behind, builder, what), name=f"{kernel.name}_{position.name}", rest=True))
            kernel = _moved(kernel, builder, position, whole, 0)
    kernel = each_place(kernel, builder, of)
    for position, step in zip(kernel.rows[1:], what.phases, strict=True):
        if step > 1:
            kernel = split_axis(kernel, builder, position, step)
            kernel = each_place(kernel, builder, Axis(f"{position.name}i", step))
    return kernel, *rest


def _moved(kernel: Kernel, builder: Builder, axis: Axis, part: Axis, start: int) -> Kernel:
    """`kernel` with a `part` of the row axis `axis`, from `start` on, in its place."""
    rows = tuple(part if row == axis else row for row in kernel.rows)
    return replace(rewrite_kernel(kernel, builder, {axis: axis_index(part) + start}), rows=rows)


def _by_channel(kernel: Kernel, builder: Builder, what: FewResults) -> Kernel:
    """`kernel` with the convolution's channels as columns, so that threads share what one would do alone in a kernel of few results."""
    windows = (node for node in kernel.nodes if isinstance(node, Window))
    window = next(each for each in windows if any(_is_weight(node, what) for node in walk(each)))
    channel, *points = window.axes
    products = builder.window(window.op, tuple(points), window.value)
    total = Reduction(f"{kernel.name}_sum", ReduceOp.SUM, (products,), window.dtype)
    stat = builder.reduction_result(total.name, 0, window.dtype)
    summed = rewrite_kernel(kernel, builder, leaf=lambda node: stat if node is window else None)
    return replace(summed, cols=(channel,), reduction_loops=((total,),), row_stores=summed.stores, stores=())


def _is_weight(node: Expr, what: FewResults) -> bool:
    return isinstance(node, Load) and node.buffer == what.of.weight.name
