"""The tile that a schedule of output tiles has for what a window loads."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.output_tiles import Below, TileWindow
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.staged_windows import TileShape, tile_of_images, tile_shape
from fusepass.codegen.schedule.plan_output_tile import WindowTile
from fusepass.codegen.schedule.shape import ceil


def tile_under(
    program: Program, window: TileWindow, below: Below, others: Sequence[Axis], plan: WindowTile, lane: Axis
) -> TileShape | None:
    """The tile of a load under the output tiles of `plan`, threads having a result for each `lane`; None where it serves no turn for rows.

    Whole images whose rows are copied as they lie come together, without what is not there, if a thread asks whether a row is there before it
    reads it, or rows are reduced in a turn of their own. `others`: the axes of results that count images.
    """
    (y, x), cols = window.image, plan.lanes * plan.width
    strips = ceil(cols, plan.along) if plan.along else 1
    output_tile = plan.tile_height, strips * plan.along if plan.along else cols
    if cols < x.size and output_tile[1] > cols:
        return None
    along, aligned = plan.along or plan.width, plan.memory.aligned
    alone = tile_shape(program, window, below, output_tile, lane, aligned=aligned, along=along)
    asks = plan.along or not window.separable
    if asks and plan.tile_height == y.size and cols >= x.size and (alone.run or (plan.along and strips == 1)):
        whole = tile_of_images(
            program, window, below, others, plan.planes, output_tile, lane, aligned=aligned, along=along
        )
        if whole is not None:
            return whole
    return None if plan.along and alone.run and plan.planes > 1 else alone
