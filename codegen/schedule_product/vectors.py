"""Whether results of a matrix product, of which a thread has neighbours, are stored as vectors."""

from __future__ import annotations

from fusepass.codegen.ir.index import Axis, Bound, axis_index
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.ir.vectors import alignment, is_vector, split_index


def are_vectors(kernel: Kernel, width: int) -> bool:
    """Whether all elements of a vector are there or none, and all results are stored in such vectors."""
    columns, lane = kernel.rows[3], Axis("lane", width)
    if columns.size % width or not all(_is_shared(bound, columns, lane) for bound in kernel.within):
        return False
    return all(is_vector(split_index(store.index, columns, lane), columns, lane) for store in kernel.stores)


def _is_shared(bound: Bound, columns: Axis, lane: Axis) -> bool:
    """Whether a bound holds for all of a vector's lanes or for none."""
    index = split_index(bound.index, columns, lane)
    if lane not in index.axes:
        return True
    start = index - axis_index(lane)
    together = lane not in start.axes and alignment(start, columns, lane.size) % lane.size == 0
    return together and bound.low % lane.size == bound.high % lane.size == 0
