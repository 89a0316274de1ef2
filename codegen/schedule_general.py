"""Schedules of kernels whose sizes come at run time: chosen such that few of them serve all sizes.

What the compiler must know (threads, vectors, unrolling, where values stay) is rounded, so that neighbouring sizes get
the same; how many blocks there are, and where the last vector of a thread is, comes at run time. A vector's width stays:
it says what divides the sizes. Where that still gives many schedules, *coarse* ones have fewer widths, and rows that stay
in registers get room for four times their length.
"""

from __future__ import annotations

import enum
from dataclasses import replace

from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.schedule.plan import Keep, Schedule
from fusepass.codegen.schedule.plan_flat import Pointwise
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from fusepass.codegen.schedule.rows import FEW_ELEMENTS
from fusepass.codegen.schedule.shape import ceil

_THREADS = 256  # of a pointwise block
_ROWS_THREADS = 128  # of a block of short rows
_LEAST_ROOM = 32  # elements of a row
_FEW = 8  # elements per thread while a row has less than a warp
_ELEMENTS = 16  # per thread of a row in registers
_MOST_ELEMENTS = 32  # where they are rounded
_SCAN_LANES = 8, 32, 256


class Generality(enum.IntEnum):
    """How far a source is laid out to serve other sizes."""

    NONE = 0
    FINE = 1
    COARSE = 2


def generalised(plan: Schedule, kernel: Kernel, *, coarse: bool) -> Schedule:
    """`plan`, which is for `kernel` alone, as one for other sizes, too."""
    plan = replace(plan, general=True)
    match plan:
        case Pointwise():
            plan = replace(plan, width=_width(plan)) if coarse else plan
            plan = replace(plan, apart=0, unroll=1) if plan.apart else plan
            vectors = ceil(kernel.row_count, plan.width)
            blocks = ceil(vectors, _THREADS * plan.unroll)
            return replace(plan, lanes=_THREADS, groups=1, blocks=blocks)
        case Rows() if kernel.scans:
            lanes = next(lanes for lanes in (*_SCAN_LANES, plan.lanes) if plan.lanes <= lanes)
            pieces = replace(plan, keep=Keep.NOTHING)  # that a row has may be several
            return _with_rows(replace(pieces, lanes=lanes, unroll=_unroll(pieces)), kernel)
        case Rows():
            plan = replace(plan, keep=Keep.SHARED) if plan.keep is Keep.FETCHED else plan
            if plan.keep.in_registers:  # of rows that begin anywhere vectors overhang both ends
                plan = replace(plan, unroll=max(plan.unroll, ceil(plan.vectors(kernel.col_count), plan.lanes)))
            if plan.keep.in_registers and plan.unroll * plan.width > _MOST_ELEMENTS:
                return _with_rows(plan, kernel)  # there are no registers for more
            if coarse and plan.keep.in_registers and not plan.exchanges:
                return _roomy(plan, kernel)
            return _with_rows(replace(plan, unroll=_unroll(plan)), kernel)
        case Columns():
            blocks = ceil(kernel.row_count, plan.lanes * plan.width)
            full = plan.keep.in_registers and plan.unroll * plan.width > _MOST_ELEMENTS
            return replace(plan, unroll=plan.unroll if full else _unroll(plan), overlap=0, blocks=blocks)
        case _:
            return plan


def _width(plan: Schedule) -> int:
    return 1 if plan.width == 2 else plan.width


def _roomy(plan: Rows, kernel: Kernel) -> Rows:
    """Room in registers for rows of up to 32, 128, 512 and so on, whatever lanes would be best for this length."""
    width, room = _width(plan), _LEAST_ROOM
    plan = plan if width == plan.width else replace(plan, width=width, start=None)
    while room < plan.vectors(kernel.col_count) * width:
        room *= 4
    lanes = 8
    while lanes < 1024 and lanes * (_ELEMENTS if lanes >= 32 else _FEW) < room:
        lanes *= 2
    unroll = max(room // (lanes * width), 1)
    return _with_rows(replace(plan, unroll=unroll, lanes=lanes, groups=1, resident=0), kernel)


def _with_rows(plan: Rows, kernel: Kernel) -> Rows:
    """Blocks of as many rows as have enough threads."""
    if plan.exchanges:
        return plan
    groups = _ROWS_THREADS // plan.lanes if plan.lanes <= 32 else 1
    return replace(plan, groups=groups, blocks=ceil(kernel.row_count, groups))


def _unroll(plan: Rows | Columns) -> int:
    """All of a row that stays in registers, and of the next longer ones; else as many as keep memory busy."""
    if plan.keep.in_registers:
        return 1 << max(plan.unroll - 1, 0).bit_length()
    return max(FEW_ELEMENTS // plan.width, 1)
