"""Schedules of pointwise kernels whose windows overlap: blocks take output tiles, and share the rows of the input below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusepass.codegen.ir.expr import Window
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.output_tiles import ONE_ROW, TileWindow, output_tile_windows
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.ir.vectors import access_along
from fusepass.codegen.schedule.flat import pointwise
from fusepass.codegen.schedule.output_tile_results import ways_to_leave
from fusepass.codegen.schedule.output_tile_space import BLOCKS, MOST_READ, THREADS, patches_of, room_of_block, with_room
from fusepass.codegen.schedule.output_tile_stages import in_iterations
from fusepass.codegen.schedule.output_tile_work import OutputTileWork
from fusepass.codegen.schedule.plan_output_tile import WindowTile
from fusepass.codegen.schedule.shape import Shape, ceil

LEAST_REUSE = 4
"""Points of windows for each element: with fewer there is little to gain."""

_LEAST_REUSE_OF_ROW = 6  # the same of windows of one row, where vectors share what they load
_WORD = 4  # bytes: shorter elements are not loaded one by one
_SUMS = 32  # registers of a thread that hold results; of separable windows half as many again, as little else is held
_CONSTANTS = 32  # registers that hold weights: with more, half as many results
_MOST_ROWS = 8  # of results, one below the other, of a thread; as many as the window has, where those share what they are made of


def output_tiles(shape: Shape, *, pieces: int | None = None, least: int = BLOCKS) -> list[tuple[WindowTile, float]]:
    """The best output tiles of the images that windows walk over, of each way for results to leave, the best one first, with the seconds that they
    take; none where they would save nothing.

    `pieces`: how many output tiles an image must have. `least`: how many blocks a multiprocessor must have the shared memory for.
    """
    best: dict[tuple[Axis, int, bool, bool], tuple[float, WindowTile]] = {}
    for image in _images(shape.whole) if shape.facts.copies else ():
        windows = output_tile_windows(shape.whole, shape.program, image)
        single = pointwise(shape).width == 1 and not _loads_together(shape, windows)  # of threads without output tiles
        if not windows or any(window.reuse < _least_reuse(window, single) for window in windows):
            continue
        work = OutputTileWork(shape.whole, shape.program, shape.facts, windows, shape.aligned)
        for plan, seconds in (*_plans(work, least), *in_iterations(work, least)):
            if pieces is not None and patches_of_image(plan) != pieces:
                continue
            way = image[0], plan.width, plan.exchanges, plan.along > 0
            if way not in best or seconds < best[way][0]:
                best[way] = seconds, plan
    return [(plan, seconds) for seconds, plan in sorted(best.values(), key=lambda pair: pair[0])]


def patches_of_image(plan: WindowTile) -> int:
    """How many output tiles an image has, if it is not one of several in an output tile."""
    y, x = plan.image
    return ceil(y.size, plan.tile_height) * ceil(x.size, plan.lanes * plan.width)


def _images(kernel: Kernel) -> Iterator[tuple[Axis, Axis]]:
    """The axes down an image, and along its rows. Rows over which no window goes may be those of an image in any way: what windows
    multiply by must be the same for all of one. What is reduced over positions has these as an image."""
    windows = [node for node in kernel.nodes if isinstance(node, Window)]
    if not windows or not kernel.rows:
        return
    *others, x = kernel.rows
    if kernel.partials is not None:
        _, _, *above = others
        if len(above) < 2:
            yield (above[0] if above else ONE_ROW), x
        return
    if any(axis.size > 1 for window in windows for axis in window.axes[:-1]):
        yield from ((y, x) for y in others[-1:])
    else:
        yield from ((y, x) for y in (*others, ONE_ROW))


def _loads_together(shape: Shape, windows: Sequence[TileWindow]) -> bool:
    """Whether a thread of a single result loads several points of these windows by each access."""
    rows = ((each.load, window.window.axes[-1]) for window in windows for each in window.below)
    return shape.aligned and all(access_along(load, axis) > 1 for load, axis in rows)


def _least_reuse(window: TileWindow, single: bool) -> int:
    if window.taps[0].size == 1:
        return _LEAST_REUSE_OF_ROW
    return 1 if single and window.below[0].load.dtype.nbytes < _WORD else LEAST_REUSE


def _plans(work: OutputTileWork, least: int) -> Iterator[tuple[WindowTile, float]]:
    """All output tiles that fit in which each thread reduces the rows that it needs, each with the seconds that it takes."""
    height, room = work.image[0].size, room_of_block(work, least)
    for way in ways_to_leave(work.kernel, work.program, work.image):
        for plan in patches_of(work, way, _rows(height, _most_rows(work, way.width))):
            tiles = work.tiles_under(plan)
            if tiles is None or (plan.unroll > 1 and work.elements(tiles, plan.unroll) > MOST_READ):
                continue
            nbytes = sum(plan.planes // tile.images * tile.nbytes for tile in tiles)
            finished = with_room(work, plan, nbytes, work.registers(plan.unroll, plan.width, tiles))
            if finished.shared_bytes > room:
                continue
            for upright in (False, True) if _may_be_upright(work, plan) else (False,):
                yield (turned := replace(finished, upright=upright)), work.seconds(turned, tiles)


def _may_be_upright(work: OutputTileWork, plan: WindowTile) -> bool:
    """Whether threads may stand below each other: what each stores would lie far apart, and what an image's threads reduce over positions is
    merged by neighbours."""
    return plan.exchanges and plan.groups > 1 and (work.kernel.partials is None or plan.planes == 1)


def _most_rows(work: OutputTileWork, width: int) -> int:
    """Of `width` results each, that a thread may have."""
    sums = _SUMS * 3 // 2 if work.separable else _SUMS if work.factors <= _CONSTANTS else _SUMS // 2
    tallest = max(window.taps[0].size for window in work.windows) if work.separable else 0
    return max(min(max(_MOST_ROWS, tallest), sums // (width * work.words)), 1)


def _rows(height: int, most: int) -> Iterator[tuple[int, int]]:
    """Rows of a thread, and threads below each other, of which the last one's rows may be also others'."""
    for unroll in range(1, min(height, most) + 1):
        for groups in range(1, min(ceil(height, unroll), THREADS[1]) + 1):
            yield unroll, groups
