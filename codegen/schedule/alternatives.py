"""Other schedules that a memory-bound kernel may have, beside the one that the rules choose.

They differ from that one in what the rules are least sure of: how many threads share a row and how many rows a block has,
where a row stays between phases, how many vectors a thread loads at once, how large tiles are. All of them are right for
the kernel; which is the fastest, is estimated (`fusepass.codegen.schedule.cost`) and may be measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fusepass.codegen.ir.tile import power_above
from fusepass.codegen.schedule.columns import COLUMN_THREADS, exchanging, overlapping, shared_columns
from fusepass.codegen.schedule.deep import has_deep_windows
from fusepass.codegen.schedule.flat import has_long_functions, pointwise, transposing
from fusepass.codegen.schedule.lanes import holds_row, resident_blocks
from fusepass.codegen.schedule.plan import Keep, Schedule
from fusepass.codegen.schedule.plan_flat import Pointwise, Transposed
from fusepass.codegen.schedule.plan_output_tile import LineTile, OutputTile, PlaneTile
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from fusepass.codegen.schedule.rows import (
    FEW_ELEMENTS,
    STATIC_SHARED,
    exchanging_rows,
    long_rows,
    rows_per_block,
    states_of_thread,
    transposed_stores,
    unroll_of,
)
from fusepass.codegen.schedule.shape import Shape, ceil, most_elements

_BLOCK = 64  # least threads of a block
_UNROLLS = 1, 2, 4  # vectors of a thread of a pointwise kernel
_LANES = 8  # least rows side by side, where threads share columns
_TILES = (1, 64), (2, 32), (2, 64), (4, 32)  # cache lines along the rows, and columns
_COLUMNS_AT_ONCE = 16, 32  # elements that a thread loads before it uses the first


def alternatives(shape: Shape, plan: Schedule, together: int = 0) -> Iterator[Schedule]:
    """Schedules of the kernel of `shape` that do as `plan`, which the rules chose; it may be among them.

    `together`: see `rows_together`; where tiles are exchanged.
    """
    empty = not shape.rows or (shape.kernel.reduction_loops and not shape.cols)
    shared = shape.kernel.team is not None or (isinstance(plan, Rows) and plan.split is not None)
    if shared or shape.kernel.scans or empty:
        return
    match plan:
        case Pointwise():
            yield from _pointwise(shape, plan)
        case Transposed():
            yield from (transposing(shape, plan.columns, together, tile) for tile in _TILES)
        case Rows():
            yield from _inner(shape, plan)
        case Columns():
            yield from _outer(shape)
        case OutputTile():
            if (
                isinstance(plan, PlaneTile | LineTile) or not has_deep_windows(shape.kernel)
            ) and shape.kernel.partials is None:
                yield pointwise(shape)


def _pointwise(shape: Shape, plan: Pointwise) -> Iterator[Pointwise]:
    vectors = ceil(shape.rows, plan.width)
    plain = replace(plan, apart=0, unroll=1) if plan.apart else plan
    alone = has_long_functions(shape.kernel.nodes) or any(access.window for access in shape.accesses)
    most = 1 if alone else max(_UNROLLS)
    for unroll in _UNROLLS:
        if unroll <= most and shape.fills(vectors // unroll):
            yield replace(plain, unroll=unroll, blocks=ceil(vectors, plain.threads * unroll))


def _inner(shape: Shape, plan: Rows) -> Iterator[Rows]:
    assert shape.col_axis is not None
    vectors, most = plan.vectors(shape.cols), most_elements(shape)
    transposing = transposed_stores(shape, shape.col_axis, shape.row_axis)
    near = power_above(plan.lanes)
    for lanes in (near // 4, near // 2, near, 2 * near, 4 * near):
        if not max(plan.ends, 1) <= lanes <= min(1024, power_above(vectors)):
            continue
        each, groups = ceil(vectors, lanes), rows_per_block(shape, lanes, transposing)
        blocks = ceil(shape.rows, groups)
        base, packed = Rows(plan.width, each, lanes, groups, blocks, start=plan.start), plan.keep is Keep.PACKED
        fits = each * plan.width <= most
        if packed:
            fits = holds_row(shape, vectors, plan.width, lanes, packed=True)
        if fits:
            # Warps that share a row have a block to themselves.
            twice = lanes <= 32 and 2 * groups * lanes <= 1024
            for rows in (groups, 2 * groups) if twice else (groups,):
                keep = Keep.PACKED if packed else Keep.REGISTERS
                kept = replace(base, groups=rows, blocks=ceil(shape.rows, rows), keep=keep)
                kept = exchanging_rows(kept, transposing, shape)
                yield replace(kept, resident=resident_blocks(shape, kept))
        elif shape.single and lanes * groups >= _BLOCK:
            for elements in _COLUMNS_AT_ONCE:
                yield replace(base, unroll=unroll_of(elements // plan.width, vectors, lanes))
    if not shape.single:
        yield from _long(shape, plan, vectors)


def _long(shape: Shape, plan: Rows, vectors: int) -> Iterator[Rows]:
    """Rows in shared memory, by blocks for one row each or blocks that stay; rows that are read again."""
    base = Rows(plan.width, 1, 1024, 1, shape.rows, start=plan.start)
    kept = long_rows(shape, base, vectors)
    if not kept.keep.in_shared:
        return
    yield kept
    yield replace(kept, keep=Keep.SHARED, blocks=shape.rows)
    for lanes in (256, 512, 1024):
        places = ceil(kept.vectors(shape.cols), lanes) * lanes * plan.width * shape.kept_bytes
        if lanes < vectors and places == kept.shared_bytes and kept.keep is Keep.SHARED:
            yield replace(kept, lanes=lanes, unroll=unroll_of(FEW_ELEMENTS // plan.width, vectors, lanes))
    yield replace(kept, keep=Keep.NOTHING, shared_bytes=0, blocks=shape.rows)


def _outer(shape: Shape) -> Iterator[Columns]:
    assert shape.row_axis is not None
    cols, most = max(shape.cols, 1), most_elements(shape)
    transposing = transposed_stores(shape, shape.row_axis, shape.col_axis)
    widest = shape.width(shape.row_axis, 4, frozenset(each.index for each in transposing))
    for width in (1, 2, 4):
        if width > widest:
            break
        blocks = ceil(shape.rows, COLUMN_THREADS * width)
        alone = Columns(width, cols, COLUMN_THREADS, 1, blocks, keep=Keep.REGISTERS)
        if cols * width <= most:
            yield overlapping(exchanging(alone, transposing, shape), shape, math.inf)
            yield exchanging(alone, transposing, shape)
        elif shape.single:
            yield replace(alone, unroll=unroll_of(FEW_ELEMENTS // width, cols, 1), keep=Keep.NOTHING)
        shared = shared_columns(shape, width, most)
        for other in (shared, *_other_groups(shape, shared, most)):
            narrow = exchanging(other, transposing, shape)
            if narrow.lanes >= _LANES:
                yield overlapping(narrow, shape, math.inf)
                yield narrow


def _other_groups(shape: Shape, plan: Columns, most: int) -> Iterator[Columns]:
    """`plan` with half as many, or twice as many threads for each column of data."""
    for groups in (plan.groups // 2, plan.groups * 2):
        each = ceil(shape.cols, groups) if groups else 0
        states = groups * plan.lanes * plan.width * states_of_thread(shape.kernel)
        if not _BLOCK <= groups * plan.lanes <= 1024 or each == 0 or states > STATIC_SHARED:
            continue
        if plan.keep.in_registers and each * plan.width <= most:
            yield replace(plan, groups=groups, unroll=each)
        elif plan.keep is Keep.NOTHING:
            yield replace(plan, groups=groups, unroll=unroll_of(FEW_ELEMENTS // plan.width, shape.cols, groups))
