"""Output tiles that reduce windows in two stages (`two_stage_windows`): which there may be, each with an estimate of its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from fusepass.codegen.device import WARP
from fusepass.codegen.schedule.output_tile_results import ways_to_leave
from fusepass.codegen.schedule.output_tile_space import MOST_READ, patches_of, room_of_block, with_room
from fusepass.codegen.schedule.output_tile_work import OutputTileWork
from fusepass.codegen.schedule.plan_output_tile import WindowTile
from fusepass.codegen.schedule.shape import ceil

_TAKEN = 1, 2, 4  # neighbouring states that a thread may take of a row at once
_SUMS = 32  # registers of a thread that hold results
_STRIP = 40  # elements from the first to the last result of a row that a thread reduces at once
_ALONG = 4, 8, 12, 16, 20, 24, 5, 7, 9, 11, 13  # of these results, where they are not all of a row
_ROWS = 2, 4, 8, 16  # of a thread, where a block has a part of an image
_GROUPS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32  # threads below each other there


def in_iterations(work: OutputTileWork, least: int) -> Iterator[tuple[WindowTile, float]]:
    """All output tiles that fit, each with the seconds that it takes: of whole images, several of which lie together, or of a part of one.

    `least`: how many blocks a multiprocessor must have the shared memory for.
    """
    if not work.separable or all(window.taps[1].size == 1 for window in work.windows):
        return
    height, room = work.image[0].size, room_of_block(work, least)
    for way in ways_to_leave(work.kernel, work.program, work.image):
        if way.width not in _TAKEN:
            continue
        for plan in patches_of(work, way, _rows(height, way.width)):
            for along in _strips(work, plan.lanes * plan.width):
                finished = _finished(work, replace(plan, along=along), room)
                if finished is not None:
                    yield finished


def _finished(work: OutputTileWork, plan: WindowTile, room: int) -> tuple[WindowTile, float] | None:
    """`plan` with the shared memory that it takes, and its seconds; None where no tiles serve it, or a multiprocessor has not the registers, or not
    so many bytes of `room`."""
    tiles = work.tiles_under(plan)
    if tiles is None or sum(tile.reach for tile in tiles) > MOST_READ:
        return None
    registers = work.registers_in_iterations(plan, tiles)
    if ceil(plan.threads, WARP) * WARP * registers > work.facts.registers:
        return None
    nbytes = sum(plan.planes // tile.images * tile.nbytes for tile in tiles)
    nbytes += sum(iteration.nbytes for iteration in work.first_iterations(plan, tiles))
    plan = with_room(work, plan, nbytes, registers)
    return (plan, work.seconds(plan, tiles)) if plan.shared_bytes <= room else None


def _strips(work: OutputTileWork, cols: int) -> Iterator[int]:
    """For how many neighbouring results of a row of so many a thread may find what the row comes to: all, in pairs where there are halves, or some."""
    step = work.windows[0].below[0].steps[1]
    halves = any(below.load.dtype.is_half for _, below in work.loads)
    whole, most = ceil(cols, 2) * 2 if halves else cols, max(_STRIP // step, 1)
    if whole <= most:
        yield whole
    yield from (along for along in _ALONG if along < cols and along <= most)


def _rows(height: int, width: int) -> Iterator[tuple[int, int]]:
    """Rows of a thread, and threads below each other: of a whole image, or of a part of one."""
    most = min(_SUMS // width, height)
    for unroll in sorted({ceil(height, groups) for groups in range(1, height + 1)}):
        if unroll <= most:
            yield unroll, ceil(height, unroll)
    for unroll, groups in product(dict.fromkeys(min(most, rows) for rows in _ROWS), _GROUPS):
        if groups * unroll < height:
            yield unroll, groups
