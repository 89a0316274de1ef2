"""Reductions in a kernel of their own: in pieces where rows are few and long, or where reads and writes are laid out differently.

Few long rows do not fill a device: their reductions are done in pieces by one kernel and merged by a second. A third, pointwise
kernel then does what happened per element. Pieces are whole axes or equal parts of one, merged in a fixed order, so results do not
depend on timing; what is left of an axis behind equal parts goes into the merge, element by element. Where what is read and what is
written are contiguous along different axes, the same pointwise kernel stands alone behind the reduction: it can exchange tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp, Stat, children, own_indices, walk
from fusepass.codegen.ir.index import Axis, Bound, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Reduction, Role, Store
from fusepass.codegen.passes.axes import count, merge_columns, read_and_written_along, split_axis
from fusepass.codegen.passes.rewrite import Leaf, rewrite_kernel
from fusepass.codegen.passes.statistics import online

_SHORT_ROW = 512  # elements; a block has several such rows, and exchanges tiles of them
_SHORT_COLUMN = 256  # elements; so, where rows, not columns, are contiguous as they are read

_LEAST_PART = 8  # parts of an axis as many times as large as what their length is a multiple of
_VECTOR = 8  # elements
_ALIGNED = (64, 32, 16, _VECTOR, 4, 2)

_MERGE = {ReduceOp.MOMENTS: ReduceOp.MERGE_MOMENTS, ReduceOp.SOFTMAX: ReduceOp.MERGE_SOFTMAX}


@dataclass(frozen=True)
class SplitPolicy:
    """When rows are split.

    Attributes:
        workers: pieces that should run at once to fill the device.
        least_piece: elements a piece keeps at least.
        lanes: neighbouring rows that one worker takes together where rows, not columns, are contiguous in memory.
        least_of_scans: pieces that a row of a running reduction has at least, as these are read twice.
        stays: whether a kernel keeps its rows on the chip until it needs them again; pieces are read again.
    """

    workers: int
    least_piece: int
    lanes: int
    least_of_scans: int = 6
    stays: Callable[[Program, Kernel], bool] = lambda program, kernel: False

    def pieces(self, program: Program, kernel: Kernel) -> int:
        """How many pieces each row should have; 1 leaves the kernel alone."""
        if kernel.is_pointwise or kernel.row_count == 0 or kernel.team is not None or kernel.anchor is not None:
            return 1
        if kernel.when is not None or kernel.cluster > 1:  # it seldom runs, or has blocks enough
            return 1
        together = min(self.lanes, _rows_side_by_side(program, kernel))
        working = -(-kernel.row_count // together)
        if working >= self.workers or self.stays(program, kernel):
            return 1
        return max(min(-(-self.workers // working), kernel.col_count * together // self.least_piece), 1)


def _rows_side_by_side(program: Program, kernel: Kernel) -> int:
    """How many rows lie side by side in the largest buffer read; 1 where its columns are contiguous."""
    largest = max(kernel.loads(), key=lambda load: program.buffer(load.buffer).nbytes, default=None)
    beside = 1
    if largest is not None:
        steps = {step: axis for axis in kernel.rows if axis.size > 1 and (step := largest.index.stride(axis))}
        while (axis := steps.pop(beside, None)) is not None:
            beside *= axis.size
    return beside


def split_long_rows(program: Program, builder: Builder, policy: SplitPolicy) -> Program:
    """Apply `policy` to every kernel."""
    work = Splitter(program, builder)
    for kernel in program.kernels:
        pieces = 1 if kernel.scans else policy.pieces(program, kernel)
        # Each sweep of pieces reads everything again: the fewer the better.
        whole = online(merge_columns(kernel, builder), builder) if pieces > 1 else kernel
        cut = _cut(whole, builder, pieces) if pieces > 1 else None
        if cut is None:
            work.kernels.append(kernel)
        else:
            work.split(whole, cut)
    return replace(program, buffers=tuple(work.buffers), kernels=tuple(work.kernels))


def separate_layouts(program: Program, builder: Builder, least: int | None) -> Program:
    """Kernels of at least `least` elements that read along one axis and write per element along another: what is per
    element gets a kernel of its own. Nothing changes where `least` is None."""
    if least is None:
        return program
    work = Splitter(program, builder)
    for kernel in program.kernels:
        large = kernel.row_count * kernel.col_count >= least
        free = kernel.team is None and kernel.anchor is None and kernel.when is None and kernel.cluster == 1
        free = free and not kernel.scans
        if large and free and kernel.sweeps and kernel.stores and is_mixed(program, kernel):
            work.separate(kernel)
        else:
            work.kernels.append(kernel)
    return replace(program, buffers=tuple(work.buffers), kernels=tuple(work.kernels))


def is_mixed(program: Program, kernel: Kernel) -> bool:
    """Whether the largest buffers that are read and written disagree on the nearest axis, and a block cannot have both."""
    read, written = read_and_written_along(program, kernel)
    if read is None or written is None or read == written:
        return False
    if read in kernel.rows:
        return written in kernel.cols and kernel.col_count > _SHORT_COLUMN
    return kernel.col_count > _SHORT_ROW


@dataclass(frozen=True)
class Cut:
    """How the rows of a kernel fall into pieces.

    Attributes:
        pieces: columns of `kernel` that tell pieces apart.
        kernel: the kernel with columns of which that can be said; without the last elements where there is a `rest`.
        axis: the column that has a rest: of the original kernel, whose other columns are those of `kernel`.
        start: its first point that lies in no piece.
    """

    pieces: tuple[Axis, ...]
    kernel: Kernel
    axis: Axis | None = None
    start: int = 0


def _cut(kernel: Kernel, builder: Builder, pieces: int) -> Cut | None:
    """About as many `pieces`: whole axes, from the slowest on, and parts of one. None where rows are too short for that."""
    chosen: list[Axis] = []
    several = [axis for axis in kernel.cols if axis.size > 1]
    for axis in several:
        left = -(-pieces // count(tuple(chosen)))
        if left == 1:
            break
        if axis.size > 2 * left:
            others = kernel.col_count // axis.size // count(tuple(chosen))
            part = equal_parts(axis.size, left, others)
            cut = split_axis(kernel, builder, axis, part)
            outer = Axis(f"{axis.name}o", axis.size // part)
            rest = axis if axis.size % part else None
            return Cut((*chosen, outer), cut, rest, outer.size * part)
        if len(chosen) + 1 < len(several):
            chosen.append(axis)
    return Cut(tuple(chosen), kernel) if chosen else None


def equal_parts(size: int, wanted: int, others: int = 1, *, least_left: int = 1) -> int:
    """The length of about `wanted` equal parts of an axis: such that few elements are left, each of them `others` times, or none.

    If elements are left, these are `least_left` or more; the length is `size` where that cannot be. A length is a multiple of a vector's
    unless it divides the axis; parts of an aligned row are aligned then.
    """
    short = size < _LEAST_PART * _VECTOR * wanted
    equal = [parts for parts in range(-(-3 * wanted // 4), 2 * wanted + 1) if size % parts == 0]
    equal = [parts for parts in equal if short or others > 1 or size // parts % _VECTOR == 0]
    if equal:
        return size // min(equal, key=lambda parts: max(parts / wanted, wanted / parts))
    unit = next((unit for unit in _ALIGNED if size // (2 * wanted) >= _LEAST_PART * unit), 1)
    lengths = [size // parts // unit * unit for parts in range(wanted, 2 * wanted + 1)]
    lengths = [length for length in lengths if length > 1 and not 0 < size % length < least_left]
    return min(lengths, key=lambda length: size % length, default=size)


class Splitter:
    """Makes the kernels that a kernel with reductions is split into.

    Attributes:
        buffers: of the program, with the temporaries that were added.
        kernels: the finished ones, in order.
        parts: for each reduction of the sweep at hand, what its merging reduction takes of a piece.
    """

    def __init__(self, program: Program, builder: Builder) -> None:
        self.buffers = list(program.buffers)
        self.kernels: list[Kernel] = []
        self.builder = builder
        self.parts: dict[str, tuple[Expr, ...]] = {}

    def split(self, kernel: Kernel, cut: Cut) -> None:
        """Partial and merging kernels per sweep; then, if anything happens per element, a pointwise kernel."""
        stats: dict[int, Expr] = {}
        for sweep, partial in zip(kernel.sweeps, cut.kernel.sweeps, strict=True):
            self._partial(cut.kernel, partial, cut.pieces, stats)
            pieces = self._with_rest(kernel, sweep, cut)
            if sweep is kernel.sweeps[-1]:
                self.merge_last(kernel, pieces, stats)
            else:
                stats |= self.merge_early(kernel, sweep, pieces, stats)

    def separate(self, kernel: Kernel) -> None:
        """The reductions, then a pointwise kernel for what happens per element."""
        loads, stores = self.temporaries("row", row_scalars(kernel), kernel.rows)
        self.kernels.append(replace(kernel, row_stores=(*stores, *kernel.row_stores), stores=()))
        self._apply(kernel, loads)

    def compute(self, kernel: Kernel, values: Sequence[Expr]) -> None:
        """A pointwise kernel for `values` that are reduced, then the reductions."""
        rows = (*kernel.rows, *kernel.cols)
        loads, stores = self.temporaries("value", values, rows)
        computed = replace(kernel, rows=rows, cols=(), sweeps=(), row_stores=(), stores=tuple(stores))
        self.kernels += [
            replace(computed, name=f"{kernel.name}_values"),
            rewrite_kernel(kernel, self.builder, leaf=forward(loads)),
        ]

    def merge_early(
        self, kernel: Kernel, sweep: tuple[Reduction, ...], pieces: tuple[Axis, ...], stats: dict[int, Expr]
    ) -> dict[int, Expr]:
        """A kernel that merges the `parts` of a sweep that is not the last; what later sweeps and stores use of it, as loads."""
        loads, stores = self.temporaries("stat", _stats_used(kernel, after=sweep), kernel.rows)
        self._merge(kernel, sweep, pieces, stores, stats)
        return loads

    def merge_last(self, kernel: Kernel, pieces: tuple[Axis, ...], stats: dict[int, Expr]) -> None:
        """A kernel that merges the `parts` of the last sweep and stores per row; a pointwise one for what happens per element."""
        loads, stores = self.temporaries("row", row_scalars(kernel), kernel.rows)
        self._merge(kernel, kernel.sweeps[-1], pieces, [*stores, *kernel.row_stores], stats)
        if kernel.stores:
            self._apply(kernel, loads)

    def _apply(self, kernel: Kernel, scalars: dict[int, Expr]) -> None:
        """What `kernel` does per element, its `scalars` per row loaded from temporaries."""
        rows = (*kernel.rows, *kernel.cols)
        apply = replace(kernel, name=f"{kernel.name}_apply", rows=rows, cols=(), sweeps=(), row_stores=())
        # One scalar may be part of another: the larger first, while it is still itself.
        for scalar, load in reversed(scalars.items()):
            apply = rewrite_kernel(apply, self.builder, leaf=forward({scalar: load}))
        self.kernels.append(apply)

    def _partial(
        self, kernel: Kernel, sweep: tuple[Reduction, ...], pieces: tuple[Axis, ...], stats: dict[int, Expr]
    ) -> None:
        """Each piece's own result, to a temporary per part."""
        rows, rest = (*kernel.rows, *pieces), tuple(axis for axis in kernel.cols if axis not in pieces)
        stores: list[Store] = []
        for reduction in sweep:
            # How many values a piece has is known, but for pieces of pieces.
            known = reduction.op is not ReduceOp.MERGE_MOMENTS
            stores += self.keep(reduction, rows, count(rest) if known else None)
        partial = replace(
            kernel, name=f"{kernel.name}_{sweep[0].name}_partial", rows=rows, cols=rest, sweeps=(sweep,),
            row_stores=tuple(stores), stores=(),
        )  # fmt: skip
        self.kernels.append(rewrite_kernel(partial, self.builder, leaf=forward(stats)))

    def keep(self, reduction: Reduction, rows: tuple[Axis, ...], values: int | None) -> list[Store]:
        """Stores of a partial result of so many `values`, if that is known, to temporaries; `parts` has how to read them."""
        counted = reduction.op.kept > reduction.op.parts
        numbers = reduction.op.parts if values is not None else reduction.op.kept
        loads, stores = self.temporaries(
            f"{reduction.name}_part", [self._stat(reduction, part) for part in range(numbers)], rows
        )
        parts = tuple(loads.values())
        if counted:
            known = None if values is None else self.builder.const(values, reduction.dtype)
            parts = (known or parts[2], *parts[:2])
        self.parts[reduction.name] = parts
        return stores

    def _with_rest(self, kernel: Kernel, sweep: tuple[Reduction, ...], cut: Cut) -> tuple[Axis, ...]:
        """The columns of the kernel that merges `sweep`: the pieces, and the elements in none, each as a piece of its own."""
        if cut.axis is None:
            return cut.pieces
        *others, outer = cut.pieces
        inner = [axis for axis in kernel.cols if axis not in (*others, cut.axis)]
        left = (cut.axis.size - cut.start) * count(tuple(inner))
        both = Axis(f"{outer.name}_rest", outer.size + left)
        behind, where = axis_index(both) - outer.size, {}
        for axis in reversed(inner):
            behind, where[axis] = behind // axis.size, behind % axis.size
        where[cut.axis] = behind + cut.start
        in_piece = (Bound(axis_index(both), 0, outer.size),)
        in_none = (Bound(axis_index(both), outer.size, both.size),)
        for reduction in sweep:
            values = [self.builder.rewrite(value, where) for value in _as_piece(reduction, self.builder)]
            parts = [self.builder.rewrite(part, {outer: axis_index(both)}) for part in self.parts[reduction.name]]
            self.parts[reduction.name] = tuple(
                self.builder.masked(
                    in_piece, part, self.builder.masked(in_none, value, self.builder.const(0, value.dtype))
                )
                for part, value in zip(parts, values, strict=True)
            )
        return (*others, both)

    def _merge(
        self,
        kernel: Kernel,
        sweep: tuple[Reduction, ...],
        pieces: tuple[Axis, ...],
        stores: list[Store],
        stats: dict[int, Expr],
    ) -> None:
        merged = tuple(replace(each, op=_MERGE.get(each.op, each.op), values=self.parts[each.name]) for each in sweep)
        merge = replace(
            kernel, name=f"{kernel.name}_{sweep[0].name}_merge", cols=pieces, sweeps=(merged,),
            row_stores=tuple(stores), stores=(),
        )  # fmt: skip
        self.kernels.append(rewrite_kernel(merge, self.builder, leaf=forward(stats)))

    def _stat(self, reduction: Reduction, part: int) -> Expr:
        dtype = DType.I64 if reduction.op.gives_position(part) else reduction.dtype
        return self.builder.stat(reduction.name, part, dtype)

    def temporaries(
        self, name: str, values: Sequence[Expr], axes: tuple[Axis, ...]
    ) -> tuple[dict[int, Expr], list[Store]]:
        """A temporary per value with one element per point of `axes`: how to read each (by node), how to write each."""
        sizes = tuple(axis.size for axis in axes)
        strides = contiguous_strides(sizes)
        where = linear([axis_index(axis) for axis in axes], strides)
        loads, stores = {}, []
        for value in values:
            buffer = Buffer(self._unused(name), value.dtype, sizes, strides, Role.TEMP)
            self.buffers.append(buffer)
            loads[id(value)] = self.builder.load(buffer.name, where, value.dtype)
            stores.append(Store(buffer.name, where, value))
        return loads, stores

    def _unused(self, name: str) -> str:
        taken = {buffer.name for buffer in self.buffers}
        names = (f"{name}_{number}" for number in itertools.count(len(self.buffers)))
        return next(unused for unused in names if unused not in taken)


def _as_piece(reduction: Reduction, builder: Builder) -> tuple[Expr, ...]:
    """What a piece of one element would have found, as what merges pieces takes it."""
    match reduction.op:
        case ReduceOp.MOMENTS:
            (value,) = reduction.values
            return builder.const(1, value.dtype), value, builder.apply(Op.SUB, value, value)
        case ReduceOp.SOFTMAX:
            (value,) = reduction.values
            lowest, zero = builder.const(-math.inf, value.dtype), builder.const(0, value.dtype)
            shift = builder.apply(Op.WHERE, builder.apply(Op.EQ, value, lowest, dtype=DType.BOOL), zero, value)
            return value, builder.apply(Op.EXP, builder.apply(Op.SUB, value, shift))
        case _:
            return reduction.values


def forward(loads: dict[int, Expr]) -> Leaf:
    return lambda node: loads.get(id(node))


def _stats_used(kernel: Kernel, after: tuple[Reduction, ...]) -> list[Expr]:
    """The stats of sweep `after` that later sweeps or stores use."""
    names = {reduction.name for reduction in after}
    later = kernel.sweeps[kernel.sweeps.index(after) + 1 :]
    roots = [value for sweep in later for reduction in sweep for value in reduction.values]
    roots += [store.value for store in (*kernel.row_stores, *kernel.stores)]
    return [node for node in walk(*roots) if isinstance(node, Stat) and node.reduction in names]


def row_scalars(kernel: Kernel) -> list[Expr]:
    """Largest expressions of the element stores that depend on stats and row axes alone, and on at least one stat."""
    rows = set(kernel.rows)
    info: dict[int, tuple[bool, bool]] = {}
    nodes = list(walk(*(store.value for store in kernel.stores)))
    for node in nodes:
        axes: set[Axis] = {axis for index in own_indices(node) for axis in index.axes}
        below = [info[id(child)] for child in children(node)]
        info[id(node)] = (
            axes <= rows and all(flat for flat, _ in below),
            isinstance(node, Stat) or any(has for _, has in below),
        )
    good = {id(node) for node in nodes if all(info[id(node)])}
    inner = {id(child) for node in nodes if id(node) in good for child in children(node)}
    used_elsewhere = {id(child) for node in nodes if id(node) not in good for child in children(node)}
    roots = {id(store.value) for store in kernel.stores}
    return [
        node for node in nodes
        if id(node) in good and (id(node) not in inner or id(node) in used_elsewhere or id(node) in roots)
    ]  # fmt: skip
