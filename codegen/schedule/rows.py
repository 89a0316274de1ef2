"""Schedules of kernels with reductions: vectors along the columns, or along the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.crossing import Crossing, crossings, near_step, neighbours, power_above
from fusepass.codegen.ir.dataflow import Dataflow, always_loaded, kept_in_memory
from fusepass.codegen.ir.expr import Apply, Builder, Load
from fusepass.codegen.ir.index import Axis, Index
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.ir.team import state_bytes
from fusepass.codegen.ir.twopass import split_statistics
from fusepass.codegen.ir.vectors import alignment, begins_with, is_vector, split_index
from fusepass.codegen.schedule.flat import exchanged
from fusepass.codegen.schedule.lanes import holds_row, lanes_of_row, resident_blocks
from fusepass.codegen.schedule.plan import Keep, Schedule, Walk
from fusepass.codegen.schedule.shape import LINE, SECTOR, Shape, ceil, most_elements, power_below, run_start

_PIECE = 64  # bytes that the threads of a row read together at least
FEW_ELEMENTS = 16  # per thread: enough loads in flight to fill the memory system
_ONCE_LANES, _ONCE_ELEMENTS = 256, 32  # of a row that is read once; elements that a thread takes at a time
_KEPT_THREADS = 256  # per block, up to which columns are shared by more threads than have room for them
# Bytes of an element from which that is better: half as many are more computation for the bytes that they are.
_WORD = 4
_ROWS_THREADS, _EXCHANGING_THREADS = 128, 256  # per block of several rows; where these are stored through a tile
COLUMN_THREADS = 128  # per block, where each has columns of its own
_PAIR_THREADS = 512  # per block, where columns are shared and each thread has two rows
STATIC_SHARED = 48 << 10  # bytes
_TURNS = 2  # rows of a block that stays, at least
_HELD_THREADS, _HELD_WORDS = 1024, 36  # on a multiprocessor, of 64 registers each; of a column that such a thread holds
_LONG_RUN = 4  # blocks' rows that lie together in memory, at least, so that few have an end of them
_STRIPS, _STRIPS_EACH = (
    (32, 16, 8, 4),
    8,
)  # tiles that a block may take one after another; blocks for each multiprocessor
_LEAST_SECTORS = 4  # of a block's rows, where blocks overlap by one
_MOST_AGAIN = 0.6  # functions of an element times the share of them that two blocks compute
RESERVED = 1 << 10  # bytes of shared memory that the device takes of each block
_COPIES_FROM = 80  # compute capability times ten
_COPIED = (4, 8, 16)  # bytes that one asynchronous copy moves


def prefers_rows(shape: Shape) -> bool:
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


def inner(shape: Shape) -> Schedule:
    """Threads side by side along a row: each row by part of a warp, a warp, or a block."""
    assert shape.col_axis is not None
    crossing = crossing_stores(shape, shape.col_axis, shape.row_axis)
    if crossing:
        base = Schedule(
            Walk.INNER, shape.width(shape.col_axis, but=frozenset(each.index for each in crossing)), 1, 1, 1, 1
        )
    else:
        base = shape.vectors(shape.col_axis)
    width, vectors = base.width, base.vectors(shape.cols)
    element = min((access.nbytes for access in shape.main), default=4)
    most = most_elements(shape)
    ends = width if base.start is not None else 0  # of rows that begin anywhere both ends may have a vector in part
    lanes = 1
    while lanes < min(32, vectors) and lanes * width * element < _PIECE:
        lanes *= 2
    while lanes < 32 and ceil(vectors, lanes) * width > FEW_ELEMENTS:
        lanes *= 2
    held: int | None = lanes
    if shape.single:
        while lanes < _ONCE_LANES and ceil(vectors, lanes) * width > most + ends:
            lanes *= 2
    elif ceil(vectors, lanes) * width > most + ends:
        held = lanes_of_row(shape, vectors, width)
        lanes = held or 1024
    while lanes < 1024 and lanes < vectors and not shape.fills(shape.rows * lanes):
        wider = min(2 * lanes, 1024)
        if held is not None and not shape.single and not holds_row(shape, vectors, width, wider):
            break
        lanes = wider
    each = max(ceil(vectors, lanes), 1)
    groups = rows_per_block(shape, lanes, crossing)
    base = replace(base, unroll=each, lanes=lanes, groups=groups, blocks=ceil(shape.rows, groups))
    if held is not None and not (shape.single and each * width > most + ends):
        base = replace(base, keep=Keep.REGISTERS, exchanges=exchanges(crossing, shape, groups))
        return replace(base, resident=resident_blocks(shape, base))
    if shape.single:
        return replace(base, unroll=unroll_of(_ONCE_ELEMENTS // width, vectors, lanes))
    return long_rows(shape, base, vectors)


def crossing_stores(shape: Shape, along: Axis | None, across: Axis | None) -> tuple[Crossing, ...]:
    """The element stores of a kernel that computes along `along` which are contiguous along `across`."""
    if along is None or across is None:
        return ()
    return crossings(shape.kernel, shape.program, along, across, loads=False)


def exchanges(crossing: Sequence[Crossing], shape: Shape, rows: int) -> bool:
    """Whether a block of `rows` rows has enough of them to fill what memory moves at once, and room for its tiles."""
    if not crossing:
        return False
    smallest = min(shape.program.buffer(each.buffer).dtype.nbytes for each in crossing)
    return rows * smallest >= SECTOR and exchanged(crossing, shape.program, shape.cols, rows) <= STATIC_SHARED


def long_rows(shape: Shape, base: Schedule, vectors: int) -> Schedule:
    """A row too long for registers that is needed more than once: kept in shared memory where it fits."""
    limit = shape.facts.shared_bytes_per_block - 32 * states_of_thread(shape.kernel)
    lanes = 512
    shared = ceil(vectors, lanes) * lanes * base.width * shape.kept_bytes
    if shared > limit // 2:  # one block has the multiprocessor to itself
        lanes = 1024
        shared = ceil(vectors, lanes) * lanes * base.width * shape.kept_bytes
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
    fetches = shape.rows >= _TURNS * blocks and can_fetch(shape, split_statistics(shape.kernel, Builder()), base)
    return replace(step, blocks=blocks, fetches=True) if fetches else step


def can_fetch(shape: Shape, kernel: Kernel, vectors: Schedule) -> bool:
    """Whether all that `kernel` keeps is loaded as it is, in whole `vectors` that a thread can copy to shared memory.

    `kernel` is that of `shape`, or what it becomes where statistics are split.
    """
    width, start = vectors.width, vectors.start
    if shape.facts.capability < _COPIES_FROM:
        return False
    axis, lane = shape.col_axis, Axis("lane", width)
    assert axis is not None
    first = [value for reduction in kernel.sweeps[0] for value in reduction.values]
    always = {id(load) for value in first for load in always_loaded(value)}
    aligned = {access.buffer for access in shape.accesses if access.aligned}

    def whole(index: Index) -> bool:
        if start is None:
            return width == 1 or is_vector(split_index(index, axis, lane), axis, lane)
        own = run_start(index, axis, vectors.run)
        return own is not None and begins_with(own, start, width)

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


def rows_per_block(shape: Shape, lanes: int, crossing: Sequence[Crossing]) -> int:
    """Rows that a block takes, each by so many threads; fewer where the device would have too few blocks."""
    if lanes > 32:
        return 1
    groups = (_EXCHANGING_THREADS if crossing else _ROWS_THREADS) // lanes
    while groups * lanes > 64 and ceil(shape.rows, groups) < 4 * shape.facts.multiprocessors:
        groups //= 2
    return groups


def outer(shape: Shape) -> Schedule:
    """Threads side by side across rows, where neighbours in memory belong to different ones."""
    assert shape.row_axis is not None
    cols = max(shape.cols, 1)
    most = most_elements(shape)
    crossing = crossing_stores(shape, shape.row_axis, shape.col_axis)
    width = widest = shape.width(shape.row_axis, 4, frozenset(each.index for each in crossing))
    while width > 1:
        whole = min(cols * width, FEW_ELEMENTS) if shape.single else cols * width
        if whole <= most and shape.fills(shape.rows // width):
            break
        width //= 2
    alone_is_slow = width == 1 and cols > FEW_ELEMENTS and (widest > 1 or not shape.single)
    if cols * width <= most and not alone_is_slow:
        blocks = ceil(shape.rows, COLUMN_THREADS * width)
        alone = Schedule(Walk.OUTER, width, cols, COLUMN_THREADS, 1, blocks, Keep.REGISTERS)
        return overlapping(exchanging(alone, crossing, shape), shape)
    if shape.single and shape.fills(shape.rows // width):
        blocks = ceil(shape.rows, COLUMN_THREADS * width)
        return Schedule(Walk.OUTER, width, unroll_of(FEW_ELEMENTS // width, cols, 1), COLUMN_THREADS, 1, blocks)
    pairs = shared_columns(shape, min(widest, 2), most)  # two rows a thread, while blocks stay small
    fits = (
        not crossing
        and pairs.keep is Keep.REGISTERS
        and pairs.threads <= _PAIR_THREADS
        and shape.fills(pairs.blocks * pairs.threads)
    )
    if fits:
        return overlapping(pairs, shape)
    held = None if crossing or shape.single else held_columns(shape, min(widest, 2))
    return overlapping(held or exchanging(shared_columns(shape, width, most), crossing, shape), shape)


def held_columns(shape: Shape, width: int) -> Schedule | None:
    """Columns in the registers of blocks of which a multiprocessor has two: one loads or stores while the other one computes.

    Their rows lie together in pieces of a cache line, or of a half or a quarter of one where columns are too long for that; None where
    they are too long for all of these, or would not fill the device.
    """
    smallest = min(access.nbytes for access in shape.main)
    slots = _PAIR_THREADS * width * states_of_thread(shape.kernel)
    for piece in (LINE, LINE // 2, LINE // 4):
        lanes = piece // (width * smallest)
        each = ceil(shape.cols, _PAIR_THREADS // lanes)
        blocks = ceil(shape.rows, lanes * width)
        if each * width * max(shape.kept_words, 1) <= _HELD_WORDS and slots <= STATIC_SHARED:
            plan = Schedule(Walk.OUTER, width, each, lanes, _PAIR_THREADS // lanes, blocks, Keep.REGISTERS)
            plan = replace(plan, resident=_HELD_THREADS // _PAIR_THREADS)
            return plan if shape.fills(blocks * plan.threads) else None
    return None


def overlapping(plan: Schedule, shape: Shape, most_again: float = _MOST_AGAIN) -> Schedule:
    """`plan` with blocks that overlap by a sector, where they would store parts of sectors at both ends of each column.

    A sector that is written in part takes the memory several times as long. Reading it twice, mostly from the L2 cache, and computing
    it twice is less, unless there is much to compute.
    """
    axis, kernel = shape.row_axis, shape.kernel
    if plan.keep is not Keep.REGISTERS or plan.exchanges or axis is None or not kernel.stores:
        return plan
    nbytes = {shape.program.buffer(store.buffer).dtype.nbytes for store in kernel.stores}
    sector, lane = SECTOR // max(nbytes), Axis("lane", plan.width)
    fits = all(near_step(store.index, axis) == 1 for store in kernel.stores) and len(nbytes) == 1
    fits &= all(plan.width == 1 or is_vector(split_index(s.index, axis, lane), axis, lane) for s in kernel.stores)
    whole = all(alignment(store.index, axis, sector) % sector == 0 for store in kernel.stores)
    if whole or not fits or sector < plan.width:
        return plan
    run = min(neighbours(store.index, axis) for store in kernel.stores)
    while plan.lanes < COLUMN_THREADS and _has_room(shape, wider := replace(plan, lanes=2 * plan.lanes), run):
        plan = wider
    rows = plan.lanes * plan.width
    plan = replace(plan, blocks=ceil(shape.rows, rows))
    costly = sum(isinstance(node, Apply) and node.op not in CHEAP for node in kernel.nodes)
    if run < _LONG_RUN * rows:
        return plan
    if max(_LEAST_SECTORS, costly / most_again) * sector > rows:
        return in_strips(plan, shape, sector, run)
    # The conditions must not cost the registers that let two large blocks stand on a multiprocessor.
    resident = shape.facts.max_threads // plan.threads if plan.threads > _PAIR_THREADS else plan.resident
    return replace(plan, overlap=sector, blocks=ceil(shape.rows, rows - sector), resident=resident)


def in_strips(plan: Schedule, shape: Shape, sector: int, run: int) -> Schedule:
    """`plan` with blocks that take several tiles of the `run` rows that lie together, and overlap by a `sector` once for all of these.

    As it is, where that leaves too few blocks.
    """
    if plan.width > 1 or plan.unroll == 1 or plan.lanes % sector or shape.rows % run:
        return plan
    for tiles in _STRIPS:
        strips = ceil(run, tiles * plan.lanes - sector)
        blocks = shape.rows // run * strips
        if blocks >= _STRIPS_EACH * shape.facts.multiprocessors:
            tiles = ceil(ceil(run, strips) + sector, plan.lanes)
            return replace(plan, overlap=sector, tiles=tiles, strip=run, blocks=blocks)
    return plan


def _has_room(shape: Shape, plan: Schedule, run: int) -> bool:
    """Whether blocks may be as wide as those of `plan`, where so many rows lie together."""
    rows = plan.lanes * plan.width
    states = plan.threads * plan.width * states_of_thread(shape.kernel) if plan.groups > 1 else 0
    many = ceil(shape.rows, rows) >= 4 * shape.facts.multiprocessors
    return many and plan.threads <= _PAIR_THREADS and states <= STATIC_SHARED and _LONG_RUN * rows <= run


def exchanging(plan: Schedule, crossing: Sequence[Crossing], shape: Shape) -> Schedule:
    """`plan` with its `crossing` stores exchanged, on fewer rows a block if the tiles of whole rows need that."""
    if plan.keep is not Keep.REGISTERS or not crossing:
        return plan
    smallest = min(access.nbytes for access in shape.main)
    for lanes in (plan.lanes >> halved for halved in range(plan.lanes.bit_length())):
        rows = lanes * plan.width
        if lanes * plan.groups < 32 or rows * smallest < SECTOR:
            break
        states = rows * plan.groups * states_of_thread(shape.kernel) if plan.groups > 1 else 0
        if exchanged(crossing, shape.program, rows, power_above(shape.cols)) + states <= STATIC_SHARED:
            return replace(plan, lanes=lanes, blocks=ceil(shape.rows, rows), exchanges=True)
    return plan


def shared_columns(shape: Shape, width: int, most: int) -> Schedule:
    """Several threads for each column of data: `lanes` rows side by side, `groups` threads deep."""
    lanes = 32
    while lanes > 8 and ceil(shape.rows, lanes * width) < shape.facts.multiprocessors:
        lanes //= 2
    groups = 64 // lanes
    slots = width * states_of_thread(shape.kernel)  # bytes for each thread whose state goes through shared memory
    largest = min(1024 // lanes, power_below(STATIC_SHARED // (slots * lanes)))
    while groups < largest and not shape.single and ceil(shape.cols, groups) * width > most:
        groups *= 2
    spread = not shape.single and min(access.nbytes for access in shape.main) >= _WORD
    while spread and groups * lanes < _KEPT_THREADS and ceil(shape.cols, groups) * width > FEW_ELEMENTS:
        groups *= 2
    while groups < largest and ceil(shape.cols, groups) > 8 and not shape.fills(shape.rows // width * groups):
        groups *= 2
    each = ceil(shape.cols, groups)
    blocks = ceil(shape.rows, lanes * width)
    if each * width <= most:
        return Schedule(Walk.OUTER, width, each, lanes, groups, blocks, Keep.REGISTERS)
    return Schedule(Walk.OUTER, width, unroll_of(FEW_ELEMENTS // width, shape.cols, groups), lanes, groups, blocks)


def states_of_thread(kernel: Kernel) -> int:
    """Bytes of shared memory for what a thread found so far of all reductions."""
    return sum(state_bytes(reduction) for reduction in kernel.reductions) * 2  # split statistics have two states
