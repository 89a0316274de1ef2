"""Schedules of rows that are reduced over, beside what happens along each of them: blocks take pieces of the rows, one row after another.

A thread has the same columns of each row. What it finds of them stays in its registers for some rows, and goes to shared memory then; when the
piece ends, it is merged there for each column, in order, and stored.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusepass.codegen.device import WARP, DeviceFacts
from fusepass.codegen.ir.expr import Window
from fusepass.codegen.ir.program import Kernel, Partials, Program
from fusepass.codegen.ir.team import state_bytes
from fusepass.codegen.schedule.lanes import packs, words_held
from fusepass.codegen.schedule.output_tile_results import room_of_states
from fusepass.codegen.schedule.plan import Keep, Pieces
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule.rows import prefers_rows, transposed_stores
from fusepass.codegen.schedule.shape import Shape, ceil, shape_of

# Registers of a thread for its part of a row, for that of the next one if it is under way, and for what it found of its columns; whether it is;
# and the most threads that share a row then.
_WAYS = (48, True, 256), (48, False, 512), (80, False, 1024)
_BLOCK = 256  # threads of a block that has several rows at once
_THREADS = 1024  # that should stand on a multiprocessor
_ROOM = 96 << 10  # bytes of shared memory of a block
_WORD = 4  # bytes
TOGETHER = 16  # rows of a thread between two times that it leaves what it found: so many numbers are added as they are
_LEAST_ROWS, _MOST_ROWS = 4, 24 * TOGETHER  # of a thread: as many such sums are added
_LEAST_OF_PIECE = 8  # rows: what a piece leaves is as much as one of them has, or more


def row_pieces(program: Program, kernel: Kernel, facts: DeviceFacts) -> int | None:
    """In how many pieces a kernel with reduction loops should reduce over rows, of each sample where there are any; None where it had better not."""
    shape = shape_of(kernel, program, facts, aligned=True)
    col, partials = shape.col_axis, kernel.partials
    if partials is None or col is None or prefers_rows(shape) or any(isinstance(n, Window) for n in kernel.nodes):
        return None
    if transposed_stores(shape, col, shape.row_axis):
        return None
    plan = _row(shape, partials)
    if not _fits(shape, partials, plan) or _room(shape, partials, plan) > _ROOM:
        return None
    over, at_once = _over(kernel, partials), facts.multiprocessors * max(_THREADS // plan.threads, 1)
    least, most = max(_LEAST_OF_PIECE, _LEAST_ROWS * plan.groups), _MOST_ROWS * plan.groups
    pieces = ceil(over, min(max(ceil(shape.rows, at_once), least), most))
    enough = over >= _LEAST_OF_PIECE and shape.rows // over * pieces >= facts.multiprocessors // 2
    return pieces if enough else None


def in_row_pieces(shape: Shape, partials: Partials) -> Rows:
    """The schedule of a kernel with reduction loops that reduces over rows, in as many pieces as it has."""
    plan, pieces = _row(shape, partials), _pieces(shape, partials)
    blocks = shape.rows // pieces.over * pieces.count
    return replace(plan, blocks=blocks, shared_bytes=_room(shape, partials, plan))


def _pieces(shape: Shape, partials: Partials) -> Pieces:
    return Pieces(partials.pieces.size, _over(shape.whole, partials))


def _over(kernel: Kernel, partials: Partials) -> int:
    """Rows that are reduced into one result."""
    return prod(axis.size for axis in kernel.rows[-partials.over :])


def _row(shape: Shape, partials: Partials) -> Rows:
    """How threads share a row, and how many rows a block has at once."""
    assert shape.col_axis is not None
    width = shape.width(shape.col_axis)
    plan = _of_vectors(shape, partials, width)
    while width > 1 and not _fits(shape, partials, plan):
        width //= 2
        plan = _of_vectors(shape, partials, width)
    return plan


def _fits(shape: Shape, partials: Partials, plan: Rows) -> bool:
    """Whether threads have the registers for what they hold."""
    return plan.unroll * _words(shape, partials, plan) <= _WAYS[-1][0]


def _of_vectors(shape: Shape, partials: Partials, width: int) -> Rows:
    """The same for rows that are read in such vectors."""
    vectors = ceil(shape.cols, width)
    pieces, keep = _pieces(shape, partials), Keep.PACKED if packs(shape, width) else Keep.REGISTERS
    plan, lanes = Rows(width, 1, 1, 1, 1, keep=keep), 1
    for words, early, most in _WAYS:
        plan = replace(plan, split=replace(pieces, early=early))
        lanes = ceil(vectors, max(words // _words(shape, partials, plan), 1))
        if lanes <= most:
            break
    lanes = 1 << (lanes - 1).bit_length() if lanes <= WARP else min(ceil(lanes, WARP) * WARP, 1024)
    plan = replace(plan, lanes=lanes, groups=_BLOCK // lanes if lanes <= WARP else 1, unroll=ceil(vectors, lanes))
    while plan.groups > 1 and _room(shape, partials, plan) > _ROOM:
        plan = replace(plan, groups=plan.groups // 2)
    return plan


def _words(shape: Shape, partials: Partials, plan: Rows) -> int:
    """Registers of a vector of a row, of that of the next one if it is under way, and of what was found of its columns."""
    found = plan.width * sum(map(state_bytes, partials.reductions)) // _WORD
    following = ceil(plan.width * shape.kept_bytes, _WORD) if plan.pieces and plan.pieces.early else 0
    return words_held(shape, plan.width, packed=plan.keep is Keep.PACKED) + following + found


def _room(shape: Shape, partials: Partials, plan: Rows) -> int:
    """Bytes of shared memory in which threads leave what they find."""
    return sum(room_of_states(each, plan.groups * shape.cols) for each in partials.reductions)
