"""How much of what all rows meet, such as weights, waits in shared memory for rows that take most of a multiprocessor's registers.

Where a thread has few registers beside its row, it cannot have the weights of several steps under way, and few other rows use the time.
Bulk copies bring those of the first steps while the row is loaded and reduced, which holds up nothing. They leave most of a
multiprocessor's near memory to the first-level cache: loads that are under way have their places there.
"""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.device import WARP
from fusepass.codegen.ir.dataflow import always_loaded
from fusepass.codegen.ir.expr import Load, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.vectors import begins_with, is_vector, split_index, start_of
from fusepass.codegen.schedule.lanes import is_long, words_held
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_rows import Rows, Staged
from fusepass.codegen.schedule.shape import ACCESS, Shape

_ROOM = 64 << 10  # bytes of a block; there are two at most
_SPARE, _PACKED_SPARE = 64, 40  # registers of a thread beside its row: with more, weights come as fast without
_UNIT = 8  # registers that a thread is given at once


def staged(shape: Shape, plan: Rows) -> Rows:
    """`plan`, with as many steps of its weights in shared memory as have room there, where rows wait for these."""
    if not shape.facts.clusters or shape.kernel.when is not None or plan.cluster:
        return plan
    if not plan.keep.in_registers or not plan.resident or not is_long(shape, plan):
        return plan
    if plan.lanes <= WARP or plan.groups > 1:
        return plan  # no barrier of the block between the beginning of the copies and the wait for them
    registers = shape.facts.registers // (plan.resident * plan.threads) // _UNIT * _UNIT
    packed = plan.keep is Keep.PACKED
    spare = registers - words_held(shape, plan.unroll * plan.width, packed=packed)
    loads = _loads(shape, plan) if spare <= (_PACKED_SPARE if packed else _SPARE) else []
    if len(loads) < 2:
        return plan
    step = sum(load.dtype.nbytes for load in loads) * plan.width * plan.lanes
    whole = (shape.cols - plan.unit + 1 if plan.ends_apart else shape.cols) // (plan.width * plan.lanes)
    steps = min(_ROOM // step, whole)
    if steps < 1:
        return plan
    buffers = frozenset(load.buffer for load in loads)
    return replace(plan, staged=Staged(steps, buffers), shared_bytes=steps * step)


def _loads(shape: Shape, plan: Rows) -> list[Load]:
    """What every row meets in its last phase alone, in whole vectors of 16 bytes."""
    kernel, axis, lane = shape.kernel, shape.col_axis, Axis("lane", plan.width)
    assert axis is not None
    mine = {access.buffer for access in shape.main}
    aligned = {access.buffer for access in shape.accesses if access.aligned}
    loads = list(kernel.loads())
    once = {load.buffer for load in loads if sum(other.buffer == load.buffer for other in loads) == 1}
    always = {id(load) for store in kernel.stores for load in always_loaded(store.value)}
    swept = {
        id(node)
        for node in walk(
            *(value for reduction_loop in kernel.reduction_loops for each in reduction_loop for value in each.values)
        )
    }

    def whole(load: Load) -> bool:
        start = start_of(load.index, axis)
        if start is None or load.dtype.nbytes * plan.width != ACCESS:
            return False
        if plan.start is not None:
            return begins_with(start, plan.start.index, plan.width)
        return is_vector(split_index(load.index, axis, lane), axis, lane)

    return [
        load
        for load in loads
        if id(load) in always - swept
        and load.buffer in (aligned & once) - mine - kernel.writes
        and axis in load.index.axes
        and whole(load)
    ]
