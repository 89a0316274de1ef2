"""Reductions in a kernel of their own: in pieces where rows are few and long, or where reads and writes are laid out differently.

Few long rows do not fill a device: their reductions are done in pieces by one kernel and merged by a second. A third, pointwise
kernel then does what happened per element. Pieces are whole axes or equal parts of one, merged in a fixed order, so results do not
depend on timing; what is left of an axis behind equal parts goes into the merge, element by element. Where what is read and what is
written are contiguous along different axes, the same pointwise kernel stands alone behind the reduction: it can exchange tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.axes import count, merge_columns, nearest, read_and_written_along, split_axis
from fusepass.codegen.passes.fuse import ElementRules, fuse_elements, meets_elements
from fusepass.codegen.passes.splitter import Cut, Splitter
from fusepass.codegen.passes.statistics import online

_OF_THE_LONGEST = 4
"""Pieces of rows that what happens per element joins have this part of the longest row that it may join."""

_SHORT_ROW = 512  # elements; a block has several such rows, and exchanges tiles of them
_SHORT_COLUMN = 256  # elements; so, where rows, not columns, are contiguous as they are read

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


def split_long_rows(
    program: Program, builder: Builder, policy: SplitPolicy, elements: ElementRules | None = None
) -> Program:
    """Apply `policy` to every kernel. By the rules of `elements`, what happens per element joins pieces, which are shorter for that."""
    work = Splitter(program, builder)
    for kernel in program.kernels:
        pieces = 1 if kernel.scans else policy.pieces(program, kernel)
        longest = 0 if elements is None else elements.longest(program, kernel)
        if pieces > 1 and longest and meets_elements(program, kernel):
            pieces = max(pieces, -(-kernel.col_count * _OF_THE_LONGEST // longest))
        # Each sweep of pieces reads everything again: the fewer the better.
        whole = online(merge_columns(kernel, builder), builder) if pieces > 1 else kernel
        cut = _cut(whole, builder, pieces, nearest(program, whole)) if pieces > 1 else None
        if cut is None:
            work.kernels.append(kernel)
        else:
            work.split(whole, cut)
    split = replace(program, buffers=tuple(work.buffers), kernels=tuple(work.kernels))
    return split if elements is None else fuse_elements(split, builder, elements)


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
            whole = along in kernel.cols and others == 1
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
