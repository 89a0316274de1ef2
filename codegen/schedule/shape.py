"""A kernel as the rules of schedules look at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Generic, TypeVar

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.dataflow import Dataflow, Kept, kept_in_memory, most_words, rematerialised
from fusepass.codegen.ir.expr import Builder, Gather, Masked, Window, indices_in, inside_windows
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.ir.tile import SECTOR as SECTOR
from fusepass.codegen.ir.tile import fitting_width
from fusepass.codegen.ir.twopass import split_statistics
from fusepass.codegen.ir.vectors import ACCESS as ACCESS
from fusepass.codegen.ir.vectors import begins_with, flatten, is_vector, picked, run_axes, split_index, start_of
from fusepass.codegen.schedule.plan_rows import Rows, Start

T = TypeVar("T")

LINE = 128  # bytes of a cache line: what neighbouring threads should at least read together
_MOST_ELEMENTS = 32  # per thread, unrolled: more costs registers and compile time
_LEAST_REPEATED = 4 << 20  # bytes that neighbouring blocks do not find in a near cache
_FULL_THREADS = 768  # per multiprocessor: below it, spread a row over more threads
_KEPT_WORDS = 48  # registers of a thread that hold a row's values


_LONG_ROWS = 12, 64  # vectors and elements of rows that begin anywhere: both ends cost about as much as a whole vector
_UNEVEN = Gather, Masked, Window  # what elements past the end might load


@dataclass(frozen=True)
class Access:
    """One load or store of the flat kernel."""

    buffer: str
    index: Index
    nbytes: int
    aligned: bool
    window: bool


class Shape:
    """A kernel as the rules below look at it."""

    def __init__(self, kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> None:
        self._builder = Builder()
        self.axes = kernel.rows
        self.whole = kernel
        self.kernel = flatten(kernel, self._builder)
        self.innermost = kernel.cols[-1].size if kernel.cols else 0
        self.program = program
        self.aligned = aligned
        self.facts = facts
        self.rows, self.cols = kernel.row_count, kernel.col_count
        self.row_axis = self.kernel.rows[0] if kernel.rows else None
        self.col_axis = self.kernel.cols[0] if kernel.cols else None
        self.accesses = tuple(self._accesses(aligned))
        self._widths: dict[tuple[Axis, int, frozenset[Index]], int] = {}
        self.main = tuple(a for a in self.accesses if self.is_large(a.buffer)) or self.accesses
        self.single = len(kernel.reduction_loops) + kernel.ends_per_element == 1

    @cached_property
    def repeated(self) -> int:
        """Bytes that are loaded again for each point of the slowest axis; see `_repeated`."""
        return _repeated(self.whole, self.program)

    @cached_property
    def weighted(self) -> bool:
        """Whether rows share something."""
        mine = {access.buffer for access in self.main}
        others = (a for a in self.accesses if a.buffer in self.whole.reads - mine)
        return any(self.col_axis in access.index.axes for access in others)

    @cached_property
    def kept(self) -> tuple[Kept, ...]:
        """What phases leave to each other in memory."""
        return kept_in_memory(self.kernel, Dataflow())

    @property
    def kept_words(self) -> int:
        """Registers of a column's values that phases leave to each other."""
        return self._kept[0]

    @property
    def kept_bytes(self) -> int:
        """The same in memory."""
        return self._kept[1]

    @property
    def again(self) -> int:
        """Operators of a column that phases then compute anew."""
        return self._kept[2]

    @cached_property
    def _kept(self) -> tuple[int, int, int]:
        split, dataflow = split_statistics(self.kernel, self._builder), Dataflow()
        kept = kept_in_memory(split, dataflow)
        nbytes = sum(value.node.dtype.nbytes for value in kept)
        return most_words(split, dataflow), nbytes, rematerialised(split, dataflow, kept)

    def _accesses(self, aligned: bool) -> Iterator[Access]:
        in_window = inside_windows(self.kernel.nodes)
        for load in self.kernel.loads():
            yield self._access(load.buffer, load.index, aligned, id(load) in in_window)
        for store in (*self.kernel.row_stores, *self.kernel.stores):
            yield self._access(store.buffer, store.index, aligned, False)

    def is_large(self, name: str) -> bool:
        """Whether a buffer has an element for every fourth of the kernel's."""
        return self.program.buffer(name).numel >= self.rows * max(self.cols, 1) // 4

    def _access(self, name: str, index: Index, aligned: bool, window: bool) -> Access:
        buffer = self.program.buffer(name)
        return Access(name, index, buffer.dtype.nbytes, aligned or buffer.role is not Role.INPUT, window)

    def width(self, axis: Axis, most: int = ACCESS, but: frozenset[Index] = frozenset()) -> int:
        """The widest vector along `axis` that most of the main traffic along it can use, the accesses at `but` left out."""
        key = axis, most, but
        if key not in self._widths:
            self._widths[key] = self._width(axis, most, but)
        return self._widths[key]

    def _width(self, axis: Axis, most: int, but: frozenset[Index]) -> int:
        main = [access for access in self.main if access.index not in but]
        along = [access for access in main if axis in access.index.axes]
        main = along or self._looked_up(axis) or main
        total = sum(map(self._traffic, main))

        def whole(access: Access, lane: Axis) -> bool:
            index = split_index(access.index, axis, lane)
            if is_vector(index, axis, lane):
                return True
            extent = self.program.buffer(access.buffer).extent
            return self.kernel.is_pointwise and bool(picked(index, axis, lane, ACCESS // access.nbytes, extent))

        def fits(width: int) -> bool:
            vectors = [access for access in main if access.aligned and whole(access, Axis("lane", width))]
            return axis.size % width == 0 and 2 * sum(map(self._traffic, vectors)) >= total

        return fitting_width(min(most, ACCESS // max((access.nbytes for access in main), default=ACCESS)), fits)

    def _looked_up(self, axis: Axis) -> list[Access]:
        """What is looked up along `axis`, at places that are the same for all of it."""
        gathers = [node for node in self.kernel.nodes if isinstance(node, Gather) and axis in node.index.axes]
        places = (place for node in gathers for place in node.places)
        moves = any(axis in index.axes for place in places for index in indices_in(place.value))
        return [] if moves else [self._access(node.buffer, node.index, self.aligned, False) for node in gathers]

    def vectors(self, axis: Axis, least: tuple[int, int] = _LONG_ROWS) -> Rows:
        """A schedule with nothing but the vectors of rows that are read as they lie: their width, and where rows begin if that is anywhere.

        `least`: vectors and elements that such rows have.
        """
        width = self.width(axis)
        found = self.start(axis, width, least)
        if found is None:
            return Rows(width, 1, 1, 1, 1)
        wider, start, run = found
        return Rows(wider, 1, 1, 1, 1, start=Start(start, run))

    def start(self, axis: Axis, width: int, least: tuple[int, int] = _LONG_ROWS) -> tuple[int, Index, int] | None:
        """Wider vectors than of `width` that most of the main traffic can use, where its rows begin, and how long their runs are, or 0
        where a row lies together; None where there are none, or rows have less than `least` vectors and elements.

        They begin before the row, or the run, where that begins between two of them.
        """
        widest = ACCESS // max((access.nbytes for access in self.main), default=ACCESS)
        if width >= widest or any(isinstance(n, _UNEVEN) for n in self.kernel.nodes):
            return None
        vectors, elements = least
        for run in dict.fromkeys((0, self.innermost)):
            starts = [(access, run_start(access.index, axis, run)) for access in self.main if access.aligned]
            for _, start in starts:
                if start is None or (run or axis.size) < max(vectors * widest, elements):
                    continue
                alike = [access for access, other in starts if other is not None and begins_with(other, start, widest)]
                if 2 * sum(map(self._traffic, alike)) >= sum(map(self._traffic, self.main)):
                    return widest, start, run
        return None

    def ragged_width(self) -> int:
        """The vectors that all of a pointwise kernel can use but for the last one: it goes over memory as it lies; 1 where not."""
        axis, width = self.row_axis, ACCESS // max((access.nbytes for access in self.main), default=ACCESS)
        if axis is None or width == 1 or self.rows < width or any(isinstance(n, _UNEVEN) for n in self.kernel.nodes):
            return 1
        flat = all(
            axis not in access.index.axes
            or (access.aligned and access.index.axes == {axis} and access.index.stride(axis) == 1)
            for access in self.accesses
        )
        whole = all(access.index.constant % width == 0 for access in self.accesses if axis in access.index.axes)
        return width if flat and whole and self.rows % width else 1

    def _traffic(self, access: Access) -> int:
        return self.program.buffer(access.buffer).nbytes

    def fills(self, threads: int) -> bool:
        """Whether so many threads keep the device's memory system busy."""
        return fills(threads, self.facts)


def shape_of(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool) -> Shape:
    """The `Shape` of a kernel; one for all rules that ask one after another."""
    return _shape_of(_Same(kernel), _Same(program), facts, aligned)


@dataclass(frozen=True, eq=False)
class _Same(Generic[T]):
    """A value that equals nothing but itself: to compare programs takes longer than to look at one."""

    it: T

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.it is self.it


@lru_cache(maxsize=8)
def _shape_of(kernel: _Same[Kernel], program: _Same[Program], facts: DeviceFacts, aligned: bool) -> Shape:
    return Shape(kernel.it, program.it, facts, aligned)


def fills(threads: int, facts: DeviceFacts) -> bool:
    """Whether so many threads keep the memory system of a device busy."""
    return threads >= facts.multiprocessors * _FULL_THREADS


def run_start(index: Index, axis: Axis, run: int) -> Index | None:
    """Where the row of an `index`, or each run of so many columns of it, begins; None where these are no neighbours along `axis`."""
    if not run:
        return start_of(index, axis)
    runs, col = run_axes(axis, run)
    return start_of(index.substitute({axis: axis_index(runs) * run + axis_index(col)}), col)


def _repeated(kernel: Kernel, program: Program) -> int:
    """Where a pointwise kernel reads much again for each point of its slowest axis, such as a weight for each element of a
    sample: bytes that it loads for each element and that are not the same. Else 0.

    A thread that takes the same place of several samples reads the weights once.
    """
    if not kernel.is_pointwise or len(kernel.rows) < 2 or kernel.rows[0].size < 2:
        return 0
    outer = kernel.rows[0]
    again = {(load.buffer, load.index) for load in kernel.loads() if load.index.stride(outer) == 0}
    spans = ((program.buffer(name), index.bounds) for name, index in again)
    repeated = sum(min(high - low + 1, buffer.numel) * buffer.dtype.nbytes for buffer, (low, high) in spans)
    moved = sum(program.buffer(name).nbytes for name in kernel.reads | kernel.writes)
    if repeated < _LEAST_REPEATED or 4 * repeated * outer.size < moved:
        return 0
    own = (load for load in kernel.loads() if load.index.stride(outer) != 0)
    return sum(max(load.dtype.nbytes, 1) for load in own if program.buffer(load.buffer).numel > outer.size)


def most_elements(shape: Shape) -> int:
    """Elements of a row that one thread may keep in registers."""
    return min(power_below(_KEPT_WORDS // max(shape.kept_words, 1)), _MOST_ELEMENTS)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def divisors(count: int, most: int) -> list[int]:
    """Those of `count` up to `most`, the least first."""
    return [each for each in range(1, min(count, most) + 1) if count % each == 0]


def power_below(limit: int) -> int:
    return 1 << max(limit.bit_length() - 1, 0)
