"""Stores of a CUDA kernel's results: whole vectors, single elements, or into a tile that leaves later."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.index import axis_index
from fusepass.codegen.ir.program import Store
from fusepass.codegen.ir.transpose import neighbours
from fusepass.codegen.render.cuda.transpose.tiles import SharedTranspose
from fusepass.codegen.render.cuda.walk.frame import Around, Frame
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, block
from fusepass.codegen.schedule.plan_flat import Pointwise


def write_store(
    frame: Frame, exchanged: Sequence[SharedTranspose], store: Store, lanes: Scope, step: Scope, around: Around
) -> None:
    """Add `store` of the vector at hand to the scope of its `lanes`, or to what comes `around` them; `step` is the vector's scope."""
    buffer = frame.program.buffer(store.buffer)
    pointer, element = frame.pointers[store.buffer], C_TYPES[buffer.dtype]
    value = lanes.converted(store.value, buffer.dtype)
    if frame.results is not None:
        frame.results.write(store, value, lanes, around)
        return
    exchange = next((each for each in exchanged if each.transposing.store is store), None)
    if exchange is not None:
        exchange.write(frame, lanes, value, around)
        return
    own = _own(frame, store, step)
    if not frame.is_wide(store.buffer, store.index):
        index = lanes.index(store.index)
        if frame.overhangs and store not in frame.kernel.row_stores:
            lanes.lines += block(
                f"if (fp::is_inside({frame.v}, {frame.inside(lanes)}))", [f"{pointer}[{index}] = {value};"]
            )
            return
        line = f"fp::store_if({own}, {pointer} + ({index}), fp::Vec<{element}, 1>{{{{{value}}}}});" if own else ""
        lanes.lines.append(line or f"{pointer}[{index}] = {value};")
        return
    result = frame.names.numbered(f"{pointer}_out")
    around.before_lanes.append(f"fp::Vec<{element}, {frame.schedule.width}> {result};")
    lanes.lines.append(f"{result}[{frame.v}] = {value};")
    reuse = "<fp::Reuse::none>" if store.buffer in frame.schedule.memory.once else ""
    start = step.operand(frame.first_lane(store.index))
    call = f"fp::store_vector{reuse}({pointer} + {start}, {result});"
    if isinstance(frame.schedule, Pointwise) and frame.schedule.ragged:
        call = f"fp::store_first({pointer} + {start}, {result}, {frame.left(step)});"
    if frame.overhangs:
        call = f"fp::store_inside{reuse}({pointer} + {start}, {result}, {frame.within()}, {frame.inside(step)});"
    if own:
        call = f"fp::store_if({own}, {pointer} + {start}, {result});"
    around.after_lanes.append(call)


def _own(frame: Frame, store: Store, step: Scope) -> str:
    """The condition that the sector in which a store begins is the block's, where blocks overlap; else empty.

    A sector is the block's that has its first row as one of its own. It computes the others, too, as far as they follow in memory. Of output tiles
    that overlap, the same holds of results that may differ.
    """
    row = frame.arranged.row
    if frame.output_tile is not None:
        return frame.own_in_tile() if frame.apart else ""
    if not frame.overlap or row is None or store in frame.kernel.row_stores:
        return ""
    first = frame.first_lane(store.index)
    run = step.index(axis_index(row) % neighbours(first, row))
    past = f"fp::least(unsigned({step.index(first)}) % {frame.overlap}, unsigned({run}))"
    return f"{frame.own_row} - {past} < {frame.own_rows}"
