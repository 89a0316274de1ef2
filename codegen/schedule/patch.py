"""Schedules of pointwise kernels whose windows overlap: blocks take patches, and share the rows of the input below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from fusepass.codegen.device import RESERVED, WARP, DeviceFacts
from fusepass.codegen.ir.expr import Window
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.patch_tiles import TileShape, tile_shape
from fusepass.codegen.ir.patches import ONE_ROW, PatchWindow, patch_windows
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.vectors import is_vector, split_index
from fusepass.codegen.schedule.patch_threads import THREADS
from fusepass.codegen.schedule.plan import Schedule, Walk
from fusepass.codegen.schedule.shape import ACCESS, ceil, divisors

LEAST_REUSE = 4
"""Points of windows for each element: with fewer there is little to gain."""

_LEAST_REUSE_OF_ROW = 6  # the same of windows of one row, where vectors share what they load
_WORD = 4  # bytes: shorter elements are not loaded one by one
_SUMS = 32  # registers of a thread that hold results; of separable windows half as many again, as little else is held
_CONSTANTS = 32  # registers that hold weights: with more, half as many results
_OTHERS = 16  # registers besides results and half of the weights; the others are loaded again
_MOST_ROWS = 8  # of results, one below the other, of a thread; as many as the window has, where those share what they are made of
_MOST_READ = (
    2048  # elements of tiles that a thread with several rows reads: they are written out, and compiled for long
)
_BLOCKS = 5  # on a multiprocessor, so that some compute while others wait
_READING = 0.25  # of what the points of a row of results cost, to read a row of the tile
_COPYING = 0.25  # likewise, to copy what other blocks copy, too
_COPY = 1.0  # likewise, to copy a vector
_WEIGHTS = 0.5  # likewise, to load what the points of one result are multiplied by
_BLOCK = 128  # likewise of results, to begin a block: a multiprocessor does every 80 ns or so
_ENDS = 8  # columns of memory's sectors that patches side by side both write


def patch(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool, single: bool) -> Schedule | None:
    """The best patches of the images that windows walk over; None where they would save nothing.

    `single`: whether threads have single elements else.
    """
    if not facts.copies:
        return None
    wanted = 2 * facts.multiprocessors

    def worth(found: tuple[Schedule, PatchWindow, float]) -> tuple[int, float, int]:
        """How busy blocks keep the device, and threads their warps with results that nobody else computes."""
        plan, window, copies = found
        (down, across), step, (_, x) = window.taps, window.below[0].steps[0], plan.image
        rows = (plan.unroll - 1) * step + down.size
        lanes = plan.blocks * ceil(plan.threads, WARP) * WARP * plan.unroll * plan.width
        cols = plan.lanes * plan.width
        copied = (plan.band + down.size - 1) * (cols + (across.size - 1 + _ENDS if cols < x.size else 0))
        cost = (1 + _READING * rows / plan.unroll) * (1 + _COPYING * (copied / (plan.band * cols) - 1))
        cost += _COPY * copies + (_WEIGHTS / (plan.unroll * plan.width) if window.constants else 0)
        cost += _BLOCK * plan.blocks / kernel.row_count
        return min(plan.blocks, wanted), kernel.row_count / lanes / cost, plan.threads

    found = (
        (plan, windows[0], copies)
        for image in _images(kernel)
        if (windows := patch_windows(kernel, program, image))
        and all(window.reuse >= _least_reuse(window, single) for window in windows)
        for plan, copies in _plans(kernel, program, facts, windows, aligned)
    )
    best = max(found, key=worth, default=None)
    return best and best[0]


def _images(kernel: Kernel) -> Iterator[tuple[Axis, Axis]]:
    """The axes down an image, and along its rows. Rows over which no window goes may be those of an image in any way: what windows
    multiply by must be the same for all of one."""
    windows = [node for node in kernel.nodes if isinstance(node, Window)]
    if not windows:
        return
    *others, x = kernel.rows
    if any(axis.size > 1 for window in windows for axis in window.axes[:-1]):
        yield from ((y, x) for y in others[-1:])
    else:
        yield from ((y, x) for y in (*others, ONE_ROW))


def _least_reuse(window: PatchWindow, single: bool) -> int:
    if window.taps[0].size == 1:
        return _LEAST_REUSE_OF_ROW
    return 1 if single and window.below[0].load.dtype.nbytes < _WORD else LEAST_REUSE


def _plans(
    kernel: Kernel, program: Program, facts: DeviceFacts, windows: tuple[PatchWindow, ...], aligned: bool
) -> Iterator[tuple[Schedule, float]]:
    """All patches that fit, with how many vectors are copied for each result; several images where one is small.

    The last patches of an image begin earlier where others would end behind it.
    """
    y, x = windows[0].image
    width = vector_of_results(kernel, program, x)
    images = kernel.row_count // (y.size * x.size)
    words = sum(max(window.window.dtype.nbytes // 4, 1) for window in windows)
    constants = sum(prod(axis.size for axis in window.window.axes) * len(window.constants) for window in windows)
    separable = all(window.separable for window in windows)
    sums = _SUMS * 3 // 2 if separable else _SUMS if constants <= _CONSTANTS else _SUMS // 2
    tallest = max(window.taps[0].size for window in windows) if separable else 0
    most = max(min(max(_MOST_ROWS, tallest), sums // (width * words)), 1)
    room = (facts.shared_bytes_per_block + RESERVED) // _BLOCKS - RESERVED
    for lanes, (unroll, groups) in product(_lanes(x.size // width), _rows(y.size, most)):
        band, cols = min(unroll * groups, y.size), lanes * width
        if lanes * groups > THREADS[1]:
            continue
        tiles = _tiles(program, windows, (band, cols), width, aligned=aligned)
        if unroll > 1 and _elements(windows, tiles, unroll) > _MOST_READ:
            continue
        nbytes, copies = (sum(each) for each in zip(*((tile.nbytes, tile.vectors) for tile in tiles), strict=True))
        patches = ceil(y.size, band) * ceil(x.size, cols)
        for planes in divisors(images, THREADS[1]) if patches == 1 else (1,):
            threads = lanes * groups * planes
            if not THREADS[0] <= threads <= THREADS[1] or planes * nbytes > room:
                continue
            registers = unroll * width * words + constants // 2 + _OTHERS
            registers += sum(tile.reach for tile in tiles) if separable else 0
            resident = min(_BLOCKS, facts.registers // (-(-threads // WARP) * WARP * registers))
            blocks = images // planes * patches
            plan = Schedule(Walk.PATCH, width, unroll, lanes, groups * planes, blocks, shared_bytes=planes * nbytes)
            yield (
                replace(plan, image=(y, x), planes=planes, band=band, resident=max(resident, 1)),
                copies / (band * cols),
            )


def _elements(windows: tuple[PatchWindow, ...], tiles: list[TileShape], unroll: int) -> int:
    """What a thread reads of tiles, element by element in its code."""
    rows = [below.span(window.taps, (unroll, 1))[0] for window in windows for below in window.below]
    return sum(count * tile.reach for count, tile in zip(rows, tiles, strict=True))


def _lanes(vectors: int) -> list[int]:
    """Threads for each row of a patch: for a whole row of so many vectors, or for equal parts of it, as far as may be."""
    parts = {ceil(vectors, count) for count in range(1, ceil(vectors, WARP) + 1)}
    return sorted(lanes for lanes in parts if lanes <= THREADS[1])


def _rows(height: int, most: int) -> Iterator[tuple[int, int]]:
    """Rows of a thread, and threads below each other, of which the last one's rows may be also others'."""
    for unroll in range(1, min(height, most) + 1):
        for groups in range(1, min(ceil(height, unroll), THREADS[1]) + 1):
            yield unroll, groups


def vector_of_results(kernel: Kernel, program: Program, x: Axis) -> int:
    """Neighbouring results of a row that a thread stores at once."""
    largest = max(program.buffer(store.buffer).dtype.nbytes for store in kernel.stores)
    width = min(ACCESS // largest, 4)
    while width > 1:
        lane = Axis("lane", width)
        stored = (split_index(store.index, x, lane) for store in kernel.stores)
        if x.size % width == 0 and all(is_vector(index, x, lane) for index in stored):
            break
        width //= 2
    return width


def _tiles(
    program: Program, windows: tuple[PatchWindow, ...], results: tuple[int, int], width: int, *, aligned: bool
) -> list[TileShape]:
    """The tiles for the patch of one image."""
    lane = Axis("lane", width)
    return [
        tile_shape(program, window, below, results, lane, aligned=aligned)
        for window in windows
        for below in window.below
    ]
