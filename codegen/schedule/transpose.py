"""The tiles in shared memory by which operands that are contiguous along different axes meet: their sizes, and how threads stand on them."""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.guards import Guard
from fusepass.codegen.ir.index import Axis, Bound, Index
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.ir.tile import Tile, fitting_width, power_above
from fusepass.codegen.ir.transpose import Transpose
from fusepass.codegen.ir.vectors import alignment, is_vector, split_index
from fusepass.codegen.schedule.plan_flat import Transposed
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from fusepass.codegen.schedule.shape import ACCESS, LINE


def exchanged(found: Iterable[Transpose], program: Program, along: int, across: int, more: Iterable[str] = ()) -> int:
    """Bytes of shared memory that the tiles of `found` and of the buffers `more` take."""
    names = [*(each.buffer for each in found), *more]
    return sum(Tile(along, across, 32, 1, program.buffer(name).dtype.nbytes).shared_bytes for name in names)


def exchange_tile(
    kernel: Kernel,
    program: Program,
    plan: Rows | Columns | Transposed,
    transposing: Transpose,
    across: Axis,
    index: Index,
    guard: Guard,
) -> Tile:
    """How the threads of a block read or write `transposing`, which stands at `index` where `guard` holds, vectors running along
    `across`."""
    buffer = program.buffer(transposing.buffer)
    match plan:
        case Rows():
            tile = kernel.col_count, plan.groups
        case Columns():
            tile = plan.lanes * plan.width, power_above(kernel.col_count)
        case Transposed():
            tile = plan.tile
    usable = plan.memory.aligned or buffer.role is not Role.INPUT

    def fits(width: int) -> bool:
        lane = Axis("lane", width)
        whole = all(_is_of_vectors(bound, across, width) for bound in guard)
        return (
            usable and whole and across.size % width == 0 and is_vector(split_index(index, across, lane), across, lane)
        )

    # Less at once where there would be fewer accesses than threads.
    each = max(power_above(tile[0]) * tile[1] // plan.threads, 1)
    most = min(ACCESS // buffer.dtype.nbytes, each, tile[1])
    # A warp that has more of a row than all banks take at once reads whole vectors.
    whole = isinstance(plan, Transposed) and min(plan.lanes, 32) * plan.width * buffer.dtype.nbytes > LINE
    vector = plan.width if whole else 1
    return Tile(*tile, plan.threads, fitting_width(most, fits), buffer.dtype.nbytes, vector)


def _is_of_vectors(bound: Bound, axis: Axis, width: int) -> bool:
    """Whether `bound` holds for all points of a vector along `axis` or for none."""
    if width == 1 or axis not in bound.index.axes:
        return True
    begins = alignment(bound.index - bound.low, axis, width) % width == 0
    return begins and bound.index.stride(axis) == 1 and (bound.high - bound.low) % width == 0
