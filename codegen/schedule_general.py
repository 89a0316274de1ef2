"""Schedules of kernels whose sizes come at run time: chosen such that few of them serve all sizes.

What the compiler must know (threads, vectors, unrolling, where values stay) is rounded, so that neighbouring sizes get
the same; how many blocks there are, and where the last vector of a thread is, comes at run time. A vector's width stays:
it says what divides the sizes.
"""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.schedule.plan import Keep, Schedule, Walk
from fusepass.codegen.schedule.rows import FEW_ELEMENTS
from fusepass.codegen.schedule.shape import ceil

_THREADS = 256  # of a pointwise block
_ROWS_THREADS = 128  # of a block of short rows


def generalised(plan: Schedule, kernel: Kernel) -> Schedule:
    """`plan`, which is for `kernel` alone, as one for other sizes, too."""
    plan = replace(plan, general=True)
    match plan.walk:
        case Walk.POINTWISE:
            vectors = kernel.row_count // plan.width
            blocks = ceil(vectors, _THREADS * plan.unroll)
            return replace(plan, lanes=_THREADS, groups=1, apart=0, blocks=blocks)
        case Walk.INNER:
            plan = replace(plan, unroll=_unroll(plan))
            if plan.lanes > 32 or plan.exchanges:
                return plan
            groups = _ROWS_THREADS // plan.lanes
            return replace(plan, groups=groups, blocks=ceil(kernel.row_count, groups))
        case Walk.OUTER:
            return replace(plan, unroll=_unroll(plan))
        case Walk.CROSSING:
            return plan


def _unroll(plan: Schedule) -> int:
    """All of a row that stays in registers, and of the next longer ones; else as many as keep memory busy."""
    if plan.keep is Keep.REGISTERS:
        return 1 << max(plan.unroll - 1, 0).bit_length()
    return max(FEW_ELEMENTS // plan.width, 1)
