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
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, linear
from fusepass.codegen.ir.program import Buffer, Kernel, LibraryCall, Program, Ref, Role
from fusepass.codegen.passes.axes import split_axis
from fusepass.codegen.passes.depthwise import CONVOLUTIONS, per_axis
from fusepass.codegen.passes.rewrite import rewrite_kernel


@dataclass(frozen=True)
class FewResults:
    """A convolution of all channels; the weight is (results, channels, *kernel), or (channels, results, *kernel) where `transposed`."""

    source: Buffer
    weight: Buffer
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool

    @property
    def phases(self) -> tuple[int, ...]:
        """Results of a position along each axis."""
        return self.stride if self.transposed else (1,) * len(self.stride)

    @property
    def lowest(self) -> tuple[int, ...]:
        """The first place of the input that a result has a tap for, counted from its position times the stride, or from its position."""
        if not self.transposed:
            return tuple(-pad for pad in self.padding)
        sizes = self.weight.shape[2:]
        return tuple(
            -((size - 1 - pad) // step) for size, pad, step in zip(sizes, self.padding, self.stride, strict=True)
        )

    @property
    def points(self) -> tuple[int, ...]:
        """Places of the input along each axis that the results of a position have taps for."""
        sizes = self.weight.shape[2:]
        if not self.transposed:
            return sizes
        highest = ((step - 1 + pad) // step for step, pad in zip(self.stride, self.padding, strict=True))
        return tuple(high - low + 1 for high, low in zip(highest, self.lowest, strict=True))


def few_results_of(program: Program, call: LibraryCall) -> FewResults | None:
    """The call as a convolution to few channels, of inputs of the region that lie along positions; None where it is something else."""
    if call.target not in CONVOLUTIONS:
        return None
    source, weight, bias, stride, padding, dilation, transposed, _, groups = call.args[:9]
    operands = [program.buffer(ref.buffer) for ref in (source, weight) if isinstance(ref, Ref)]
    result = program.buffer(call.result)
    if bias is not None or len(operands) != 2 or groups != 1 or not result.numel:
        return None
    x, w = operands
    if any(each.role is not Role.INPUT or each.dtype is not result.dtype or not each.numel for each in operands):
        return None
    if not (x.dtype is DType.F32 or x.dtype.is_half) or x.strides[-1] != 1:
        return None
    spatial = len(x.shape) - 2
    geometry = (per_axis(stride, spatial), per_axis(padding, spatial), per_axis(dilation, spatial))
    found = FewResults(x, w, *geometry, transposed=bool(transposed))
    # Phases are results of one position where all positions have all of them, and taps of neighbouring places where none lie apart.
    whole = all(size % step == 0 for size, step in zip(result.shape[2:], found.phases, strict=True))
    if not whole or (transposed and any(each > 1 for each in found.dilation)):
        return None
    return found if has_few_results(result.shape[1], w.shape[2:], found.phases) else None


def few_results_value(builder: Builder, what: FewResults, result: Buffer, axes: Sequence[Axis]) -> Expr:
    """The element of `result`, in its type, at `axes`, its dimensions. Places outside of the input are zeros, as the library's are."""
    source, weight, dtype = what.source, what.weight, what.source.dtype.compute
    sample, of, *positions = map(axis_index, axes)
    channel = Axis(f"{result.name}_c", source.shape[1])
    points = tuple(Axis(f"{result.name}_k{number}", size) for number, size in enumerate(_points(what)))
    places, taps = [], []
    for number, (position, point) in enumerate(zip(positions, map(axis_index, points[-len(positions) :]), strict=True)):
        step, low = what.stride[number], what.lowest[number]
        if what.transposed:
            place = position // step + point + low
            taps.append(position % step + what.padding[number] - (point + low) * step)
        else:
            place = position * step + point * what.dilation[number] + low
            taps.append(point)
        places.append(place)
    x = builder.load(source.name, linear([sample, axis_index(channel), *places], source.strides), source.dtype)
    between = [axis_index(channel), of] if what.transposed else [of, axis_index(channel)]
    w = builder.load(weight.name, linear([*between, *taps], weight.strides), weight.dtype)
    zero = builder.const(0.0, dtype)
    there = builder.masked(_inside(places, source.shape[2:]), builder.cast(x, dtype), zero)
    product = builder.apply(Op.MUL, there, builder.cast(w, dtype))
    taken = builder.masked(_inside(taps, weight.shape[2:]), product, zero)
    return builder.cast(builder.window(ReduceOp.SUM, (channel, *points), taken), result.dtype)


def _points(what: FewResults) -> tuple[int, ...]:
    """Points of a window: along two axes at least, as patches have."""
    return (1,) * (2 - len(what.points)) + what.points


def _inside(indices: Sequence[Index], sizes: Sequence[int]) -> tuple[Bound, ...]:
    return tuple(Bound(index, 0, size) for index, size in zip(indices, sizes, strict=True))


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
