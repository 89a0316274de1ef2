"""Schedules of kernels whose rows are shared by teams of blocks, and when such teams are worth it.

A block keeps its slice of a row in shared memory, so that memory is read once. Two blocks are resident on each
multiprocessor: while one waits for its team, the other moves data. A row that is too large for two teams is shared by one
team of a block on each multiprocessor, which has all of its registers, too. What a block can keep in neither is read
again, the last part first, as that is still in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusepass.codegen.device import RESERVED, DeviceFacts
from fusepass.codegen.ir.expr import Load, ReduceOp, walk
from fusepass.codegen.ir.program import Kernel, Program, Team
from fusepass.codegen.ir.team import state_bytes
from fusepass.codegen.schedule.plan import CircularBuffer, Keep, TeamPart
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule.rows import (
    FEW_ELEMENTS,
    can_fetch,
    inner,
    prefers_rows,
    transposed_stores,
    unroll_of,
)
from fusepass.codegen.schedule.shape import ACCESS, LINE, Shape, ceil, shape_of

_LANES = 512
_RESIDENT = 2  # blocks on a multiprocessor, where there are several teams
_HELD_WORDS = {1: 64, 2: 16}  # registers of a thread for values of the row, with so many blocks on a multiprocessor
AT_ONCE = 2  # vectors that a thread takes in each step of a circular buffer
_TIMES_A_ROW = 1.75  # what a circular buffer has at least of a block's part of a row: what is less waits for the team
UNDER_WAY = 1  # places of a circular buffer to which copies are under way: the states of a team wait behind these
NEARER = 2  # places further on, what is coming is brought to the L2 cache
_LARGE_WEIGHTS = 0.25  # of the L2 cache: what all rows meet stays there only if it is told to
_WAITING_WORDS = 64  # registers of a thread for what is the same for all rows
_LEAST_KEPT = 0.25  # of a row, or the exchange is not worth what it saves
_MOSTLY_KEPT = 0.75  # of a row, where two teams hide each other's waits
_MANY_COLUMNS = 16  # of which one number is as good as none for each: the first-level cache has it
_LONG_RUN = 32  # cache lines, of which it does not matter that the first one is not full
_UNEVEN = 1.03  # what it costs that threads have unequally many vectors: conditions, and reductions by fewer at once
_WAIT = 3e-6  # seconds of each exchange that other teams do not hide, as measured on an H200 with teams of 16 to 132
_RING_WAIT = 1e-6  # the same of blocks with a circular buffer


def team_size(program: Program, kernel: Kernel, facts: DeviceFacts) -> tuple[int, int] | None:
    """(blocks of a team, teams) where teams read clearly less memory than any other schedule of `kernel`.

    That is so where rows are too large for one block and the whole does not fit the L2 cache: whatever reads a row
    a second time would read it from memory.
    """
    shape = shape_of(kernel, program, facts, aligned=True)
    transposing = transposed_stores(shape, shape.col_axis, shape.row_axis)
    if shape.single or shape.col_axis is None or not shape.rows or prefers_rows(shape) or transposing:
        return None
    read = sum(program.buffer(name).nbytes for name in {access.buffer for access in shape.main} & kernel.reads)
    room, row_bytes = _room(kernel, facts, _RESIDENT), shape.cols * _kept_bytes(shape)
    if not row_bytes or read < facts.l2_bytes or inner(shape).keep is not Keep.NOTHING:
        return None
    ringed = _ring_team(shape, row_bytes)
    if ringed is not None:
        return ringed
    weights = _shared_by_rows(shape)
    if weights >= row_bytes and weights >= _LARGE_WEIGHTS * facts.l2_bytes:
        return None
    blocks = min(_RESIDENT * facts.multiprocessors, _LANES)  # a thread for each member
    alone = min(facts.multiprocessors, _LANES)
    needed = ceil(row_bytes, room)
    if 2 * needed <= blocks:
        return _fitting(shape, row_bytes, blocks, max(needed, 2))
    half = blocks // 2
    if shape.rows > 1 and half > 1 and half * room >= _MOSTLY_KEPT * row_bytes:
        return half, 2
    return (alone, 1) if alone * _room(kernel, facts, 1) >= _LEAST_KEPT * row_bytes else None


def _ring_team(shape: Shape, row_bytes: int) -> tuple[int, int] | None:
    """The team whose blocks keep a circular buffer, each alone on a multiprocessor; None where they cannot, or gain nothing."""
    assert shape.col_axis is not None
    base = _vectors(shape)
    places, blocks = _places(shape, base.width), min(shape.facts.multiprocessors, _LANES)
    most = int(places / _TIMES_A_ROW)  # steps over a block's part of a row
    if most < 1 or not may_buffer(shape, base):
        return None
    needed = max(ceil(base.vectors(shape.cols), most * AT_ONCE * _LANES), 2)
    members, teams = _fitting(shape, row_bytes, blocks, needed, _RING_WAIT) if needed <= blocks else (0, 0)
    return (members, teams) if shape.rows > teams > 0 else None


def _ahead(places: int, iterations: int) -> int | None:
    """How many places of a circular buffer so large what is reduced may be ahead of what is stored, where a row takes so many `iterations`."""
    ahead = min(2 * iterations - 1, places - 1 - UNDER_WAY)
    return ahead if ahead >= iterations else None


def _waiting(shape: Shape, base: Rows) -> int:
    """How many vectors of all that rows share a thread may hold in registers; none where rows begin anywhere, and each meets them at other
    places."""
    weights = sum(load.dtype.nbytes for load in _weights(shape)) * base.width
    return _WAITING_WORDS * 4 // weights if weights and base.start is None else 0


def may_buffer(shape: Shape, vectors: Rows) -> bool:
    """Whether a circular buffer serves the kernel: `vectors` that are copied as they are, and one reduction loop of little arithmetic.

    Online softmax gains nothing: exponentials take as long as what blocks wait for. Nor do rows with weights that the cache keeps
    anyway.
    """
    kernel, weights = shape.kernel, _bytes(shape, _for_all_rows(shape, shape.kernel.loads()))
    if 0 < weights < _LARGE_WEIGHTS * shape.facts.l2_bytes:
        return False
    whole = all(kept.node.dtype.nbytes * vectors.width == ACCESS for kept in shape.kept)
    cheap = all(reduction.op is not ReduceOp.SOFTMAX for reduction in kernel.reductions)
    return whole and cheap and len(kernel.reduction_loops) == 1 and can_fetch(shape, kernel, vectors)


def _places(shape: Shape, width: int) -> int:
    """Of a circular buffer in all of a multiprocessor's shared memory, where a team meets for so many rows at once."""
    return _room(shape.kernel, shape.facts, 1) // (AT_ONCE * _LANES * width * max(_kept_bytes(shape), 1))


def _shared_by_rows(shape: Shape) -> int:
    """Bytes that every row reads again, such as a weight for each column: split rows read them for several at once."""
    rows = frozenset(shape.kernel.rows)
    return _bytes(shape, (load for load in shape.kernel.loads() if not load.index.axes & rows))


def _bytes(shape: Shape, loads: Iterable[Load]) -> int:
    """Of what they read."""
    return sum(shape.program.buffer(name).nbytes for name in {load.buffer for load in loads})


def _vectors(shape: Shape) -> Rows:
    """Nothing but the vectors of rows that several blocks share."""
    assert shape.col_axis is not None
    plan = shape.vectors(shape.col_axis).covering
    line = plan.width * LINE // ACCESS  # elements
    # Where a run begins in the middle of a line, the accesses of all its warps touch one more than they have.
    if plan.start is None or plan.run < _LONG_RUN * line:
        return plan
    return replace(plan, start=replace(plan.start, begin=line))


def _fitting(shape: Shape, row_bytes: int, blocks: int, needed: int, wait: float = _WAIT) -> tuple[int, int]:
    """The team of at least `needed` blocks with which all rows take least time, where an exchange takes `wait` seconds."""
    vectors = _vectors(shape).vectors(shape.cols)

    def time(members: int) -> tuple[float, int]:
        teams = min(blocks // members, shape.rows)
        idle = ceil(shape.rows, teams) * teams / shape.rows  # in the last iteration
        few = blocks / (members * teams)
        waiting = 1.0 + wait * shape.facts.bandwidth / (2 * row_bytes * teams)
        return idle * few * waiting * (1.0 if vectors % (members * _LANES) == 0 else _UNEVEN), members

    members = min(range(needed, min(2 * needed, blocks) + 1), key=time)
    return members, min(blocks // members, shape.rows)


def team(shape: Shape, team: Team) -> Rows:
    """The schedule of a kernel whose rows are shared."""
    assert shape.col_axis is not None
    base = _vectors(shape)
    width, part = base.width, ceil(base.vectors(shape.cols), team.members)
    ring = _ring(shape, team, base, part)
    if ring is not None:
        return ring
    each = width * _kept_bytes(shape)
    resident = _RESIDENT if team.members * team.teams > shape.facts.multiprocessors else 1
    unroll = unroll_of(FEW_ELEMENTS // width, part, _LANES)
    kept = min(ceil(part, _LANES), _room(shape.kernel, shape.facts, resident) // (each * _LANES)) * _LANES
    blocks = team.members * team.teams
    held = _held(shape, width, part - kept, _HELD_WORDS[resident]) if kept < part else 0
    of_block = TeamPart(team.members, part, kept=min(kept, part), held=held)
    # Where most is read again, the memory has enough to do with that.
    fetches = 2 * of_block.on_chip(_LANES) >= part and can_fetch(shape, shape.kernel, base)
    return replace(
        base,
        unroll=unroll,
        lanes=_LANES,
        blocks=blocks,
        shared_bytes=kept * each,
        resident=resident,
        keep=Keep.FETCHED if fetches else Keep.SHARED,
        split=of_block,
    )


def _ring(shape: Shape, team: Team, base: Rows, part: int) -> Rows | None:
    """The schedule with a circular buffer, where a block has a multiprocessor to itself and room for more than its part of a row."""
    width, blocks = base.width, team.members * team.teams
    places, iterations = _places(shape, width), ceil(part, AT_ONCE * _LANES)
    ahead = _ahead(places, iterations)
    fits = ahead is not None and blocks <= shape.facts.multiprocessors and shape.rows > team.teams
    if ahead is None or not fits or team.members > _LANES or not may_buffer(shape, base):
        return None
    waiting = min(_waiting(shape, base), ceil(part, _LANES)) // AT_ONCE * AT_ONCE
    # Weights that come from the cache have it for themselves.
    nearer = 0 if _weights(shape) and waiting * _LANES < part else NEARER
    buffer = CircularBuffer(places, ahead, nearer, waiting)
    return replace(
        base,
        unroll=AT_ONCE,
        lanes=_LANES,
        blocks=blocks,
        shared_bytes=places * AT_ONCE * _LANES * width * _kept_bytes(shape),
        resident=1,
        keep=Keep.SHARED,
        split=TeamPart(team.members, part, kept=part, buffer=buffer),
    )


def _weights(shape: Shape) -> list[Load]:
    """Loads of numbers for the columns with which results are computed."""
    nodes = walk(*(store.value for store in shape.kernel.stores))
    return _for_all_rows(shape, (node for node in nodes if isinstance(node, Load)))


def _for_all_rows(shape: Shape, loads: Iterable[Load]) -> list[Load]:
    """Those along the columns that are the same for all rows, but for what many columns share, as those of a channel do."""
    rows, cols = frozenset(shape.kernel.rows), frozenset(shape.kernel.cols)
    least = shape.cols // _MANY_COLUMNS
    own = (load for load in loads if shape.program.buffer(load.buffer).numel > least)
    return [load for load in own if load.index.axes & cols and not load.index.axes & rows]


def _held(shape: Shape, width: int, vectors: int, words: int) -> int:
    """How many of so many `vectors` each thread may hold in so many registers; of one alone nothing is gained."""
    assert shape.col_axis is not None
    loads = [load for load in shape.kernel.loads() if shape.col_axis in load.index.axes]
    bytes_each = sum(max(load.dtype.nbytes * width, 4) for load in loads)
    most = 4 * words // max(bytes_each, 1)
    return min(max(ceil(vectors, _LANES), 2), most) if most > 1 else 0


def _kept_bytes(shape: Shape) -> int:
    """Bytes for each column that a later phase uses again."""
    return sum(value.node.dtype.nbytes for value in shape.kept)


def _room(kernel: Kernel, facts: DeviceFacts, resident: int) -> int:
    """Bytes of shared memory in which each of so many blocks on a multiprocessor may keep its slice."""
    slots = 2 * (_LANES // 32)  # a state for each warp, of the block and then of the team
    states = sum(-(-slots * state_bytes(reduction) // 16) * 16 for reduction in kernel.reductions)
    return (facts.shared_bytes_per_block + RESERVED) // resident - RESERVED - states
