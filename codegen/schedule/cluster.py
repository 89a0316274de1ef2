"""Schedules of kernels whose rows are shared by the blocks of a cluster, and when they should be.

A row that is a little too long for one multiprocessor stays in the registers of two: each block keeps its part as it would keep a
shorter row, and the states of both meet in shared memory that the blocks of a cluster have in common.
"""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule.lanes import lanes_of_row, packs, resident_blocks, words_held
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule.plan_team import Cluster
from fusepass.codegen.schedule.rows import inner, prefers_rows, transposed_stores
from fusepass.codegen.schedule.shape import Shape, ceil, shape_of
from fusepass.codegen.schedule.team import may_buffer
from fusepass.errors import ScheduleError

_BLOCKS = 2  # of a cluster; with more of them multiprocessors wait until all of a cluster's are free
_LANES = 1024  # of a block, while each has no more than so many words of its part: weights come sooner
_WORDS = 32
_PACKED_LANES = 512  # where numbers stay packed
_MOST_WORDS = 64  # of a thread, beside weights or with what it takes to unpack them


def cluster_size(program: Program, kernel: Kernel, facts: DeviceFacts) -> int:
    """Blocks that should share each row of `kernel`; 1 where one has room for it, or two have not, or a circular buffer of a team's is better."""
    shape = shape_of(kernel, program, facts, aligned=True)
    transposing = transposed_stores(shape, shape.col_axis, shape.row_axis)
    if not facts.clusters or shape.single or shape.col_axis is None or not shape.rows:
        return 1
    if (
        prefers_rows(shape)
        or transposing
        or inner(shape).keep is not Keep.NOTHING
        or may_buffer(shape, shape.vectors(shape.col_axis))
    ):
        return 1
    fills = shape.rows * _BLOCKS >= facts.multiprocessors
    return _BLOCKS if fills and _plan(shape, _BLOCKS) is not None else 1


def cluster(shape: Shape, members: int) -> Rows:
    """The schedule of a kernel whose rows are shared by so many blocks."""
    plan = _plan(shape, members)
    if plan is None:
        raise ScheduleError(f"a row of {shape.kernel.name} does not fit the registers of {members} blocks")
    return plan


def _plan(shape: Shape, members: int) -> Rows | None:
    assert shape.col_axis is not None
    base = shape.vectors(shape.col_axis)
    part = ceil(base.vectors(shape.cols), members)
    packed = packs(shape, base.width)
    lanes = min(_PACKED_LANES, ceil(part, 32) * 32) if packed else lanes_of_row(shape, part, base.width)
    if lanes is None and not shape.aligned:
        lanes = _LANES  # it fits as vectors: as single elements what registers do not hold goes to memory
    if lanes is None:
        return None
    # Exponentials of numbers that stay packed are computed twice, while only one row is on a multiprocessor.
    costly = packed and any(reduction.op is ReduceOp.SOFTMAX for reduction in shape.kernel.reductions)
    held = words_held(shape, ceil(part, lanes) * base.width, packed=packed)
    if shape.aligned and (costly or (held > _MOST_WORDS and (packed or shape.weighted))):
        return None
    if not packed and ceil(part, _LANES) * base.width * max(shape.kept_words, 1) <= _WORDS:
        lanes = max(lanes, _LANES)
    keep, blocks = Keep.PACKED if packed else Keep.REGISTERS, shape.rows * members
    plan = replace(base, lanes=lanes, unroll=ceil(part, lanes), blocks=blocks, keep=keep, split=Cluster(members, part))
    return replace(plan, resident=resident_blocks(shape, plan))
