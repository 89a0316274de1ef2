"""Schedules of kernels with reductions whose vectors run along the rows: a thread has some columns of neighbouring rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.device import WARP, DeviceFacts
from fusepass.codegen.ir.expr import Apply, Gather, indices_in
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.ops import CHEAP, Op
from fusepass.codegen.ir.program import Kernel, Program, Store
from fusepass.codegen.ir.random import OF_A_CALL
from fusepass.codegen.ir.tile import fitting_width, power_above
from fusepass.codegen.ir.transpose import Transpose, close_by, near_step, neighbours, pace
from fusepass.codegen.ir.updates import read_in_place
from fusepass.codegen.ir.vectors import alignment, is_vector, split_index
from fusepass.codegen.schedule.lanes import packs, words_held
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_rows import Columns
from fusepass.codegen.schedule.rows import (
    FEW_ELEMENTS,
    STATIC_SHARED,
    prefers_rows,
    states_of_thread,
    transposed_stores,
    unroll_of,
)
from fusepass.codegen.schedule.shape import LINE, SECTOR, Shape, ceil, most_elements, power_below, shape_of
from fusepass.codegen.schedule.transpose import exchanged

_KEPT_THREADS = 256  # per block, up to which columns are shared by more threads than have room for them
# Bytes of an element from which that is better: half as many are more computation for the bytes that they are.
_WORD = 4
COLUMN_THREADS = 128  # per block, where each has columns of its own
_STEP_BYTES = 64  # of a column that a thread loads at once, where several share one and it does not stay in registers
_NEARLY = 16 / 15  # of the threads that fill the device are enough
_EVEN = 0.9  # of multiprocessors' time that blocks of several columns should fill
_SHORT_COLUMN, _NEIGHBOURS = 512, 4  # elements; rows of a thread in such columns of halves that begin anywhere
_SHARED_BYTES = 8  # of an access, from which on columns that are read once are shared by warps
_MANY = 4  # times as many threads with rows of their own as fill the device, from which on they are not
_BYTES_AHEAD = 32  # of a column that a thread of such a block loads at once
_PAIR_THREADS = 512  # per block, where columns are shared and each thread has two rows
# Of columns that a thread of 64 registers holds, by how many rows it has; of 128 registers, in a block that has a multiprocessor to itself.
_HELD_WORDS, _LONE_WORDS = {1: 48, 2: 36}, 96
_SHORT_RUN = 64  # rows that lie together
_RUN_WORDS = (32, 48), (64, 80)  # of a column that a thread holds, and the registers that it takes
_LONG_RUN = 4  # blocks' rows that lie together in memory, at least, so that few have an end of them
_LEAST_SECTORS = 4  # of a block's rows, where blocks overlap by one
_MOST_AGAIN = 0.6  # functions of an element times the share of them that two blocks compute


def stays(program: Program, kernel: Kernel, facts: DeviceFacts) -> bool:
    """Whether `kernel` needs columns again, and has them on the chip then where each block takes whole ones."""
    if not kernel.reduction_loops or kernel.scans:
        return False
    shape = shape_of(kernel, program, facts, aligned=True)
    return not shape.single and prefers_rows(shape) and outer(shape).keep is not Keep.NOTHING


def outer(shape: Shape) -> Columns:
    """Threads side by side across rows, where neighbours in memory belong to different ones."""
    assert shape.row_axis is not None
    cols = max(shape.cols, 1)
    most = most_elements(shape)
    transposing = transposed_stores(shape, shape.row_axis, shape.col_axis)
    apart = shape.single and _looks_up_apart(shape)
    width = widest = 1 if apart else shape.width(shape.row_axis, 4, frozenset(each.index for each in transposing))
    # Where columns do not stay in registers, a warp should read a line at least.
    least = min(widest, ceil(_WORD, min(access.nbytes for access in shape.main)))
    while width > (least if shape.single else 1):
        whole = min(cols * width, FEW_ELEMENTS) if shape.single else cols * width
        if whole <= most and shape.fills(shape.rows // width):
            break
        if shape.single and cols > FEW_ELEMENTS and shape.fills(shape.rows // width * (COLUMN_THREADS // 32)):
            break  # a block's warps share columns, and vectors stay whole
        width //= 2
    alone_is_slow = width == 1 and cols > FEW_ELEMENTS and (widest > 1 or not shape.single)
    if cols * width <= most and not alone_is_slow:
        blocks = ceil(shape.rows, COLUMN_THREADS * width)
        alone = Columns(width, cols, COLUMN_THREADS, 1, blocks, keep=Keep.REGISTERS)
        return overlapping(exchanging(alone, transposing, shape), shape)
    if shape.single and not apart and shape.fills(shape.rows // width):
        return _columns_read_once(shape, width)
    runs = None if transposing or shape.single else short_runs(shape)
    if runs:
        return runs
    few = OF_A_CALL if _draws(shape) else 2  # rows a thread, while blocks stay small
    pairs = shared_columns(shape, min(widest, few), most)
    fits = (
        not transposing
        and not shape.single
        and pairs.keep.in_registers
        and pairs.threads <= _PAIR_THREADS
        and shape.fills(pairs.blocks * pairs.threads)
    )
    if fits:
        return overlapping(pairs, shape)
    held = None if transposing or shape.single else held_columns(shape, min(widest, 2))
    if held:
        return held
    shared = shared_columns(shape, width, most)
    if shared.keep is Keep.NOTHING and width < least:
        shared = shared_columns(shape, least, most)
    return overlapping(exchanging(shared, transposing, shape), shape)


def _draws(shape: Shape) -> bool:
    """Whether elements have random numbers, which neighbours get from one call."""
    return any(isinstance(node, Apply) and node.op is Op.UNIFORM for node in shape.kernel.nodes)


def _columns_read_once(shape: Shape, width: int) -> Columns:
    """Columns that stay nowhere, of rows enough for a thread each of `width` of them.

    Each is shared by a block's warps where these have whole accesses for it and rows are not many: the shorter a kernel takes the more that
    gains. In short columns of halves that begin anywhere threads have neighbours, which they find in the same lines. Blocks of single elements have many rows.
    """
    smallest = min(access.nbytes for access in shape.main)
    if width == 1 and smallest < _WORD and shape.cols <= _SHORT_COLUMN:
        width = fitting_width(_NEIGHBOURS, lambda width: shape.rows % width == 0)
    lanes, groups, most = COLUMN_THREADS, 1, FEW_ELEMENTS // width
    looked_up = any(isinstance(node, Gather) for node in shape.kernel.nodes)
    many = shape.fills(shape.rows // (width * _MANY))
    if width * smallest >= _SHARED_BYTES and not looked_up and not many:
        lanes, groups = WARP, COLUMN_THREADS // WARP
    elif width == 1:
        lanes, most = _wide_block(shape), _BYTES_AHEAD // smallest
    blocks = ceil(shape.rows, lanes * width)
    return Columns(width, unroll_of(most, shape.cols, groups), lanes, groups, blocks)


def _wide_block(shape: Shape) -> int:
    """Threads of a block in which each has one row: as many as leave multiprocessors about as many blocks each.

    Warps of a block read what is next to each other at about the same time, and rows that begin anywhere share sectors.
    """
    processors = shape.facts.multiprocessors

    def is_even(threads: int) -> bool:
        blocks = ceil(shape.rows, threads)
        return blocks >= _EVEN * processors * ceil(blocks, processors)

    return next(filter(is_even, (4 * COLUMN_THREADS, 2 * COLUMN_THREADS)), COLUMN_THREADS)


def held_columns(shape: Shape, width: int) -> Columns | None:
    """Columns in the registers of blocks of which a multiprocessor has two: one loads or stores while the other one computes. Columns that
    are too long for that, in those of a block that has a multiprocessor to itself.

    Their rows lie together in pieces of a cache line, or, where columns are too long for that, of a half or a quarter of one, if these
    are whole sectors; None where columns are too long for all of these, or would not fill the device, or where blocks would store parts of
    sectors and cannot overlap.
    """
    assert shape.row_axis is not None
    axis = shape.row_axis
    whole = all(_in_whole_sectors(store, shape, axis) for store in shape.kernel.stores)
    if not whole:
        plan = _held(shape, width, LINE, 2)
        plan = plan and overlapping(plan, shape)
        return plan if plan and plan.overlap else None
    single = width if packs(shape, width) else 1  # rows of a thread: of one there are fewer groups to merge
    ways = [(width, LINE, 2), (single, LINE, 2), (single, LINE // 2, 2), (width, LINE // 2, 1), (width, LINE // 4, 1)]
    if packs(shape, width):
        ways.insert(3, (width, LINE // 4, 2))
    return next((plan for plan in (_held(shape, *way) for way in ways) if plan), None)


def _held(shape: Shape, width: int, piece: int, resident: int) -> Columns | None:
    """Columns of `width` rows a thread, in pieces of so many bytes, `resident` blocks a multiprocessor; None where one has no room."""
    lanes = piece // (width * min(access.nbytes for access in shape.main))
    groups = _PAIR_THREADS // lanes
    each, packed = ceil(shape.cols, groups), packs(shape, width)
    blocks = ceil(shape.rows, lanes * width)
    most = _LONE_WORDS if resident == 1 else _HELD_WORDS[width]
    fits = words_held(shape, each * width, packed=packed) <= most and shape.fills(blocks * _PAIR_THREADS)
    if not fits or _PAIR_THREADS * width * states_of_thread(shape.kernel) > STATIC_SHARED:
        return None
    keep = Keep.PACKED if packed else Keep.REGISTERS
    return Columns(width, each, lanes, groups, blocks, resident=resident, keep=keep)


def short_runs(shape: Shape) -> Columns | None:
    """Rows that lie together in runs of a cache line or little more, such as the 7 x 7 positions of an image, which begin anywhere: a block
    has a whole run, so that what it reads and writes of all columns lies together, or, where it has no room for that, half a line. None where
    a run has another length, or few rows do not fill the device.
    """
    assert shape.row_axis is not None
    axis, kernel = shape.row_axis, shape.kernel
    run = min((neighbours(store.index, axis) for store in kernel.stores), default=0)
    smallest = min(access.nbytes for access in shape.main)
    if run * smallest < LINE or run > _SHORT_RUN or all(_in_whole_sectors(s, shape, axis) for s in kernel.stores):
        return None
    for words, registers in _RUN_WORDS:
        groups = power_above(ceil(shape.cols * max(shape.kept_words, 1), words))
        threads = ceil(run * groups, 32) * 32
        slots = run * groups * states_of_thread(kernel)
        if threads <= 1024 and threads * registers <= shape.facts.registers and slots <= STATIC_SHARED:
            each, blocks = ceil(shape.cols, groups), ceil(shape.rows, run)
            plan = Columns(1, each, run, groups, blocks, keep=Keep.REGISTERS)
            return plan if shape.fills(blocks * threads) else None
    return _held(shape, 1, LINE // 2, 1)


def overlapping(plan: Columns, shape: Shape, most_again: float = _MOST_AGAIN) -> Columns:
    """`plan` with blocks that overlap by a sector, where they would store parts of sectors at both ends of each column.

    A sector that is written in part takes the memory several times as long. Reading it twice, mostly from the L2 cache, and computing
    it twice is less, unless there is much to compute. What may be written over must not be read by another block.
    """
    axis, kernel = shape.row_axis, shape.kernel
    if not plan.keep.in_registers or plan.exchanges or axis is None or not kernel.stores:
        return plan
    if kernel.writes & (read_in_place(shape.program) | kernel.reads):
        return plan
    nbytes = {shape.program.buffer(store.buffer).dtype.nbytes for store in kernel.stores}
    sector, lane = SECTOR // max(nbytes), Axis("lane", plan.width)
    fits = all(near_step(store.index, axis) == 1 for store in kernel.stores) and len(nbytes) == 1
    fits &= all(plan.width == 1 or is_vector(split_index(s.index, axis, lane), axis, lane) for s in kernel.stores)
    whole = all(_in_whole_sectors(store, shape, axis) for store in kernel.stores)
    if whole or not fits or sector < plan.width:
        return plan
    run = min(neighbours(store.index, axis) for store in kernel.stores)
    while plan.lanes < COLUMN_THREADS and _has_room(shape, wider := replace(plan, lanes=2 * plan.lanes), run):
        plan = wider
    rows = plan.lanes * plan.width
    plan = replace(plan, blocks=ceil(shape.rows, rows))
    costly = sum(isinstance(node, Apply) and node.op not in CHEAP for node in kernel.nodes)
    if run < _LONG_RUN * rows or max(_LEAST_SECTORS, costly / most_again) * sector > rows:
        return plan
    # The conditions must not cost the registers that let two large blocks stand on a multiprocessor.
    resident = shape.facts.max_threads // plan.threads if plan.threads > _PAIR_THREADS else plan.resident
    return replace(plan, overlap=sector, blocks=ceil(shape.rows, rows - sector), resident=resident)


def _in_whole_sectors(store: Store, shape: Shape, axis: Axis) -> bool:
    """Whether rows that lie together begin with a sector where they are stored."""
    sector = SECTOR // shape.program.buffer(store.buffer).dtype.nbytes
    return alignment(store.index, axis, sector) % sector == 0


def _has_room(shape: Shape, plan: Columns, run: int) -> bool:
    """Whether blocks may be as wide as those of `plan`, where so many rows lie together."""
    rows = plan.lanes * plan.width
    states = plan.threads * plan.width * states_of_thread(shape.kernel) if plan.groups > 1 else 0
    many = ceil(shape.rows, rows) >= 4 * shape.facts.multiprocessors
    return many and plan.threads <= _PAIR_THREADS and states <= STATIC_SHARED and _LONG_RUN * rows <= run


def exchanging(plan: Columns, transposing: Sequence[Transpose], shape: Shape) -> Columns:
    """`plan` with its `transposing` stores exchanged, on fewer rows a block if the tiles of whole rows need that."""
    if not plan.keep.in_registers or not transposing:
        return plan
    smallest = min(access.nbytes for access in shape.main)
    for lanes in (plan.lanes >> halved for halved in range(plan.lanes.bit_length())):
        rows = lanes * plan.width
        if lanes * plan.groups < 32 or rows * smallest < SECTOR:
            break
        states = rows * plan.groups * states_of_thread(shape.kernel) if plan.groups > 1 else 0
        if exchanged(transposing, shape.program, rows, power_above(shape.cols)) + states <= STATIC_SHARED:
            return replace(plan, lanes=lanes, blocks=ceil(shape.rows, rows), exchanges=True)
    return plan


def _steps_at_once(shape: Shape, width: int) -> int:
    """Columns, of `width` rows, that a thread loads at once: so many bytes that memory has enough to do."""
    smallest = min(access.nbytes for access in shape.main)
    return max(min(_STEP_BYTES // (width * smallest), FEW_ELEMENTS), 1)


def _looks_up_apart(shape: Shape) -> bool:
    """Whether neighbouring rows look up what lies anywhere, each for itself."""
    axis, lane = shape.row_axis, Axis("lane", 2)
    assert axis is not None
    places = (place for node in shape.kernel.nodes if isinstance(node, Gather) for place in node.places)
    indices = (index for place in places for index in indices_in(place.value))
    return any(lane in split_index(index, axis, lane).axes for index in indices)


def _steps_over(shape: Shape) -> bool:
    """Whether neighbouring rows leave out elements, which others need, or the same ones later: so blocks have more lines in the cache."""
    axis = shape.row_axis
    assert axis is not None
    return any(access.window or 1 < pace(access.index, axis) < SECTOR for access in shape.main)


def shared_columns(shape: Shape, width: int, most: int) -> Columns:
    """Several threads for each column of data: `lanes` rows side by side, as many as lie together at most, `groups` threads deep."""
    assert shape.row_axis is not None
    lanes = 32
    while lanes > 8 and ceil(shape.rows, lanes * width) < shape.facts.multiprocessors:
        lanes //= 2
    reads = ((access.index, SECTOR // 2 // access.nbytes) for access in shape.main)
    run = max(close_by(index, shape.row_axis, reach, lanes * width) for index, reach in reads)
    lanes = min(lanes, power_above(ceil(run, width)))
    groups, warp = (COLUMN_THREADS if shape.single else 64) // lanes, max(32 // lanes, 1)
    slots = width * states_of_thread(shape.kernel)  # bytes for each thread whose state goes through shared memory
    if groups // warp * lanes * slots > STATIC_SHARED:
        groups = warp  # whose threads need none to merge their states
    largest = min(1024 // lanes, power_below(STATIC_SHARED // (slots * lanes)))
    while groups < largest and not shape.single and ceil(shape.cols, groups) * width > most:
        groups *= 2
    spread = not shape.single and min(access.nbytes for access in shape.main) >= _WORD
    few = FEW_ELEMENTS // 2 if _steps_over(shape) else FEW_ELEMENTS
    while spread and groups * lanes < _KEPT_THREADS and ceil(shape.cols, groups) * width > few:
        groups *= 2
    while (
        groups < largest
        and ceil(shape.cols, groups) > 8
        and not shape.fills(int(_NEARLY * (shape.rows // width) * groups))
    ):
        groups *= 2
    each = ceil(shape.cols, groups)
    blocks = ceil(shape.rows, lanes * width)
    if each * width <= most:
        return Columns(width, each, lanes, groups, blocks, keep=Keep.REGISTERS)
    return Columns(width, unroll_of(_steps_at_once(shape, width), shape.cols, groups), lanes, groups, blocks)
