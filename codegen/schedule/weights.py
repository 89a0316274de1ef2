"""When weights of rows that begin anywhere are worth laying out for each place where a row may begin in a vector."""

from __future__ import annotations

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.index import axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.vectors import Beginnings
from fusepass.codegen.schedule.rows import crossing_stores, prefers_rows
from fusepass.codegen.schedule.shape import Shape

# Loads of a thread for each vector of a row, and bytes of a row: with fewer of both, rows wait for nothing.
_WORTH = (16, 0), (8, 1 << 13), (0, 1 << 16)
_LEAST_TIMES = 16  # what the kernel moves is more than what is written for it


def beginnings(program: Program, kernel: Kernel, facts: DeviceFacts) -> Beginnings | None:
    """Where the rows of `kernel` begin, if they do anywhere and its weights should lie likewise.

    A launch more is worth it where what is moved does not stay in the L2 cache.
    """
    if kernel.anchor is not None or not kernel.sweeps or not kernel.row_count:
        return None
    shape = Shape(kernel, program, facts, aligned=True)
    if shape.col_axis is None or shape.row_axis is None or prefers_rows(shape):
        return None
    if crossing_stores(shape, shape.col_axis, shape.row_axis):
        return None
    plan = shape.vectors(shape.col_axis)
    column = linear([axis_index(axis) for axis in kernel.cols], contiguous_strides([axis.size for axis in kernel.cols]))
    loads = tuple(load for load in kernel.loads() if not (load.index - column).terms)
    if plan.start is None or plan.run or not loads:
        return None
    row_bytes = kernel.col_count * max(access.nbytes for access in shape.main)
    if not any(len(loads) * plan.width >= least and row_bytes >= long for least, long in _WORTH):
        return None
    moved = sum(program.buffer(access.buffer).nbytes for access in shape.main)
    written = sum(plan.width * kernel.col_count * load.dtype.nbytes for load in loads)
    if moved < max(facts.l2_bytes, _LEAST_TIMES * written):
        return None
    row = linear([axis_index(axis) for axis in kernel.rows], contiguous_strides([axis.size for axis in kernel.rows]))
    return Beginnings(plan.width, plan.start.substitute({shape.row_axis: row}), loads, column)
