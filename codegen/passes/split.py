"""Reductions in a kernel of their own: in pieces where rows are few and long, or where reads and writes are laid out differently.

Few long rows do not fill a device: their reductions are done in pieces by one kernel and merged by a second. A third, pointwise
kernel then does what happened per element. What it could load instead of computing it again, as it is stored anyway, the pieces store.
Pieces are whole axes or equal parts of one, merged in a fixed order, so results do not depend on timing; what is left of an axis behind
equal parts goes into the merge, element by element. Where what is read and what is written are contiguous along different axes, the
same pointwise kernel stands alone behind the reduction: it can exchange tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.dataflow import phases
from fusepass.codegen.ir.expr import Builder, Expr, Gather, Load, ReductionResult, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program, Store
from fusepass.codegen.ir.tile import ACROSS_BYTES, SECTOR
from fusepass.codegen.ir.transpose import along_windows
from fusepass.codegen.passes.axes import count, merge_columns, nearest, read_and_written_along, split_axis
from fusepass.codegen.passes.fuse import ElementRules, fuse_elements, has_windows, may_store, meets_elements
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.splitter import Cut, Splitter, forward
from fusepass.codegen.passes.statistics import online
from fusepass.codegen.passes.stored import readable

_OF_THE_LONGEST = 4
"""Pieces of rows that what happens per element joins have this part of the longest row that it may join."""

_OF_THE_STORED = 4
"""Pieces store per element where that saves reading so large a part of what they store."""

_SHORT_ROW = 1024  # elements; a block has several such rows, and exchanges tiles of them
_SHORT_COLUMN = 512  # elements; so, where rows, not columns, are contiguous as they are read

_LEAST_PART = 8  # parts of an axis as many times as large as what their length is a multiple of
_VECTOR = 8  # elements
_ALIGNED = (64, 32, 16, _VECTOR, 4, 2)


@dataclass(frozen=True)
class SplitPolicy:
    """When rows are split.

    Attributes:
        workers: pieces that should run at once to fill the device.
        least_piece: elements a piece keeps at least.
        lanes: neighbouring rows that one worker takes together where rows, not columns, are contiguous in memory.
        column_workers: pieces of so many rows that should run where these are whole vectors, or fewer rows that are a power of two; None for as
            many as `workers`.
        least_of_scans: pieces that a row of a running reduction has at least, as these are read twice.
        stays: whether a kernel keeps its rows on the chip until it needs them again; pieces are read again.
    """

    workers: int
    least_piece: int
    lanes: int
    column_workers: int | None = None
    least_of_scans: int = 6
    stays: Callable[[Program, Kernel], bool] = lambda program, kernel: False

    def pieces(self, program: Program, kernel: Kernel) -> int:
        """How many pieces each row should have; 1 leaves the kernel alone."""
        if kernel.is_pointwise or kernel.row_count == 0 or kernel.team is not None or kernel.anchor is not None:
            return 1
        # It has blocks enough, or seldom runs.
        if kernel.partials is not None or kernel.when is not None:
            return 1
        beside = _rows_side_by_side(program, kernel)
        together = min(self.lanes, beside)
        working = -(-kernel.row_count // together)
        if working >= self.workers or self.stays(program, kernel):
            return 1
        whole = together.bit_count() == 1 if together < self.lanes else beside % _VECTOR == 0
        vectors = together > 1 and whole and not kernel.scans
        wanted = self.column_workers if vectors and self.column_workers else self.workers
        return max(min(-(-wanted // working), kernel.col_count * together // self.least_piece), 1)


def _rows_side_by_side(program: Program, kernel: Kernel) -> int:
    """How many rows lie side by side in the largest buffer read; 1 where its columns are contiguous."""
    largest = max(kernel.loads(), key=lambda load: program.buffer(load.buffer).nbytes, default=None)
    beside = 1
    if largest is not None:
        steps = {step: axis for axis in kernel.rows if axis.size > 1 and (step := largest.index.stride(axis))}
        while (axis := steps.pop(beside, None)) is not None:
            beside *= axis.size
    return beside


def split_long_rows(
    program: Program, builder: Builder, policy: SplitPolicy, elements: ElementRules | None = None
) -> Program:
    """Apply `policy` to every kernel. By the rules of `elements`, pieces store what happens per element, and are shorter for that."""
    work = Splitter(program, builder)
    for kernel in program.kernels:
        pieces = 1 if kernel.scans else policy.pieces(program, kernel)
        found = _in_pieces(program, builder, kernel, pieces, elements) if pieces > 1 else None
        if found is None:
            work.kernels.append(kernel)
        else:
            work.split(*found)
    split = replace(program, buffers=tuple(work.buffers), kernels=tuple(work.kernels))
    return split if elements is None else fuse_elements(split, builder, elements)


def _in_pieces(
    program: Program, builder: Builder, kernel: Kernel, pieces: int, elements: ElementRules | None
) -> tuple[Kernel, Cut] | None:
    """`kernel` as it is to be split, and how; None where rows are too short for so many `pieces`."""
    # Each reduction loop of pieces reads everything again: the fewer the better.
    kernel = online(merge_columns(kernel, builder), builder)
    along = nearest(program, kernel)
    longest = 0 if elements is None else elements.longest(program, kernel)
    shorter = max(pieces, -(-kernel.col_count * _OF_THE_LONGEST // longest)) if longest else pieces
    if elements is not None and elements.in_pieces and longest and _saves_reading(program, builder, kernel):
        cut = _cut(kernel, builder, shorter, along)
        if cut is not None and cut.axis is None:
            stores, later = _stored_first(program, builder, cut.kernel)
            if may_store(program, cut.piece, stores, elements):
                return _stored_first(program, builder, kernel)[1], replace(cut, kernel=later, stores=stores)
    cut = _cut(kernel, builder, shorter if meets_elements(program, kernel) else pieces, along)
    return None if cut is None else (kernel, cut)


def _saves_reading(program: Program, builder: Builder, kernel: Kernel) -> bool:
    """Whether the kernels that `kernel` is split into read clearly less if the first of them stores what it can per element."""
    if has_windows(kernel):
        return False
    stores, later = _stored_first(program, builder, kernel)
    first, *others = phases(later)
    stored = sum(program.buffer(store.buffer).nbytes for store in stores)
    less = _bytes_read(program, phases(kernel))
    less -= _bytes_read(program, [(*first, *(store.value for store in stores)), *others])
    return bool(stores) and less * _OF_THE_STORED >= stored


def _stored_first(program: Program, builder: Builder, kernel: Kernel) -> tuple[tuple[Store, ...], Kernel]:
    """What `kernel` stores per element that needs no reduction, and the kernel without these stores, which loads it behind its first reduction loop.

    A half that is loaded so is rounded before it is reduced, as in eager: else a maximum might be of nothing that is loaded.
    """
    early = {
        store.buffer: store
        for store in kernel.stores
        if not any(isinstance(n, ReductionResult) for n in walk(store.value))
    }
    late = tuple(store for store in kernel.stores if store.buffer not in early)
    first = replace(kernel, reduction_loops=kernel.reduction_loops[:1], row_stores=(), stores=tuple(early.values()))
    later = replace(kernel, reduction_loops=kernel.reduction_loops[1:], row_stores=(), stores=late)
    order = {id(node): number for number, node in enumerate(kernel.nodes)}
    # One value may be part of another: the larger first, while it is still itself.
    for name, store in sorted(early.items(), key=lambda item: -order[id(item[1].value)]):
        value, dtype = store.value, program.buffer(name).dtype
        rounded, load = builder.cast(value, dtype), builder.load(name, store.index, dtype)
        made = any(isinstance(node, Load | Gather) for node in walk(value))
        loading = rewrite_kernel(later, builder, leaf=forward({id(value): builder.cast(load, value.dtype)}))
        if made and name in loading.reads and any(readable(program, value, dtype, kernel.writes)):
            first = rewrite_kernel(first, builder, leaf=forward({id(value): builder.cast(rounded, value.dtype)}))
            stores = (replace(each, value=rounded) if each.buffer == name else each for each in first.stores)
            first, later = replace(first, stores=tuple(stores)), loading
    return first.stores, replace(
        kernel, reduction_loops=(*first.reduction_loops, *later.reduction_loops), stores=later.stores
    )


def _bytes_read(program: Program, kernels: Iterable[Sequence[Expr]]) -> int:
    """By kernels that each compute some expressions per element: of a buffer no more than it has."""
    return sum(sum(program.loaded(walk(*roots)).values()) for roots in kernels)


def separate_layouts(program: Program, builder: Builder, least: int | None) -> Program:
    """Kernels of at least `least` elements that read along one axis and write per element along another: what is per
    element gets a kernel of its own, and so do the stores that cross windows. Nothing changes where `least` is None."""
    if least is None:
        return program
    work = Splitter(program, builder)
    for kernel in program.kernels:
        large = kernel.row_count * kernel.col_count >= least
        free = kernel.team is None and kernel.anchor is None and kernel.when is None
        if large and free and kernel.is_pointwise and kernel.overflow_flag is None and has_windows(kernel):
            work.store_along(kernel, along_windows(kernel, program) or nearest(program, kernel))
            continue
        free = free and kernel.partials is None and not kernel.scans
        if large and free and kernel.reduction_loops and kernel.stores and is_mixed(program, kernel):
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
    sizes = [program.buffer(store.buffer).dtype.nbytes for store in kernel.stores]
    rows = SECTOR // min(sizes)  # of a block, at least
    return kernel.col_count > _SHORT_ROW or sum(sizes) * rows * kernel.col_count > ACROSS_BYTES


def _cut(kernel: Kernel, builder: Builder, pieces: int, along: Axis | None) -> Cut | None:
    """About as many `pieces`: whole axes, from the slowest on, and parts of one. None where rows are too short for that.

    What is read has neighbours `along` an axis.
    """
    chosen: list[Axis] = []
    several = [axis for axis in kernel.cols if axis.size > 1]
    for axis in several:
        left = -(-pieces // count(tuple(chosen)))
        if left == 1:
            break
        if axis.size > 2 * left:
            others = kernel.col_count // axis.size // count(tuple(chosen))
            one = kernel.row_count * count(tuple(chosen)) == 1
            aligned = one or axis.size % 2 == 0  # others begin anywhere, and so do their pieces
            whole = along in kernel.cols and others == 1 and aligned
            part = equal_parts(axis.size, left, whole_vectors=whole)
            cut = split_axis(kernel, builder, axis, part)
            outer = Axis(f"{axis.name}o", axis.size // part)
            rest = axis if axis.size % part else None
            return Cut((*chosen, outer), cut, rest, outer.size * part)
        if len(chosen) + 1 < len(several):
            chosen.append(axis)
    return Cut(tuple(chosen), kernel) if chosen else None


def equal_parts(size: int, wanted: int, *, whole_vectors: bool = True, least_left: int = 1) -> int:
    """The length of about `wanted` equal parts of an axis: such that few elements are left, or none.

    If elements are left, these are `least_left` or more; the length is `size` where that cannot be. A length is a multiple of a vector's
    unless it divides the axis, or the axis is short; with `whole_vectors` also then, so that parts of an aligned row are aligned.
    """
    short = size < _LEAST_PART * _VECTOR * wanted
    equal = [parts for parts in range(-(-3 * wanted // 4), 2 * wanted + 1) if size % parts == 0]
    equal = [parts for parts in equal if short or not whole_vectors or size // parts % _VECTOR == 0]
    if equal:
        return size // min(equal, key=lambda parts: max(parts / wanted, wanted / parts))
    unit = next((unit for unit in _ALIGNED if size // (2 * wanted) >= _LEAST_PART * unit), 1)
    lengths = [size // parts // unit * unit for parts in range(wanted, 2 * wanted + 1)]
    lengths = [length for length in lengths if length > 1 and not 0 < size % length < least_left]
    return min(lengths, key=lambda length: size % length, default=size)
