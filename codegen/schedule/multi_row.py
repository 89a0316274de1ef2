"""Schedules of kernels whose teams take strips of rows that lie together in memory, and when they should.

Columns of a matrix, or the channels of small images, are rows of which a block reads too little at a time, and all of them are too much
for the chip. A strip of rows is as wide as memory wants pieces to be, and a team has all of its columns on the chip at once. Each block
keeps a circular buffer of them, as those of `team` do of their vectors, so that memory always has something to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Load, ReduceOp
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program, Team
from fusepass.codegen.ir.team import state_bytes
from fusepass.codegen.ir.vectors import across, is_vector, split_index
from fusepass.codegen.schedule.columns import outer
from fusepass.codegen.schedule.plan import CircularBuffer, Keep, TeamPart
from fusepass.codegen.schedule.plan_rows import Columns
from fusepass.codegen.schedule.rows import STATIC_SHARED, prefers_rows, transposed_stores
from fusepass.codegen.schedule.shape import ACCESS, LINE, Shape, ceil, shape_of
from fusepass.codegen.schedule.team import AT_ONCE, NEARER, UNDER_WAY

_THREADS = 512  # of a block, at most
_PIECE = 1 << 10  # bytes of a strip in each column, if a team can exchange as many states
_LEAST_STEPS = 3  # from where a team's states are left to where they are wanted
_SHORT_RUN = 1 << 10  # bytes of columns that lie together and begin anywhere
_LOOKS = 6  # states of other blocks that a thread finds
_LEAST_THREADS = 256
_MOST_IDLE = 1.2  # times as long as if all multiprocessors had as much to do
_LARGER = 1.3  # times as large as necessary a team may be, where then fewer blocks are idle
_SUMS = 16  # bytes of what moments are merged as


def strip_team(program: Program, kernel: Kernel, facts: DeviceFacts) -> tuple[int, int, int] | None:
    """(blocks of a team, teams, rows of a strip) where strips read clearly less memory than any other schedule of `kernel`."""
    shape = shape_of(kernel, program, facts, aligned=True)
    if shape.single or not shape.rows or not shape.cols or len(kernel.reduction_loops) != 1 or not facts.copies:
        return None
    side, span = _side_by_side(shape)
    read = sum(program.buffer(name).nbytes for name in {access.buffer for access in side.main} & kernel.reads)
    # Short runs, which are slow by themselves, need not be too many to be read again from the cache, only to be in it beside the results.
    if not span or read * (2 if span > 1 else 1) < facts.l2_bytes or not _may_ring(side):
        return None
    alone = outer(shape) if span == 1 else None
    if alone is not None and alone.keep is not Keep.NOTHING and alone.resident != 1:
        return None  # columns that several blocks of a multiprocessor hold are read once, in pieces as wide
    width = _width(side)
    unit, element = lcm(span, width), ACCESS // width
    # Wide pieces, but room for the states that a block merges, and few of them for all members to look at.
    for piece in (_PIECE, _PIECE // 2, _PIECE // 4, _PIECE // 8):
        positions = ceil(max(piece // element, 2 * span), unit) * unit
        strips, block = ceil(side.rows, positions), _block(side, span, positions)
        if block is None:
            continue
        found = dict[tuple[int, int], Columns]()
        for members in range(2, facts.multiprocessors + 1):
            teams = min(facts.multiprocessors // members, strips)
            plan = _plan(side, span, block, members, teams)
            if plan is not None and plan.buffer and plan.buffer.ahead - plan.iterations + 1 >= _LEAST_STEPS:
                found[members, teams] = plan
                if members >= _LARGER * min(found)[0]:
                    break
        if not found:
            continue
        share, members, teams = min((_share(side, positions, *size), *size) for size in found)
        if share * facts.multiprocessors <= _MOST_IDLE:
            return members, teams, positions // span
    return None


def _share(side: Shape, positions: int, members: int, teams: int) -> float:
    """Of all that is read, by the block that reads most."""
    strips = ceil(ceil(side.rows, positions), teams)
    return strips * positions * ceil(side.cols, members) / (side.rows * side.cols)


def strips(shape: Shape, team: Team) -> Columns | None:
    """The schedule of a kernel whose teams take strips; None where what it loads does not begin with a vector."""
    side, span = _side_by_side(shape)
    block = _block(side, span, team.strip * span) if span and _may_ring(side) else None
    return None if block is None else _plan(side, span, block, team.members, team.teams)


def _side_by_side(shape: Shape) -> tuple[Shape, int]:
    """The kernel with rows that are neighbours in memory, and how many of these are parts of one row; 0 where there are none."""
    if prefers_rows(shape):
        return shape, 0 if transposed_stores(shape, shape.row_axis, shape.col_axis) else 1
    if len(shape.whole.cols) < 2 or transposed_stores(shape, shape.col_axis, shape.row_axis):
        return shape, 0
    assert shape.col_axis is not None
    side = Shape(across(shape.whole), shape.program, shape.facts, shape.aligned)
    narrow = shape.vectors(shape.col_axis)
    run, nbytes = shape.whole.cols[-1].size, max(access.nbytes for access in shape.main)
    short = narrow.width * nbytes < ACCESS or run * nbytes < (LINE if narrow.start is None else _SHORT_RUN)
    return side, run if short else 0


def _may_ring(side: Shape) -> bool:
    """Whether all that is kept is loaded as it is, in whole vectors along the rows, and reduced once with little arithmetic."""
    axis, lane = side.row_axis, Axis("lane", _width(side))
    assert axis is not None
    # Moments are merged in double, which would be too little for moments of doubles.
    if any(each.op is ReduceOp.SOFTMAX or each.dtype is DType.F64 for each in side.kernel.reductions):
        return False
    aligned = {access.buffer for access in side.accesses if access.aligned}
    whole = (
        isinstance(each.node, Load)
        and each.node.buffer in aligned
        and each.node.dtype.nbytes * lane.size == ACCESS
        and is_vector(split_index(each.node.index, axis, lane), axis, lane)
        for each in side.kept
    )
    return bool(side.kept) and side.rows % lane.size == 0 and all(whole)


def _width(side: Shape) -> int:
    return ACCESS // min((each.node.dtype.nbytes for each in side.kept), default=ACCESS)


@dataclass(frozen=True)
class _Block:
    """What a block of any team has for its strips.

    Attributes:
        width: elements of a vector.
        lanes: vectors beside each other.
        groups: columns at once.
        strip: rows.
        states: bytes of shared memory in which these are merged.
        place: bytes of the circular buffer for what is loaded at once.
    """

    width: int
    lanes: int
    groups: int
    strip: int
    states: int
    place: int

    @property
    def threads(self) -> int:
        return self.lanes * self.groups


def _block(side: Shape, span: int, positions: int) -> _Block | None:
    """A block for strips of so many `positions`, `span` to a row; None where it has too few threads."""
    kernel, width = side.kernel, _width(side)
    lanes, strip = positions // width, positions // span
    if lanes < 32 and 32 % lanes:
        return None
    together = 32 // lanes if lanes < 32 else 1  # groups of a warp
    groups = _THREADS // lanes // together * together
    while groups and _shared(kernel, positions, strip, groups // together, lanes * groups) > STATIC_SHARED:
        groups -= together
    threads = lanes * groups
    if threads < max(_LEAST_THREADS, strip):
        return None
    states = _shared(kernel, positions, strip, groups // together, threads)
    kept = sum(each.node.dtype.nbytes for each in side.kept) * width
    return _Block(width, lanes, groups, strip, states, AT_ONCE * threads * kept)


def _plan(side: Shape, span: int, block: _Block, members: int, teams: int) -> Columns | None:
    """A circular buffer for strips that such a `block` takes, `span` positions to a row; None where a block's part is too large for it."""
    part, facts = ceil(side.cols, members), side.facts
    if part * (members - 1) >= side.cols or ceil(members, block.threads // block.strip) > _LOOKS:
        return None
    places = (facts.shared_bytes_per_block - block.states) // block.place
    iterations = ceil(part, AT_ONCE * block.groups)
    # Four places for a team's states are enough while nobody is further ahead.
    ahead = min(3 * iterations - 1, places - 1 - UNDER_WAY)
    if ahead < iterations:
        return None
    buffer = CircularBuffer(places, ahead, nearer=NEARER)
    return Columns(
        block.width,
        AT_ONCE,
        block.lanes,
        block.groups,
        blocks=members * teams,
        shared_bytes=places * block.place,
        resident=1,
        keep=Keep.SHARED,
        team=TeamPart(members, part, kept=part, buffer=buffer),
        span=span,
    )


def _shared(kernel: Kernel, positions: int, strip: int, parts: int, threads: int) -> int:
    """Bytes of shared memory in which a block of so many threads merges its states, and those of its team."""
    merged = threads // strip * (strip + 1) + strip
    each = [max(state_bytes(reduction), 4) for reduction in kernel.reductions]
    return sum(parts * (positions + 1) * size + merged * max(size, _SUMS) for size in each)
