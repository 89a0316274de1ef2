"""Schedules of kernels with a running reduction: a block goes along its rows, a piece after another, and writes as it reads."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.device import WARP, DeviceFacts
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.tile import power_above
from fusepass.codegen.ir.transpose import neighbours
from fusepass.codegen.ir.vectors import backwards
from fusepass.codegen.schedule.plan import Keep, Schedule
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from fusepass.codegen.schedule.rows import prefers_rows
from fusepass.codegen.schedule.shape import Shape, ceil, shape_of

_ELEMENTS = 16  # that a thread has at a time: enough loads in flight
_LONG_ROW_THREADS = 512  # so that several blocks stand on a multiprocessor: one loads while another waits
_USED = 7 / 8  # of the threads' places, over all pieces of a row
_A_LITTLE_MORE = 9 / 8  # vectors of a thread
_COVERED = 4, 1  # vectors and elements, at least, of rows that begin anywhere
_SHORT_ROW_VECTORS = 2  # of a thread, where part of a warp has the row
_SHORT_ROWS_THREADS = 128  # of a block of rows that part of a warp has
_MOST_THREADS = 1024
_COLUMN_THREADS = 128  # of a block whose threads have rows of their own
_NARROW = 8  # bytes that a thread has of a column where several share rows: a warp's are two cache lines


def scan(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool) -> tuple[Shape, Schedule]:
    """The kernel as it is walked, and how: along its rows from their last elements where memory is read so."""
    shape = shape_of(kernel, program, facts, aligned=aligned)
    if prefers_rows(shape):
        return shape, _beside(shape)
    if shape.col_axis is not None and all(access.index.stride(shape.col_axis) == -1 for access in shape.main):
        turned = Shape(backwards(kernel, Builder()), program, facts, aligned)
        return turned, replace(_along(turned), backward=True)
    return shape, _along(shape)


def rows_stay(kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
    """Whether rows of `kernel` stay in registers between other reduction loops and the running one."""
    shape = shape_of(kernel, program, facts, aligned=True)
    return not prefers_rows(shape) and shape.cols <= _MOST_THREADS * _ELEMENTS


def _along(shape: Shape) -> Rows:
    """Threads side by side along a row; where it has several reduction loops, enough for all of it at once."""
    assert shape.col_axis is not None
    base = shape.vectors(shape.col_axis, _COVERED).covering
    width, vectors = base.width, base.vectors(shape.cols)
    stays = len(shape.kernel.reduction_loops) > 1
    threads, most = (_MOST_THREADS, vectors) if stays else (_LONG_ROW_THREADS, max(_ELEMENTS // width, 1))
    lanes = min(power_above(ceil(shape.cols, _ELEMENTS)), threads, power_above(vectors))
    lanes = max(lanes, min(power_above(ceil(vectors, _SHORT_ROW_VECTORS)), WARP))
    each = min(ceil(vectors, lanes), most)
    if lanes == WARP and each < ceil(vectors, lanes) <= 2 * each:
        each = ceil(vectors, lanes)  # all of it at once
    if not stays:
        each = _without_a_rest(vectors, lanes, each)
        if lanes == _LONG_ROW_THREADS and vectors < _USED * ceil(vectors, lanes * each) * lanes * each:
            lanes = lanes // 2
            each = _without_a_rest(vectors, lanes, min(ceil(vectors, lanes), 2 * _ELEMENTS // width))
    while lanes < min(_MOST_THREADS, vectors) and not shape.fills(shape.rows * lanes):
        lanes, each = 2 * lanes, min(ceil(vectors, 2 * lanes), most)
    groups = max(_SHORT_ROWS_THREADS // lanes, 1) if lanes <= WARP else 1
    keep = Keep.REGISTERS if stays else Keep.NOTHING
    return replace(base, unroll=each, lanes=lanes, groups=groups, blocks=ceil(shape.rows, groups), keep=keep)


def _without_a_rest(vectors: int, lanes: int, each: int) -> int:
    """`each`, or a little more if a row has a piece less then, as the last one would have next to nothing."""
    pieces = ceil(vectors, lanes * each)
    more = ceil(vectors, lanes * (pieces - 1)) if pieces > 1 else each
    return more if more <= _A_LITTLE_MORE * each else each


def _beside(shape: Shape) -> Columns:
    """Threads side by side on neighbouring rows; several for each row where rows are too few."""
    assert shape.row_axis is not None
    width = shape.width(shape.row_axis, 4)
    if not shape.fills(shape.rows // width):
        width = min(width, max(_NARROW // max(access.nbytes for access in shape.main), 1))
    while width > 1 and not shape.fills(shape.rows // width * (_MOST_THREADS // WARP // 2)):
        width //= 2  # with room for more groups, so that blocks are not too few either
    each = min(_ELEMENTS // width, max(shape.cols, 1))
    lanes, groups = _COLUMN_THREADS, 1
    while width == 1 and lanes * groups < _LONG_ROW_THREADS and 2 * groups * each <= shape.cols:
        groups *= 2  # rows that begin anywhere share sectors: a block that goes down in larger steps finds them again
    while (
        not shape.fills(shape.rows // width * groups) and groups * each < shape.cols and lanes * groups < _MOST_THREADS
    ):
        lanes, groups = WARP, 2 * groups
    near = min(neighbours(access.index, shape.row_axis) for access in shape.main) // width
    while lanes > near and groups * each < shape.cols and ceil(shape.rows, lanes * width) < shape.facts.multiprocessors:
        lanes, groups = lanes // 2, 2 * groups  # rows that lie apart may be another block's
    return Columns(width, each, lanes, groups, ceil(shape.rows, lanes * width))
