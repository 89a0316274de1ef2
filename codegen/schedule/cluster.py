"""Schedules of kernels whose rows are shared by the blocks of a cluster, and when they should be.

A row that is too long for the registers of one multiprocessor stays in those of a few: each block keeps its part as it would keep a
short row, and the states of all meet in shared memory that the blocks of a cluster have in common.
"""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import CLUSTERS, Kernel, Program
from fusepass.codegen.schedule.lanes import lanes_of_row, resident_blocks
from fusepass.codegen.schedule.plan import Keep, Schedule
from fusepass.codegen.schedule.rows import crossing_stores, inner, prefers_rows
from fusepass.codegen.schedule.shape import Shape, ceil
from fusepass.errors import ScheduleError

_CLUSTERS_FROM = 90  # compute capability times ten


def cluster_size(program: Program, kernel: Kernel, facts: DeviceFacts) -> int:
    """Blocks that should share each row of `kernel`; 1 where one has room for it, or even a large cluster has not."""
    shape = Shape(kernel, program, facts, aligned=True)
    crossing = crossing_stores(shape, shape.col_axis, shape.row_axis)
    if facts.capability < _CLUSTERS_FROM or shape.single or shape.col_axis is None or not shape.rows:
        return 1
    if prefers_rows(shape) or crossing or inner(shape).keep is Keep.REGISTERS:
        return 1
    plans = [plan for plan in (_plan(shape, members) for members in CLUSTERS if members > 1) if plan is not None]
    filling = [plan for plan in plans if plan.blocks >= facts.multiprocessors]
    # While one block on a multiprocessor waits, another moves data.
    several = [plan for plan in filling if plan.resident != 1]
    return next((plan.cluster for plan in (*several, *filling)), 1)


def cluster(shape: Shape, members: int) -> Schedule:
    """The schedule of a kernel whose rows are shared by so many blocks."""
    plan = _plan(shape, members)
    if plan is None:
        raise ScheduleError(f"a row of {shape.kernel.name} does not fit the registers of {members} blocks")
    return plan


def _plan(shape: Shape, members: int) -> Schedule | None:
    assert shape.col_axis is not None
    base = shape.vectors(shape.col_axis)
    part = ceil(base.vectors(shape.cols), members)
    lanes = lanes_of_row(shape, part, base.width)
    if lanes is None:
        return None
    plan = replace(base, lanes=lanes, unroll=ceil(part, lanes), blocks=shape.rows * members, keep=Keep.REGISTERS)
    plan = replace(plan, cluster=members, part=part, kept=part)
    return replace(plan, resident=resident_blocks(shape, plan))
