"""Schedules of pointwise kernels whose windows overlap along three axes: blocks go through planes, whose tiles come one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from fusepass.codegen.device import RESERVED, WARP, DeviceFacts
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.patch_tiles import TileShape, tile_shape
from fusepass.codegen.ir.patches import PatchWindow, plane_windows
from fusepass.codegen.ir.planes import Planes
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule.patch import LEAST_REUSE, vector_of_results
from fusepass.codegen.schedule.patch_threads import THREADS, groups_of_patch, lanes_of_patch
from fusepass.codegen.schedule.plan import Schedule, Walk
from fusepass.codegen.schedule.shape import ceil, divisors

STAGES = 3
"""Turns whose tiles have places: that of the one at hand, and those that are on their way."""

_SUMS = 64  # registers of a thread that hold results, and what a plane has for them
_REGISTERS = 160  # of a thread
_HELD = 32  # registers of weights that all stay
_OTHERS = 40  # registers besides results, a row and weights
_UNROLLS = 1, 2, 3, 4, 6, 8  # rows of results of a thread
_SCHEDULERS = 4  # of a multiprocessor, each of which issues one instruction a cycle
_TURN = 40  # instructions of a turn besides what is copied, read and reduced
_STORE = 6  # of a vector of results
# These fit times of 92 schedules of 12 kernels on an H100: of each kernel the one with the least estimate takes 1.7 % longer than the fastest.
_COPY = 12  # instructions of a vector that a thread copies
_CACHE = 20  # bytes of the second-level cache that a multiprocessor gets in a cycle
_ALONE = 3  # warps whose time is lost where few hide what others wait for
_WAIT = 1000  # cycles of a turn in which a warp waits for others and for what it reads
_LATENCY = 3  # cycles from one of its instructions to the next
_START = 3000  # cycles from a block's start to its first turn, and behind its last


def planes(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool) -> Schedule | None:
    """The patches that take the least time by an estimate; None where windows share too little, or nothing fits."""
    windows = plane_windows(kernel, program)
    if not facts.copies or not windows or any(window.reuse < LEAST_REUSE for window in windows):
        return None
    found = _plans(_Work(kernel, program, facts, windows, aligned))
    return min(found, key=lambda pair: pair[1], default=(None, 0.0))[0]


def places(window: PatchWindow) -> int:
    """Tiles of an image for which a block has room."""
    assert window.planes is not None
    return STAGES * window.planes.turn


@dataclass(frozen=True)
class _Work:
    """What is to be laid out."""

    kernel: Kernel
    program: Program
    facts: DeviceFacts
    windows: tuple[PatchWindow, ...]
    aligned: bool

    @property
    def planes(self) -> Planes:
        found = self.windows[0].planes
        assert found is not None
        return found

    @cached_property
    def words(self) -> int:
        """Registers of the sums for one result: of those that are begun, and of the plane at hand where all share it."""
        return sum(
            max(window.window.dtype.nbytes // 4, 1) * (self.planes.open + window.separable) for window in self.windows
        )

    @cached_property
    def constants(self) -> int:
        """Registers of what windows multiply by; of many, some are loaded again."""
        count = sum(prod(axis.size for axis in each.window.axes) * len(each.constants) for each in self.windows)
        return count if count <= _HELD else (count + _HELD) // 2

    @cached_property
    def known(self) -> dict[tuple[int, int, int], tuple[TileShape, ...]]:
        return {}

    def shapes(self, band: int, cols: int, width: int) -> tuple[TileShape, ...]:
        """The tiles of a plane under such a patch."""
        key, lane = (band, cols, width), Axis("lane", width)
        if key not in self.known:
            self.known[key] = tuple(
                tile_shape(self.program, window, below, (band, cols), lane, aligned=self.aligned)
                for window in self.windows
                for below in window.below
            )
        return self.known[key]


def _plans(work: _Work) -> Iterator[tuple[Schedule, float]]:
    """All patches that fit, each with the cycles that it takes."""
    z, y, x = work.kernel.rows[-3:]
    images = work.kernel.row_count // (z.size * y.size * x.size)
    width = vector_of_results(work.kernel, work.program, x)
    depths = sorted({ceil(z.size, count) for count in range(1, z.size + 1)})
    depths = [depth for depth in depths if depth >= min(z.size, work.planes.open)]
    for unroll in _UNROLLS:
        if unroll > y.size or unroll * width * work.words > _SUMS:
            continue
        for lanes, groups in product(lanes_of_patch(x.size, width), groups_of_patch(y.size, unroll)):
            if lanes * groups > THREADS[1]:
                continue
            band, cols = min(unroll * groups, y.size), lanes * width
            patches = ceil(y.size, band) * ceil(x.size, cols)
            for several in divisors(images, THREADS[1] // (lanes * groups)) if patches == 1 else (1,):
                if lanes * groups * several < THREADS[0]:
                    continue
                plan = Schedule(
                    Walk.PATCH, width, unroll, lanes, groups * several, 0, image=(y, x), planes=several, band=band
                )
                for depth in depths:
                    blocks = images // several * patches * ceil(z.size, depth)
                    found = _finished(work, replace(plan, depth=depth, blocks=blocks))
                    if found is not None:
                        yield found


def _finished(work: _Work, plan: Schedule) -> tuple[Schedule, float] | None:
    """The plan with its shared memory, and the cycles that it takes; None where a multiprocessor has no room for a block."""
    facts, through, results = work.facts, work.planes, plan.unroll * plan.width
    shapes = work.shapes(plan.band, plan.lanes * plan.width, plan.width)
    shared = plan.planes * sum(shape.nbytes for shape in shapes) * places(work.windows[0])
    warps = ceil(plan.threads, WARP)
    registers = results * work.words + sum(shape.reach for shape in shapes) + work.constants + _OTHERS
    room = (facts.shared_bytes_per_block + RESERVED) // (shared + RESERVED)
    resident = min(room, facts.registers // (registers * WARP * warps), facts.max_threads // plan.threads)
    if registers > _REGISTERS or resident < 1:
        return None
    copied = sum(ceil(plan.planes * shape.vectors, plan.threads) for shape in shapes)
    issued, read = _turn(work, plan, shapes)
    issued += _COPY * copied * through.turn
    fetched = plan.planes * sum(shape.nbytes for shape in shapes) * through.turn / _CACHE
    turns = through.turns(plan.depth)

    def cycles(blocks: int) -> float:
        """Of so many blocks of a multiprocessor at once."""
        busy = max((blocks * warps + _ALONE) * max(issued / _SCHEDULERS, read), blocks * fetched)
        return (turns + 1) * max(busy, _LATENCY * issued + _WAIT) + _START

    full, rest = divmod(plan.blocks, resident * facts.multiprocessors)
    total = full * cycles(resident) + (cycles(ceil(rest, facts.multiprocessors)) if rest else 0)
    return replace(plan, shared_bytes=shared, resident=resident), total


def _turn(work: _Work, plan: Schedule, shapes: tuple[TileShape, ...]) -> tuple[float, float]:
    """The instructions of a thread in a turn without its copies, and the cycles in which a warp reads shared memory."""
    through, results, issued, read = work.planes, plan.unroll * plan.width, float(_TURN), 0.0
    tiles = iter(shapes)
    for window in work.windows:
        (down, across), below = window.taps, window.below[0]
        rows, _ = below.span(window.taps, (plan.unroll, 1))
        for each in window.below:
            shape = next(tiles)
            nbytes = each.load.dtype.nbytes
            accesses = shape.reach // shape.near
            read += through.turn * rows * accesses * max(shape.near * nbytes / 4, 1)
            cast = shape.reach if nbytes < 4 else 0
            issued += through.turn * rows * (accesses + cast)
        if window.separable:
            issued += through.turn * (rows * plan.width * across.size + results * down.size)
            issued += results * through.tap.size
        else:
            issued += results * down.size * across.size * through.tap.size
    return issued + plan.unroll * len(work.kernel.stores) * (_STORE + plan.width), read
