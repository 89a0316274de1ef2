"""How long a schedule of `places` takes, by estimate."""

from __future__ import annotations

from math import prod

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule_convolution.chunks import SHARE, STEP, ChunkSchedule, warps_of_a_run
from fusepass.codegen.schedule_convolution.tiles import SECTOR, dimensions

_RESULT = {
    1: 0.28,
    2: 0.23,
    4: 0.2,
}  # cycles of a multiprocessor for a result, by how many are stored at once; the latter two guessed
_FETCHED, _TORN = 0.035, 5.0  # the same for a byte of the input, and a sector of the results that is written in part
_PACKED = 0.1  # of a multiprocessor, for a number of which halves are made; guessed
_WAITING = {4: 1.0, 3: 1.05, 2: 1.15, 1: 1.2}  # times as long, with so many teams


def cost_of_few(kernel: Kernel, plan: ChunkSchedule) -> float:
    """Estimated cycles of a multiprocessor for a sample, with few input channels: products as fast as shared memory feeds them, and what surrounds them."""
    on = plan.on
    positions = prod(on.tile)
    products = sum(plan.slices) // plan.phase_blocks * 2 * (positions // 128) * (2048 + STEP * plan.columns) / 128
    packed = 0.0 if plan.source is None else on.elements * plan.channels * _PACKED
    fetched = (plan.source_bytes or plan.tile_bytes) / 20 + packed  # bytes a cycle from the second-level cache
    results = positions * len(on.phases) // plan.phase_blocks * ROWS * plan.rows * 0.2
    ahead = plan.buffers == 2 or plan.source is not None
    waiting = {(2, False): 1.15, (2, True): 1.0, (1, False): 1.6, (1, True): 1.3}[plan.resident, ahead]
    # Whole rows of the result by one block, or long runs by one warp, fill the lines of the second-level cache.
    together = warps_of_a_run(kernel, plan)
    whole = on.tiles[-1] == 1 or 1 < together <= on.tile[-1] / SHARE
    pieces = 1 if whole else 1 + 0.5 * 32 / on.tile[-1]
    tile = plan.iterations * (products + results * pieces) + fetched
    return plan.channel_blocks * prod(on.tiles) * tile * waiting


def cost_of_many(kernel: Kernel, program: Program, plan: ChunkSchedule) -> float:
    """The same with many input channels, after measurements on an H200: teams of warps hide little of each other's work."""
    on = plan.on
    positions, shares = prod(on.tile), plan.phase_blocks
    products = sum(plan.slices) // shares * positions / 64 * (2048 + STEP * plan.columns) / 128
    rows = ROWS * plan.rows * prod(on.tile[:-1]) * plan.part // on.pair
    together = plan.vector if plan.vector > 1 else 2 - dimensions(kernel)[-1].size % 2
    results = positions * plan.part * ROWS * plan.rows * _RESULT[together]
    fetched = plan.tile_bytes * _FETCHED
    whole = on.tiles[-1] == 1 or on.pace or not begins_anywhere(kernel, program)
    torn = 0.0 if whole else 2 * rows * _TORN
    tile = plan.iterations * (products + results) + fetched
    return plan.channel_blocks * prod(on.tiles) * (tile * _WAITING[plan.teams] + plan.iterations * torn)


def begins_anywhere(kernel: Kernel, program: Program) -> bool:
    """Whether all that is stored are rows of float32 numbers along the last axis, which begin at any place in a sector."""
    *others, last = dimensions(kernel)
    for store in (*kernel.row_stores, *kernel.stores):
        nbytes = program.buffer(store.buffer).dtype.nbytes
        if nbytes != DType.F32.nbytes or store.index.stride(last) != 1:
            return False
        strides = [store.index.stride(axis) for axis in others if axis.size > 1]
        if all(stride is not None and stride * nbytes % SECTOR == 0 for stride in strides):
            return False
    return True
