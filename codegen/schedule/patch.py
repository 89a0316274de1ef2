"""Schedules of pointwise kernels whose windows overlap: blocks take patches, and share the rows of the input below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.patches import PatchWindow, patch_windows, tile_shape
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.vectors import is_vector, split_index
from fusepass.codegen.schedule.plan import Schedule, Walk
from fusepass.codegen.schedule.shape import ACCESS

_LEAST_REUSE = 6  # points of windows for each element: with fewer there is little to gain
_THREADS = 64, 256  # least and most of a block
_SUMS = 32  # registers of a thread that hold results
_CONSTANTS = 32  # registers that hold weights: with more, half as many results
_OTHERS = 16  # registers besides results and half of the weights; the others are loaded again
_MOST_ROWS = 8  # of results, one below the other, of a thread
_BLOCKS = 5  # on a multiprocessor, so that some compute while others wait
_READING = 0.25  # of what the points of a row of results cost, to read a row of the tile
_WARP = 32
_RESERVED = 1 << 10  # bytes of shared memory that the device takes of each block
_COPIES_FROM = 80  # compute capability times ten


def patch(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool) -> Schedule | None:
    """The best patches of the images that the kernel's last two axes walk over; None where they would save nothing."""
    if facts.capability < _COPIES_FROM:
        return None
    image = kernel.rows[-2:]
    windows = patch_windows(kernel, program, image) if len(image) == 2 else ()
    if not windows or min(window.reuse for window in windows) < _LEAST_REUSE:
        return None
    wanted = 2 * facts.multiprocessors
    down, (step, _) = windows[0].window.axes[0], windows[0].below[0].steps

    def worth(plan: Schedule) -> tuple[int, float, int]:
        """How busy blocks keep the device, and threads their warps."""
        rows = (plan.unroll - 1) * step + down.size
        lanes = -(-plan.threads // _WARP) * _WARP
        return min(plan.blocks, wanted), plan.threads / lanes / (1 + _READING * rows / plan.unroll), plan.threads

    return max(_plans(kernel, program, facts, windows, aligned), key=worth, default=None)


def _plans(
    kernel: Kernel, program: Program, facts: DeviceFacts, windows: tuple[PatchWindow, ...], aligned: bool
) -> Iterator[Schedule]:
    """All patches that divide the image and fit; several images where one is small."""
    y, x = kernel.rows[-2:]
    width = _width(kernel, program, x)
    images, lanes = kernel.row_count // (y.size * x.size), x.size // width
    words = sum(max(window.window.dtype.nbytes // 4, 1) for window in windows)
    constants = sum(prod(axis.size for axis in window.window.axes) * len(window.constants) for window in windows)
    most = max(min(_MOST_ROWS, (_SUMS if constants <= _CONSTANTS else _SUMS // 2) // (width * words)), 1)
    room = (facts.shared_bytes_per_block + _RESERVED) // _BLOCKS - _RESERVED
    splits = ((rows, groups) for rows in _divisors(y.size, most) for groups in _divisors(y.size // rows))
    for unroll, groups in splits:
        nbytes = _shared(program, windows, (groups * unroll, x.size), width, aligned=aligned)
        if nbytes is None:
            return
        for planes in _divisors(images) if groups * unroll == y.size else (1,):
            threads = lanes * groups * planes
            if not _THREADS[0] <= threads <= _THREADS[1] or planes * nbytes > room:
                continue
            blocks = kernel.row_count // (threads * unroll * width)
            registers = unroll * width * words + constants // 2 + _OTHERS
            resident = min(_BLOCKS, facts.registers // (-(-threads // _WARP) * _WARP * registers))
            plan = Schedule(Walk.PATCH, width, unroll, lanes, groups * planes, blocks, shared_bytes=planes * nbytes)
            yield replace(plan, planes=planes, resident=max(resident, 1))


def _divisors(count: int, most: int = _THREADS[1]) -> list[int]:
    return [each for each in range(1, min(count, most) + 1) if count % each == 0]


def _width(kernel: Kernel, program: Program, x: Axis) -> int:
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


def _shared(
    program: Program, windows: tuple[PatchWindow, ...], results: tuple[int, int], width: int, *, aligned: bool
) -> int | None:
    """Bytes of the tiles for the patch of one image."""
    total = 0
    for window in windows:
        for below in window.below:
            tile = tile_shape(program, window, below, results, Axis("lane", width), aligned=aligned)
            if tile is None:
                return None
            total += tile.nbytes
    return total
