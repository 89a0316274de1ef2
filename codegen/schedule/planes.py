"""Schedules of pointwise kernels whose windows overlap along three axes: blocks go through planes, whose tiles come one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product

from fusepass.codegen.device import RESERVED, WARP, DeviceFacts
from fusepass.codegen.ir.output_tiles import TileWindow, plane_windows
from fusepass.codegen.ir.planes import Planes
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.sliding import Reduced
from fusepass.codegen.ir.staged_windows import TileShape
from fusepass.codegen.schedule.output_tile import LEAST_REUSE
from fusepass.codegen.schedule.output_tile_results import vector_of_results
from fusepass.codegen.schedule.output_tile_space import in_turns
from fusepass.codegen.schedule.output_tile_work import Work, cycles_of_launch
from fusepass.codegen.schedule.plan_output_tile import PlaneTile
from fusepass.codegen.schedule.shape import ceil

STAGES = 3
"""Turns whose tiles have places: that of the one at hand, and those that are on their way."""

_SUMS = 64  # registers of a thread that hold results, and what a plane has for them
_REGISTERS = 160  # of a thread
_HELD = 32  # registers of weights that all stay
_OTHERS = 40  # registers besides results, a row and weights
_UNROLLS = 1, 2, 3, 4, 6, 8  # rows of results of a thread
_TURN = 20  # instructions of an iteration besides what is copied, read and reduced
_STORE = 12  # of a vector of results
# These fit times of 179 schedules of 7 pools on an H200: of each pool the one that is taken takes 6 % longer than the fastest; one takes 24 %,
# as it is the first of several with the same estimate.
_COPY = 16  # instructions of a vector that a thread copies
_MEMORY = 17  # bytes that a multiprocessor gets or stores in a cycle
_ALONE = 6  # warps whose time is lost where few hide what others wait for
_WAIT = 300  # cycles of an iteration in which a warp waits for others and for what it reads
_LATENCY = 3  # cycles from one of its instructions to the next
_START = 1000  # cycles from a block's start to its first iteration, and behind its last


def planes(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool) -> PlaneTile | None:
    """The output tiles that take the least time by an estimate; None where windows share too little, or nothing fits."""
    windows = plane_windows(kernel, program)
    if not facts.copies or not windows or any(window.reuse < LEAST_REUSE for window in windows):
        return None
    found = _plans(_Work(kernel, program, facts, windows, aligned))
    return min(found, key=lambda pair: pair[1], default=(None, 0.0))[0]


def places(window: TileWindow) -> int:
    """Tiles of an image for which a block has room."""
    assert window.planes is not None
    return STAGES * window.planes.iteration


class _Work(Work):
    """What is to be laid out."""

    @property
    def planes(self) -> Planes:
        found = self.windows[0].planes
        assert found is not None
        return found

    @cached_property
    def constants(self) -> int:
        """Registers of what windows multiply by; of many, some are loaded again."""
        return self.factors if self.factors <= _HELD else (self.factors + _HELD) // 2


def _plans(work: _Work) -> Iterator[tuple[PlaneTile, float]]:
    """All output tiles that fit, each with the cycles that it takes."""
    z, y, x = work.kernel.rows[-3:]
    images = work.kernel.row_count // (z.size * y.size * x.size)
    width = vector_of_results(work.kernel, work.program, x)
    depths = sorted({ceil(z.size, count) for count in range(1, z.size + 1)})
    depths = [depth for depth in depths if depth >= min(z.size, work.planes.open)]
    for unroll in _UNROLLS:
        if unroll > y.size:
            continue
        for (plan, _), depth in product(in_turns(PlaneTile, (y, x), images, width, unroll), depths):
            found = _finished(work, replace(plan, depth=depth, blocks=plan.blocks * ceil(z.size, depth)))
            if found is not None:
                yield found


def _finished(work: _Work, plan: PlaneTile) -> tuple[PlaneTile, float] | None:
    """The plan with its shared memory, and the cycles that it takes; None where a multiprocessor has no room for a block."""
    facts, through = work.facts, work.planes
    shapes = work.tiles(plan.tile_height, plan.lanes * plan.width, plan.width)
    tile = plan.planes * sum(shape.nbytes for shape in shapes)
    shared = tile * places(work.windows[0])
    warps = ceil(plan.threads, WARP)
    ways = work.ways(plan, shapes)
    sums = sum(
        max(way.window.window.dtype.nbytes // 4, 1) * way.states * (through.open + way.window.separable) for way in ways
    )
    registers = sums + sum(shape.reach for shape in shapes) + work.constants + _OTHERS
    room = (facts.shared_bytes_per_block + RESERVED) // (shared + RESERVED)
    resident = min(room, facts.registers // (registers * WARP * warps), facts.max_threads // plan.threads)
    if sums > _SUMS or registers > _REGISTERS or resident < 1:
        return None
    copied = sum(ceil(plan.planes * shape.vectors, plan.threads) for shape in shapes)
    issued, read = _iteration(work, plan, shapes, ways)
    issued += _COPY * copied * through.iteration
    moved = tile * through.iteration + work.stored * plan.threads * plan.unroll * plan.width
    iterations = through.iterations(plan.depth)

    def cycles(blocks: int) -> float:
        """Of so many blocks of a multiprocessor at once."""
        busy = max(
            (blocks * warps + _ALONE) * max(issued / facts.machine.rates.schedulers, read), blocks * moved / _MEMORY
        )
        return (iterations + 1) * max(busy, _LATENCY * issued + _WAIT) + _START

    total = cycles_of_launch(plan.blocks, resident, facts, cycles)
    return replace(plan, shared_bytes=shared, resident=resident), total


def _iteration(
    work: _Work, plan: PlaneTile, shapes: tuple[TileShape, ...], ways: Sequence[Reduced]
) -> tuple[float, float]:
    """The instructions of a thread in an iteration without its copies, and the cycles in which a warp reads shared memory."""
    through, issued, read = work.planes, float(_TURN), 0.0
    tiles = iter(shapes)
    for way in ways:
        window, (down, across) = way.window, way.window.taps
        rows, _ = window.below[0].span(window.taps, (plan.unroll, 1))
        for each in window.below:
            shape, nbytes = next(tiles), each.load.dtype.nbytes
            accesses = shape.reach // shape.near
            read += through.iteration * rows * accesses * max(shape.near * nbytes / 4, 1)
            cast = shape.reach if nbytes < 4 and way.lanes == 1 else 0
            issued += through.iteration * rows * (accesses + cast)
        if window.separable:
            issued += through.iteration * way.reductions + way.states * through.tap.size
        else:
            issued += way.states * down.size * across.size * through.tap.size
        issued += way.states * through.open  # which become older
    return issued + plan.unroll * len(work.kernel.stores) * (_STORE + plan.width), read
