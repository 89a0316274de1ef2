"""How a kernel is laid on a GPU: a frozen value from a pure function of kernel, buffers and device facts.

Every kernel is a walk over *vectors* of `width` neighbouring elements along the axis that memory is contiguous in:

- `POINTWISE`: all rows as one flat axis; each thread handles `unroll` vectors, a block's width apart.
- `INNER`: vectors along the columns; `lanes` threads share a row, `groups` rows make a block.
- `OUTER`: vectors along the rows; `lanes` threads stand on neighbouring rows, `groups` threads share a row's columns.
- `CROSSING`: pointwise, where operands are contiguous along different axes. Vectors along the rows, as `OUTER`; a block
  takes a tile of rows and columns, and what is contiguous along the columns goes through shared memory.

Between sweeps over the same columns a row's values stay in registers, else in shared memory, else memory is read again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.crossing import (
    Crossing,
    Tile,
    columns_of,
    crossings,
    fitting_width,
    near_step,
    power_above,
    with_columns,
)
from fusepass.codegen.ir.dataflow import Dataflow, kept_values
from fusepass.codegen.ir.expr import Builder, Load, ReduceOp, Window, walk
from fusepass.codegen.ir.index import Axis, Index
from fusepass.codegen.ir.program import Kernel, Program, Reduction, Role
from fusepass.codegen.ir.twopass import split_statistics
from fusepass.codegen.ir.vectors import flatten, is_vector, split_index
from fusepass.errors import ScheduleError

_LINE = 128  # bytes of a cache line: what neighbouring threads should at least read together
_SECTOR = 32  # bytes that memory moves at once
_ACCESS = 16  # bytes of the widest access of one thread
_MAX_BLOCKS = 2**31 - 1
_MAX_INT = 2**31 - 2**21  # room for the points past the end that a last block counts
FEW_ELEMENTS = 16  # per thread: enough loads in flight to fill the memory system
_MOST_ELEMENTS = 32  # per thread, unrolled: more costs registers and compile time
_LEAST_REPEATED = 4 << 20  # bytes that neighbouring blocks do not find in a near cache
_POINTWISE_BYTES = 96  # moved per thread of a pointwise kernel
_FULL_THREADS = 768  # per multiprocessor: below it, spread a row over more threads
_KEPT_WORDS = 48  # registers of a thread that hold a row's values
_COLUMN_THREADS = 128  # per block, where each has columns of its own
_STATIC_SHARED = 48 << 10  # bytes
_CROSSING_BYTES = 8 << 10  # of a tile, for each buffer
_CROSSING_COLUMNS = 64  # of a tile, where the rows are not few


class Walk(enum.Enum):
    """Which axis a kernel's vectors run along."""

    POINTWISE = "pointwise"
    INNER = "inner"
    OUTER = "outer"
    CROSSING = "crossing"


class Keep(enum.Enum):
    """Where a row's values stay between two phases over its columns."""

    NOTHING = "not kept"
    REGISTERS = "registers"
    SHARED = "shared memory"


@dataclass(frozen=True)
class Schedule:
    """The shape of one launch; the module's text says what the walks mean.

    Attributes:
        width: elements per vector; a power of two that divides the vector axis.
        unroll: vectors (columns where `OUTER` or `CROSSING`) that a thread loads before it uses the first.
        lanes, groups: threads along the vector axis and across it; `POINTWISE` has one group.
        blocks: blocks of the launch.
        keep: where values stay between phases. With `REGISTERS`, `unroll` covers the whole row.
        shared_bytes: dynamic shared memory of a block.
        aligned: whether vectors may be used on input buffers.
        wide: whether indices need 64 bits.
        once: buffers larger than the cache that nobody reads again soon.
        backwards: whether blocks run from the last to the first, to meet what the previous kernel left in the cache.
        apart: `POINTWISE`: vectors from one of a thread's vectors to the next, where that is not a block's width.
        columns: `CROSSING`: the kernel's axes that are the tile's columns, slowest first.
        exchanges: whether what is contiguous along the other axis goes through shared memory: loads and stores where
            `CROSSING`, stores where `INNER`.
        general: whether sizes come at run time as far as may be (`fusepass.codegen.schedule_general`).
    """

    walk: Walk
    width: int
    unroll: int
    lanes: int
    groups: int
    blocks: int
    keep: Keep = Keep.NOTHING
    shared_bytes: int = 0
    aligned: bool = True
    wide: bool = False
    once: frozenset[str] = frozenset()
    backwards: bool = False
    apart: int = 0
    columns: tuple[Axis, ...] = ()
    exchanges: bool = False
    general: bool = False

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block, where `CROSSING`."""
        return self.lanes * self.width, self.groups * self.unroll

    @property
    def threads(self) -> int:
        return self.lanes * self.groups

    def __str__(self) -> str:
        vector = f"vectors of {self.width}" if self.width > 1 else "single elements"
        match self.walk:
            case Walk.POINTWISE:
                shape = f"{self.unroll} per thread, {self.threads} threads"
                shape += f", {self.apart} vectors apart" if self.apart else ""
            case Walk.INNER:
                shape = (
                    f"{self.lanes} lanes x {self.groups} rows, {self.unroll} per thread at a time, {self.keep.value}"
                    f"{', stores exchanged' if self.exchanges else ''}"
                )
            case Walk.OUTER:
                shape = f"{self.lanes} lanes of rows x {self.groups} groups of columns, {self.unroll} columns at a time"
                shape += f", {self.keep.value}"
            case Walk.CROSSING:
                rows, cols = self.tile
                shape = f"{self.unroll} per thread, {self.threads} threads, tiles of {rows} x {cols} exchanged"
        return f"{self.blocks} blocks, {vector}, {shape}"


def schedule(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True) -> Schedule:
    """A schedule for `kernel` of `program` on a CUDA device.

    `aligned` says that input buffers start at a multiple of 16 bytes; all others always do.
    Raises `ScheduleError` where the kernel has more points than one launch can count.
    """
    shape = _Shape(kernel, program, facts, aligned)
    columns = columns_of(kernel, program) if kernel.is_pointwise and kernel.row_count else ()
    if columns:
        shape = _Shape(with_columns(kernel, program, columns), program, facts, aligned)
        result = _crossing(shape, columns)
    elif kernel.is_pointwise:
        result = _pointwise(shape)
    elif _prefers_rows(shape):
        result = _outer(shape)
    else:
        result = _inner(shape)
    if result.blocks > _MAX_BLOCKS:
        raise ScheduleError(f"{kernel.name} needs {result.blocks} blocks; a launch has at most {_MAX_BLOCKS}")
    return replace(
        result,
        aligned=aligned,
        wide=_needs_wide_index(kernel, program),
        once=_used_once(shape, result),
        backwards=_runs_backwards(kernel, program, facts),
    )


@dataclass(frozen=True)
class _Access:
    """One load or store of the flat kernel."""

    buffer: str
    index: Index
    nbytes: int
    aligned: bool
    window: bool


class _Shape:
    """A kernel as the rules below look at it."""

    def __init__(self, kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> None:
        builder = Builder()
        self.axes = kernel.rows
        self.repeated = _repeated_bytes(kernel, program)
        self.kernel = flatten(kernel, builder)
        self.program = program
        self.facts = facts
        self.rows, self.cols = kernel.row_count, kernel.col_count
        self.row_axis = self.kernel.rows[0] if kernel.rows else None
        self.col_axis = self.kernel.cols[0] if kernel.cols else None
        self.accesses = tuple(self._accesses(aligned))
        quarter = self.rows * max(self.cols, 1) // 4
        self.main = tuple(a for a in self.accesses if program.buffer(a.buffer).numel >= quarter) or self.accesses
        self.single = len(kernel.sweeps) + bool(kernel.stores) == 1
        # Values that use statistics take the registers of those they are made from.
        kept = kept_values(split_statistics(self.kernel, builder), Dataflow(), stats=False)
        self.kept_words = sum(max(4, value.node.dtype.nbytes) // 4 for value in kept)
        self.kept_bytes = sum(value.node.dtype.nbytes for value in kept)

    def _accesses(self, aligned: bool) -> Iterator[_Access]:
        in_window = {id(below) for node in walk(*self.kernel.roots) if isinstance(node, Window) for below in walk(node)}
        for load in self.kernel.loads():
            yield self._access(load.buffer, load.index, aligned, id(load) in in_window)
        for store in (*self.kernel.row_stores, *self.kernel.stores):
            yield self._access(store.buffer, store.index, aligned, False)

    def _access(self, name: str, index: Index, aligned: bool, window: bool) -> _Access:
        buffer = self.program.buffer(name)
        return _Access(name, index, buffer.dtype.nbytes, aligned or buffer.role is not Role.INPUT, window)

    def width(self, axis: Axis, most: int = _ACCESS, but: frozenset[Index] = frozenset()) -> int:
        """The widest vector along `axis` that most of the main traffic can use, the accesses at `but` left out."""
        main = [access for access in self.main if access.index not in but]
        total = sum(map(self._traffic, main))

        def fits(width: int) -> bool:
            lane = Axis("lane", width)
            vectors = [a for a in main if a.aligned and is_vector(split_index(a.index, axis, lane), axis, lane)]
            return axis.size % width == 0 and 2 * sum(map(self._traffic, vectors)) >= total

        return fitting_width(min(most, _ACCESS // max((access.nbytes for access in main), default=_ACCESS)), fits)

    def _traffic(self, access: _Access) -> int:
        return self.program.buffer(access.buffer).nbytes

    def fills(self, threads: int) -> bool:
        """Whether so many threads keep the device's memory system busy."""
        return threads >= self.facts.multiprocessors * _FULL_THREADS


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power_below(limit: int) -> int:
    return 1 << max(limit.bit_length() - 1, 0)


def _pointwise(shape: _Shape) -> Schedule:
    axis = shape.row_axis
    width = shape.width(axis) if axis else 1
    vectors = shape.rows // width
    loads = [access for access in shape.main if access.window is False]
    bytes_per_step = max(sum(access.nbytes for access in loads), 1) * width
    unroll = min(max(_power_below(_POINTWISE_BYTES // bytes_per_step), 1), 4)
    if any(access.window for access in shape.accesses):
        unroll = 1
    threads = 256
    if shape.repeated and unroll > 1:
        together = next((count for count in (4, 2) if shape.axes[0].size % count == 0), 1)
        apart = vectors // shape.axes[0].size
        if together > 1 and apart * shape.axes[0].size == vectors and shape.fills(vectors // together):
            blocks = _ceil(vectors // together, threads)
            return Schedule(Walk.POINTWISE, width, together, threads, 1, blocks, apart=apart)
    while unroll > 1 and not shape.fills(vectors // unroll):
        unroll //= 2
    while threads > 64 and _ceil(vectors, threads * unroll) < shape.facts.multiprocessors:
        threads //= 2
    return Schedule(Walk.POINTWISE, width, unroll, threads, 1, _ceil(vectors, threads * unroll))


def _repeated_bytes(kernel: Kernel, program: Program) -> int:
    """Bytes that a pointwise kernel reads again for each point of its slowest axis, if they are much of what it moves.

    A weight for each element of a sample, say. A thread that takes the same place of several samples reads it once.
    """
    if not kernel.is_pointwise or len(kernel.rows) < 2 or kernel.rows[0].size < 2:
        return 0
    outer = kernel.rows[0]
    again = {load.buffer for load in kernel.loads() if load.index.stride(outer) == 0}
    repeated = sum(program.buffer(name).nbytes for name in again)
    moved = sum(program.buffer(name).nbytes for name in kernel.reads | kernel.writes)
    return repeated if repeated >= _LEAST_REPEATED and 4 * repeated * outer.size >= moved else 0


def _crossing(shape: _Shape, columns: tuple[Axis, ...]) -> Schedule:
    """Tiles whose rows fill a cache line; as many bytes for each buffer as keep enough loads in flight."""
    assert shape.row_axis is not None
    assert shape.col_axis is not None
    found = crossings(shape.kernel, shape.program, shape.row_axis, shape.col_axis)
    width = shape.width(shape.row_axis, but=frozenset(each.index for each in found))
    element = max(access.nbytes for access in shape.main)
    all_rows, all_cols = power_above(shape.rows), power_above(shape.cols)
    rows, cols = max(min(all_rows, _LINE // element), width), min(all_cols, _CROSSING_COLUMNS)
    while rows * cols * element < _CROSSING_BYTES and rows < min(all_rows, _LINE * width):
        rows *= 2
    while rows * cols * element < _CROSSING_BYTES and cols < all_cols:
        cols *= 2

    def blocks() -> int:
        return _ceil(shape.rows, rows) * _ceil(shape.cols, cols)

    while cols > 16 and (
        blocks() < 2 * shape.facts.multiprocessors or _exchanged(found, shape.program, rows, cols) > _STATIC_SHARED
    ):
        cols //= 2
    # 8-byte elements have few rows in a line: more threads would stand too close along the columns for the banks.
    threads = min(max(rows * cols // (2 * width), 32), 256 if element < 8 else 128)
    groups = threads // (rows // width)
    unroll = max(cols // groups, 1)
    cols = groups * unroll
    return Schedule(Walk.CROSSING, width, unroll, rows // width, groups, blocks(), columns=columns, exchanges=True)


def _exchanged(found: Iterable[Crossing], program: Program, along: int, across: int) -> int:
    """Bytes of shared memory that the tiles of `found` take."""
    sizes = (program.buffer(each.buffer).dtype.nbytes for each in found)
    return sum(Tile(along, across, 32, 1, nbytes).shared_bytes for nbytes in sizes)


def exchange_tile(
    kernel: Kernel, program: Program, plan: Schedule, crossing: Crossing, across: Axis, index: Index
) -> Tile:
    """How the threads of a block read or write `crossing`, which stands at `index`, vectors running along `across`."""
    buffer = program.buffer(crossing.buffer)
    tile = plan.tile if plan.walk is Walk.CROSSING else (kernel.col_count, plan.groups)
    usable = plan.aligned or buffer.role is not Role.INPUT

    def fits(width: int) -> bool:
        lane = Axis("lane", width)
        return usable and across.size % width == 0 and is_vector(split_index(index, across, lane), across, lane)

    # Less at once where there would be fewer accesses than threads.
    each = max(power_above(tile[0]) * tile[1] // plan.threads, 1)
    most = 1 if crossing.guard else min(_ACCESS // buffer.dtype.nbytes, each, tile[1])
    return Tile(*tile, plan.threads, fitting_width(most, fits), buffer.dtype.nbytes)


def _prefers_rows(shape: _Shape) -> bool:
    """Whether more of the main loads step through memory in smaller strides along the rows than along the columns."""
    row, col = shape.row_axis, shape.col_axis
    if row is None or col is None or row.size == 1:
        return False
    reads = [access for access in shape.main if access.buffer in shape.kernel.reads]
    votes = 0
    for access in reads:
        along_rows, along_cols = near_step(access.index, row), near_step(access.index, col)
        votes += access.nbytes * ((along_rows < along_cols) - (along_cols < along_rows))
    return votes > 0


def _inner(shape: _Shape) -> Schedule:
    assert shape.col_axis is not None
    crossing = _crossing_stores(shape)
    width = shape.width(shape.col_axis, but=frozenset(each.index for each in crossing))
    vectors = _ceil(shape.cols, width)
    element = min((access.nbytes for access in shape.main), default=4)
    most = _most_elements(shape)
    lanes = 1
    while lanes < min(32, vectors) and lanes * width * element < _LINE:
        lanes *= 2
    while lanes < 32 and _ceil(vectors, lanes) * width > FEW_ELEMENTS:
        lanes *= 2
    if not shape.single:
        while lanes < 1024 and _ceil(vectors, lanes) * width > most:
            lanes *= 2
    elif _ceil(vectors, lanes) * width > 4 * most:
        lanes = 256
    while lanes < 1024 and lanes < vectors and not shape.fills(shape.rows * lanes):
        lanes *= 2
    each = max(_ceil(vectors, lanes), 1)
    groups = _rows_per_block(shape, lanes)
    base = Schedule(Walk.INNER, width, each, lanes, groups, _ceil(shape.rows, groups))
    if each * width <= most:
        return replace(base, keep=Keep.REGISTERS, exchanges=_exchanges(crossing, shape, groups))
    if shape.single:
        return replace(base, unroll=_unroll(FEW_ELEMENTS // width, vectors, lanes))
    return _long_rows(shape, base, vectors)


def _crossing_stores(shape: _Shape) -> tuple[Crossing, ...]:
    """The element stores that are contiguous along the rows."""
    if shape.row_axis is None or shape.col_axis is None:
        return ()
    return crossings(shape.kernel, shape.program, shape.col_axis, shape.row_axis, loads=False)


def _exchanges(crossing: Sequence[Crossing], shape: _Shape, rows: int) -> bool:
    """Whether a block of `rows` rows has enough of them to fill what memory moves at once, and room for its tiles."""
    if not crossing:
        return False
    smallest = min(shape.program.buffer(each.buffer).dtype.nbytes for each in crossing)
    return rows * smallest >= _SECTOR and _exchanged(crossing, shape.program, shape.cols, rows) <= _STATIC_SHARED


def _long_rows(shape: _Shape, base: Schedule, vectors: int) -> Schedule:
    """A row too long for registers that is needed more than once: kept in shared memory where it fits."""
    limit = shape.facts.shared_bytes_per_block - 32 * _state_bytes(shape.kernel)
    lanes = 512
    shared = _ceil(vectors, lanes) * lanes * base.width * shape.kept_bytes
    if shared > limit // 2:  # one block has the multiprocessor to itself
        lanes = 1024
        shared = _ceil(vectors, lanes) * lanes * base.width * shape.kept_bytes
    unroll = _unroll(FEW_ELEMENTS // base.width, vectors, lanes)
    step = replace(base, unroll=unroll, lanes=lanes, groups=1, blocks=shape.rows)
    return replace(step, keep=Keep.SHARED, shared_bytes=shared) if 0 < shared <= limit else step


def _unroll(most: int, count: int, step: int) -> int:
    """Steps to take at once; fewer than `most` where then no step runs past the end."""
    most = max(most, 1)
    return next((unroll for unroll in range(most, most // 2, -1) if count % (unroll * step) == 0), most)


def _rows_per_block(shape: _Shape, lanes: int) -> int:
    if lanes > 32:
        return 1
    groups = 256 // lanes
    while groups * lanes > 64 and _ceil(shape.rows, groups) < 4 * shape.facts.multiprocessors:
        groups //= 2
    return groups


def _most_elements(shape: _Shape) -> int:
    """Elements of a row that one thread may keep in registers."""
    return min(_power_below(_KEPT_WORDS // max(shape.kept_words, 1)), _MOST_ELEMENTS)


def _outer(shape: _Shape) -> Schedule:
    assert shape.row_axis is not None
    cols = max(shape.cols, 1)
    most = _most_elements(shape)
    width = shape.width(shape.row_axis, 4)
    whole = min(cols, FEW_ELEMENTS) if shape.single else cols
    while width > 1 and (whole * width > most or not shape.fills(shape.rows // width)):
        width //= 2
    # A thread keeps a longer column alone where that saves all exchange between threads.
    if cols * width <= (2 * most if shape.fills(shape.rows // width) else most):
        blocks = _ceil(shape.rows, _COLUMN_THREADS * width)
        return Schedule(Walk.OUTER, width, cols, _COLUMN_THREADS, 1, blocks, Keep.REGISTERS)
    if shape.single and shape.fills(shape.rows // width):
        blocks = _ceil(shape.rows, _COLUMN_THREADS * width)
        return Schedule(Walk.OUTER, width, _unroll(FEW_ELEMENTS // width, cols, 1), _COLUMN_THREADS, 1, blocks)
    return _shared_columns(shape, width, most)


def _shared_columns(shape: _Shape, width: int, most: int) -> Schedule:
    """Several threads for each column of data: `lanes` rows side by side, `groups` threads deep."""
    lanes = 32
    while lanes > 8 and _ceil(shape.rows, lanes * width) < shape.facts.multiprocessors:
        lanes //= 2
    groups = 64 // lanes
    slots = width * _state_bytes(shape.kernel)  # bytes for each thread whose state goes through shared memory
    largest = min(1024 // lanes, _power_below(_STATIC_SHARED // (slots * lanes)))
    while groups < largest and not shape.single and _ceil(shape.cols, groups) * width > most:
        groups *= 2
    while groups < largest and _ceil(shape.cols, groups) > 8 and not shape.fills(shape.rows // width * groups):
        groups *= 2
    each = _ceil(shape.cols, groups)
    blocks = _ceil(shape.rows, lanes * width)
    if each * width <= most:
        return Schedule(Walk.OUTER, width, each, lanes, groups, blocks, Keep.REGISTERS)
    return Schedule(Walk.OUTER, width, _unroll(FEW_ELEMENTS // width, shape.cols, groups), lanes, groups, blocks)


def _state_bytes(kernel: Kernel) -> int:
    return sum(state_bytes(reduction) for reduction in kernel.reductions) * 2  # split statistics have two states


def state_bytes(reduction: Reduction) -> int:
    """The size of a reduction's state, at most."""
    numbers = {ReduceOp.MOMENTS: 3, ReduceOp.MERGE_MOMENTS: 3, ReduceOp.SOFTMAX: 2, ReduceOp.MERGE_SOFTMAX: 2}
    if reduction.op in (ReduceOp.ARGMAX, ReduceOp.ARGMIN):
        return 16
    return numbers.get(reduction.op, 1) * max(reduction.dtype.nbytes, 4)


def _needs_wide_index(kernel: Kernel, program: Program) -> bool:
    extents = (program.buffer(name).extent for name in kernel.reads | kernel.writes)
    return max((kernel.row_count * max(kernel.col_count, 1), *extents)) >= _MAX_INT


def _large(names: Iterable[str], program: Program, facts: DeviceFacts) -> frozenset[str]:
    return frozenset(name for name in names if program.buffer(name).nbytes >= facts.l2_bytes // 2)


def _used_once(shape: _Shape, chosen: Schedule) -> frozenset[str]:
    """Large buffers that this kernel touches once and that no later kernel reads."""
    program, kernel = shape.program, shape.kernel
    order = [other.name for other in program.kernels]
    later = program.kernels[order.index(kernel.name) + 1 :]
    read_later = frozenset[str]().union(*(other.reads for other in later))
    loads = [load for load in walk(*kernel.roots) if isinstance(load, Load)]
    again = {access.buffer for access in shape.accesses if access.window}
    again |= {load.buffer for load in loads if sum(other.buffer == load.buffer for other in loads) > 1}
    if chosen.keep is Keep.NOTHING and not shape.single:
        again |= kernel.reads
    return _large(kernel.reads | kernel.writes, program, shape.facts) - read_later - again


def _runs_backwards(kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
    """Every other kernel of those that go over the same large buffer."""
    backwards = False
    touched: frozenset[str] = frozenset()
    for other in program.kernels:
        large = _large(other.reads | other.writes, program, facts)
        if large:  # a small kernel between two large ones leaves the cache as it is
            backwards = bool(touched & large) and not backwards
            touched = touched | large if touched & large else large
        if other.name == kernel.name:
            return bool(large) and backwards
    return False
