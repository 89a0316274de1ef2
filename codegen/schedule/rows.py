"""Schedules of kernels with reductions: vectors along the columns, and whether they should lie so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from fusepass.codegen.device import RESERVED
from fusepass.codegen.ir.dataflow import Dataflow, always_loaded, kept_in_memory
from fusepass.codegen.ir.expr import Builder, Gather, Load, indices_in
from fusepass.codegen.ir.index import Axis, Index
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.ir.team import state_bytes
from fusepass.codegen.ir.tile import ACROSS_BYTES, power_above
from fusepass.codegen.ir.transpose import Transpose, near_step, neighbours, pace, transposes
from fusepass.codegen.ir.twopass import split_statistics
from fusepass.codegen.ir.vectors import begins_with, is_vector, split_index
from fusepass.codegen.schedule.lanes import (
    holds_row,
    lanes_of_packed_row,
    lanes_of_row,
    packs,
    resident_blocks,
)
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule.shape import LINE, SECTOR, Access, Shape, ceil, most_elements, power_below, run_start
from fusepass.codegen.schedule.transpose import exchanged

_PIECE = 64  # bytes that the threads of a row read together at least
# Bytes and vectors of a row that one thread reads where rows lie together: its neighbours in other rows read the rest of cache lines.
# Stores of more vectors, or bytes, come back to the same sectors too often.
_OWN, _OWN_VECTORS, _READ_VECTORS = 32, 5, 8
FEW_ELEMENTS = 16  # per thread: enough loads in flight to fill the memory system
_ONCE_LANES, _ONCE_ELEMENTS = 512, 32  # of a row that is read once; elements that a thread takes at a time
_PLACES_VECTORS = 20  # of a thread that looks for the place of an extreme: to merge such states takes as long as to look at some vectors
_LONE_BYTES = 15 << 7  # of a row that has a block of several warps, at least
_MOST_LANES = 1.4  # times the vectors of a row are in steps of all of its threads
_CACHED_LANES = 16  # of a row that comes from caches, where blocks of one row would end sooner than others begin
_SAME_VECTORS = 16  # of a thread, where neighbouring rows are made of the same: a warp loads it for many of them
_ROWS_THREADS = 256  # of a block of several rows, at most
# A multiprocessor begins a block every 80 ns or so, in which it moves 2.6 KB: about what a block of several rows moves, at least.
_BLOCK_BYTES = 5 << 9
_ACROSS_THREADS = 512  # of a block whose rows are stored across: rather fewer threads for each of them than fewer rows
_LEAST_VECTORS = 3  # of a thread of a second warp of a row: for fewer the exchange takes longer than they do
_MANY_REDUCTIONS, _MANY_LANES = 8, 16  # of a kernel; threads of a row that has so many
_SCANNED_TOGETHER = 4  # rows side by side: a thread that has one of more would have 16 of its columns
_SHORT_RUNS = 3 * LINE  # bytes of all columns of rows that lie together
_LONG_RUNS = 8 << 10  # so many are enough for a block that has only these, where they are whole vectors
STATIC_SHARED = 48 << 10  # bytes
_ITERATIONS = 2  # rows of a block that stays, at least
_COPIED = (4, 8, 16)  # bytes that one asynchronous copy moves


def prefers_rows(shape: Shape) -> bool:
    """Whether more of the main loads step through memory in smaller strides along the rows than along the columns; where most of what is
    read is looked up, whether more of that does.

    Not where so few rows lie together that threads beside each other would read parts of sectors.

    Where all that is read is small, nothing stored, and something goes across, what neighbouring rows share is one access for a warp. Around
    windows a row's own numbers are loaded once, and what all rows meet lies along the columns.
    """
    row, col = shape.row_axis, shape.col_axis
    if row is None or col is None or row.size == 1 or _are_few_together(shape):
        return False
    gathers = [node for node in shape.kernel.nodes if isinstance(node, Gather)]
    reads = [a for a in shape.main if a.buffer in shape.kernel.reads and (not gathers or shape.is_large(a.buffer))]
    steps = [(a.nbytes, pace(a.index, row), pace(a.index, col)) for a in reads]
    across = any(along_rows < along_cols < inf for _, along_rows, along_cols in steps)
    if shape.single and not shape.kernel.stores and not any(shape.is_large(a.buffer) for a in reads):
        if any(access.window for access in shape.accesses):
            steps = [each for each in steps if each[2] < inf]
        elif across:
            steps = [each for each in steps if each[1] < inf]
    steps = steps or [(node.dtype.nbytes, _pace_of(node, row), _pace_of(node, col)) for node in gathers]
    return (
        sum(
            nbytes * ((along_rows < along_cols) - (along_cols < along_rows)) for nbytes, along_rows, along_cols in steps
        )
        > 0
    )


def _are_few_together(shape: Shape) -> bool:
    """Whether of what is read the elements of so few rows lie together, with those of other columns around them, that threads had better stand
    along the columns, while those on the other rows read the rest of each sector.

    Else a block would have these rows alone, of few columns little to do, and a thread that scans meets columns that are as far apart as it has
    many. Where each element is stored, rows that are long, or that a thread has whole, are not worth the parts of sectors.
    """
    kernel, row = shape.kernel, shape.row_axis
    reads = [access for access in shape.main if access.buffer in kernel.reads]
    if row is None or not reads or any(isinstance(node, Gather) for node in kernel.nodes):
        return False
    together, nbytes = max((neighbours(access.index, row), access.nbytes) for access in reads)
    if together == 1 or together * nbytes >= SECTOR:
        return False
    if kernel.scans:
        return together <= _SCANNED_TOGETHER
    moved = shape.cols * together * nbytes
    if not kernel.ends_per_element:
        return moved < _LONG_RUNS or together.bit_count() > 1
    alone = together == shape.width(row, 4) and shape.cols * together <= most_elements(shape)
    return moved <= _SHORT_RUNS and not alone


def _pace_of(node: Gather, axis: Axis) -> float:
    """How far apart in memory neighbours along `axis` may be; places that depend on it are taken for neighbours themselves."""
    moving = (place for place in node.places if any(axis in index.axes for index in indices_in(place.value)))
    return min([pace(node.index, axis), *(abs(place.stride) for place in moving if place.stride)])


def inner(shape: Shape) -> Rows:
    """Threads side by side along a row: each row by part of a warp, a warp, or a block."""
    assert shape.col_axis is not None
    transposing = transposed_stores(shape, shape.col_axis, shape.row_axis)
    if transposing:
        base = Rows(shape.width(shape.col_axis, but=frozenset(each.index for each in transposing)), 1, 1, 1, 1)
    else:
        base = shape.vectors(shape.col_axis)
    plan = _of_vectors(shape, base, transposing)
    # Of rows with many values for each element there may be threads enough for shorter vectors.
    while plan.keep is Keep.NOTHING and not shape.single and base.width > 1 and base.start is None:
        base = replace(base, width=base.width // 2)
        shorter = _of_vectors(shape, base, transposing)
        plan = shorter if shorter.keep.in_registers else plan
    return plan


def _of_vectors(shape: Shape, base: Rows, transposing: Sequence[Transpose]) -> Rows:
    """A schedule of rows that are read in such vectors."""
    width, vectors = base.width, base.vectors(shape.cols)
    many = len(shape.kernel.reductions) >= _MANY_REDUCTIONS and shape.fills(shape.rows * _MANY_LANES)
    if shape.single and many:
        return _of_many_reductions(shape, base, vectors)
    element = min((access.nbytes for access in shape.main), default=4)
    together, cached = not transposing and _together(shape), _cached(shape)
    same = cached and shape.single and _same(shape)
    most = _SAME_VECTORS * width if same else most_elements(shape)
    few, at_once = (most, most) if same else (FEW_ELEMENTS, _ONCE_ELEMENTS)

    def are_few(lanes: int) -> bool:
        """Whether threads of a row leave too much of cache lines to others."""
        if cached:  # what neighbours read lies in other lines, if it is not the same
            return not same and ceil(vectors, lanes) > 2 and lanes < _CACHED_LANES
        own = together and _owns(shape, ceil(vectors, lanes), width * element)
        return lanes * width * element < _PIECE and not own

    lanes = 1
    while lanes < base.ends or (lanes < min(32, vectors) and are_few(lanes)):
        lanes *= 2
    most_lanes = _CACHED_LANES if cached and shape.single and not same else 32
    while lanes < most_lanes and ceil(vectors, lanes) * width > few:
        lanes *= 2
    held: int | None = lanes
    packed = lanes == 32 and not shape.single and not transposing and packs(shape, width)
    if packed:
        held = lanes_of_packed_row(shape, vectors, width)
        lanes = held or 1024
    elif shape.single:
        lanes = lanes if cached else _lanes_of_row_read_once(shape, vectors, width, lanes)
    elif ceil(vectors, lanes) * width > most:
        held = lanes_of_row(shape, vectors, width)
        lanes = held or 1024
    while lanes < (32 if transposing else 1024) and lanes < vectors and not shape.fills(shape.rows * lanes):
        if lanes == 32 and ceil(vectors, 64) < _LEAST_VECTORS:
            break
        wider = min(2 * lanes, 1024)
        if held is not None and not shape.single and not holds_row(shape, vectors, width, wider, packed=packed):
            break
        lanes = wider
    if transposing and held is not None and lanes <= 32:
        rows = _rows_across(shape, transposing)
        while lanes > 1 and lanes * rows > _ACROSS_THREADS and ceil(vectors, lanes // 2) * width <= most:
            lanes //= 2
    each = max(ceil(vectors, lanes), 1)
    groups = rows_per_block(shape, lanes, transposing)
    base = replace(base, unroll=each, lanes=lanes, groups=groups, blocks=ceil(shape.rows, groups))
    if held is not None and not (shape.single and each * width > most):
        base = exchanging_rows(replace(base, keep=Keep.PACKED if packed else Keep.REGISTERS), transposing, shape)
        return replace(base, resident=resident_blocks(shape, base))
    if shape.single:
        return replace(base, unroll=unroll_of(at_once // width, vectors, lanes))
    return long_rows(shape, base, vectors)


def _of_many_reductions(shape: Shape, base: Rows, vectors: int) -> Rows:
    """A schedule of rows that are read once and reduced to many numbers, such as products of few columns.

    What threads of a row found is merged number by number, so few share a row, and a vector of all that is read at a column fills a thread's registers.
    """
    lanes = max(min(_MANY_LANES, power_below(max(vectors, 1))), power_above(base.ends))
    groups = _ROWS_THREADS // lanes
    while groups * lanes > 64 and ceil(shape.rows, groups) < 4 * shape.facts.multiprocessors:
        groups //= 2
    return replace(base, unroll=1, lanes=lanes, groups=groups, blocks=ceil(shape.rows, groups))


def _lanes_of_row_read_once(shape: Shape, vectors: int, width: int, lanes: int) -> int:
    """Threads, at least so many, of a row that is read once: so many that each has few vectors of it, if blocks of one row have enough to
    do, and what threads merge is no more than a number; few of them where it is a number and its place.
    """
    if any(reduction.op.finds_place for reduction in shape.kernel.reductions):
        while lanes < _ONCE_LANES and ceil(vectors, lanes) > _PLACES_VECTORS:
            lanes *= 2
        return lanes
    plain = all(reduction.op.parts == 1 for reduction in shape.kernel.reductions)
    nbytes = _bytes_of_row(shape, shape.main)
    few = FEW_ELEMENTS if plain and nbytes >= _LONE_BYTES else _ONCE_ELEMENTS
    most = _ONCE_LANES if vectors * width <= _ONCE_LANES * _ONCE_ELEMENTS else _ONCE_LANES // 2
    while lanes < most and ceil(vectors, lanes) * width > few:
        lanes *= 2
    two = ceil(vectors, 2 * lanes) * 2 * lanes <= _MOST_LANES * vectors  # most threads would have two
    return 2 * lanes if few == FEW_ELEMENTS and 32 < lanes < most and two and ceil(vectors, lanes) > 2 else lanes


def _together(shape: Shape) -> bool:
    """Whether each row of the main accesses begins in memory where the one before it ends, or within it."""
    row, col = shape.row_axis, shape.col_axis
    if row is None or col is None:
        return False
    whole = [access.index for access in shape.main if col in access.index.axes]
    return bool(whole) and all(near_step(index, row) <= shape.cols and index.stride(col) == 1 for index in whole)


def _cached(shape: Shape) -> bool:
    """Whether rows have most of what they are made of from others' caches: each has to do with many."""
    read = [access for access in shape.main if shape.col_axis in access.index.axes]
    return bool(read) and not any(shape.is_large(access.buffer) for access in read)


def _same(shape: Shape) -> bool:
    """Whether neighbouring rows are made of the same, but for a number or so of each row's own."""
    row, col = shape.row_axis, shape.col_axis
    read = [access for access in shape.main if col in access.index.axes]
    return row is not None and all(near_step(access.index, row) == inf for access in read)


def _owns(shape: Shape, vectors: int, nbytes: int) -> bool:
    """Whether a thread may have so many vectors of `nbytes` of a row to itself, where rows lie together."""
    most, room = (_OWN_VECTORS, _OWN) if shape.kernel.stores else (_READ_VECTORS, 2 * _OWN)
    return vectors <= most and vectors * nbytes <= room


def transposed_stores(shape: Shape, along: Axis | None, across: Axis | None) -> tuple[Transpose, ...]:
    """The element stores of a kernel that computes along `along` which are contiguous along `across`."""
    if along is None or across is None:
        return ()
    return transposes(shape.kernel, shape.program, along, across, loads=False)


def exchanging_rows(plan: Rows, transposing: Sequence[Transpose], shape: Shape) -> Rows:
    """`plan` with its `transposing` stores exchanged, where a block has enough rows to fill what memory moves at once, and room for their tiles."""
    if not transposing or plan.groups * _narrowest(transposing, shape) < SECTOR:
        return plan
    nbytes = exchanged(transposing, shape.program, shape.cols, plan.groups)
    if nbytes > _room_across(shape):
        return plan
    return replace(plan, exchanges=True, shared_bytes=nbytes if nbytes > STATIC_SHARED else 0)


def _room_across(shape: Shape) -> int:
    return min(ACROSS_BYTES, shape.facts.shared_bytes_per_block)


def _narrowest(transposing: Sequence[Transpose], shape: Shape) -> int:
    """Bytes of an element of what crosses, the least of all."""
    return min(shape.program.buffer(each.buffer).dtype.nbytes for each in transposing)


def _rows_across(shape: Shape, transposing: Sequence[Transpose]) -> int:
    """Rows of a block that fill cache lines across; where their tiles would be too large, or blocks too few, a sector at least."""
    narrowest = _narrowest(transposing, shape)
    rows = LINE // narrowest
    while rows * narrowest > SECTOR and (
        exchanged(transposing, shape.program, shape.cols, rows) > _room_across(shape)
        or ceil(shape.rows, rows) < 2 * shape.facts.multiprocessors
    ):
        rows //= 2
    return rows


def long_rows(shape: Shape, base: Rows, vectors: int) -> Rows:
    """A row too long for registers that is needed more than once: kept in shared memory where it fits."""
    limit = shape.facts.shared_bytes_per_block - 32 * states_of_thread(shape.kernel)
    most = base.covering.vectors(shape.cols)
    lanes = 512
    shared = ceil(most, lanes) * lanes * base.width * shape.kept_bytes
    if shared > limit // 2:  # one block has the multiprocessor to itself
        lanes = 1024
        shared = ceil(most, lanes) * lanes * base.width * shape.kept_bytes
    unroll = unroll_of(FEW_ELEMENTS // base.width, vectors, lanes)
    step = replace(base, unroll=unroll, lanes=lanes, groups=1, blocks=shape.rows)
    if not 0 < shared <= limit:
        return step
    step = replace(step, keep=Keep.SHARED, shared_bytes=shared)
    # Blocks that stay, and copy the next row into the places that the row at hand leaves.
    together = min(
        (shape.facts.shared_bytes_per_block + RESERVED) // (shared + RESERVED), shape.facts.max_threads // lanes
    )
    blocks = max(together, 1) * shape.facts.multiprocessors
    fetches = shape.rows >= _ITERATIONS * blocks and can_fetch(shape, split_statistics(shape.kernel, Builder()), base)
    return replace(step, blocks=blocks, keep=Keep.FETCHED) if fetches else step


def can_fetch(shape: Shape, kernel: Kernel, vectors: Rows) -> bool:
    """Whether all that `kernel` keeps is loaded as it is, in whole `vectors` that a thread can copy to shared memory.

    `kernel` is that of `shape`, or what it becomes where statistics are split.
    """
    width, start = vectors.width, vectors.start
    if not shape.facts.copies:
        return False
    axis, lane = shape.col_axis, Axis("lane", width)
    assert axis is not None
    first = [value for reduction in kernel.reduction_loops[0] for value in reduction.values]
    always = {id(load) for value in first for load in always_loaded(value)}
    aligned = {access.buffer for access in shape.accesses if access.aligned}

    def whole(index: Index) -> bool:
        if start is None:
            return width == 1 or is_vector(split_index(index, axis, lane), axis, lane)
        own = run_start(index, axis, start.run)
        return own is not None and begins_with(own, start.index, width)

    return all(
        isinstance(node, Load)
        and id(node) in always
        and node.buffer in aligned
        and width * node.dtype.nbytes in _COPIED
        and whole(node.index)
        for node in (kept.node for kept in kept_in_memory(kernel, Dataflow()))
    )


def unroll_of(most: int, count: int, step: int) -> int:
    """Steps to take at once; fewer than `most` where then no step runs past the end."""
    most = max(most, 1)
    return next((unroll for unroll in range(most, most // 2, -1) if count % (unroll * step) == 0), most)


def rows_per_block(shape: Shape, lanes: int, transposing: Sequence[Transpose]) -> int:
    """Rows that a block takes, each by so many threads; fewer where the device would have too few blocks.

    As few as a multiprocessor can begin blocks for: warps wait for nobody then, and each makes room for the next one as it ends.
    """
    if lanes > 32:
        return 1
    groups = _ROWS_THREADS // lanes
    least = min(_rows_across(shape, transposing), 1024 // lanes) if transposing else 1
    moved = _bytes_of_row(shape, [access for access in shape.main if shape.is_large(access.buffer)])
    while not transposing and groups * lanes > 32 and groups // 2 * moved >= _BLOCK_BYTES:
        groups //= 2
    while groups > least and groups * lanes > 64 and ceil(shape.rows, groups) < 4 * shape.facts.multiprocessors:
        groups //= 2
    return max(groups, least)


def _bytes_of_row(shape: Shape, accesses: Iterable[Access]) -> int:
    return sum({access.buffer: access.nbytes for access in accesses}.values()) * shape.cols


def states_of_thread(kernel: Kernel) -> int:
    """Bytes of shared memory for what a thread found so far of all reductions."""
    return sum(state_bytes(reduction) for reduction in kernel.reductions) * 2  # split statistics have two states
