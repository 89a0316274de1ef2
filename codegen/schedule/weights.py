"""When weights of rows that begin anywhere are worth laying out for each place where a row may begin in a vector."""

from __future__ import annotations

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.index import flat_index
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.vectors import Beginnings
from fusepass.codegen.schedule.rows import prefers_rows, transposed_stores
from fusepass.codegen.schedule.shape import shape_of

# Elements of a vector, weights, and bytes of a row, at least, and the seconds that copies then save for each byte that is moved.
_SAVES = (8, 2, 0, 6.5e-14), (8, 1, 8 << 10, 2e-14), (4, 2, 60 << 10, 2.5e-14), (4, 1, 128 << 10, 3e-14)
_LAUNCH = 5e-6  # seconds of a launch: 2 on the device, 8 to 18 where the host's caches have other things
_LEAST_TIMES = 16  # what the kernel moves is more than what is written for it


def beginnings(program: Program, kernel: Kernel, facts: DeviceFacts) -> Beginnings | None:
    """Where the rows of `kernel` begin, if they do anywhere and its weights should lie likewise.

    That is worth a launch more where enough is moved, and does not stay in the L2 cache.
    """
    if kernel.anchor is not None or not kernel.reduction_loops or kernel.scans or not kernel.row_count:
        return None
    if kernel.partials is not None:  # a thread has the same columns of each row, whole vectors of all rows
        return None
    shape = shape_of(kernel, program, facts, aligned=True)
    if shape.col_axis is None or shape.row_axis is None or prefers_rows(shape):
        return None
    if transposed_stores(shape, shape.col_axis, shape.row_axis):
        return None
    plan = shape.vectors(shape.col_axis)
    column = flat_index(kernel.cols)
    loads = tuple(load for load in kernel.loads() if not (load.index - column).terms)
    if plan.start is None or plan.start.run or not loads:
        return None
    row_bytes = kernel.col_count * max(access.nbytes for access in shape.main)
    found = plan.width, len(loads), row_bytes
    rates = (rate for *least, rate in _SAVES if all(has >= wanted for has, wanted in zip(found, least, strict=True)))
    saved = max(rates, default=0.0)
    moved = sum(program.buffer(access.buffer).nbytes for access in shape.main)
    written = sum(plan.width * kernel.col_count * load.dtype.nbytes for load in loads)
    if saved * moved < _LAUNCH or moved < max(facts.l2_bytes, _LEAST_TIMES * written):
        return None
    row = flat_index(kernel.rows)
    return Beginnings(plan.width, plan.start.index.substitute({shape.row_axis: row}), loads, column)
