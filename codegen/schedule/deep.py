"""Schedules of pointwise kernels with deep windows: output tiles whose tiles come one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import prod

from fusepass.codegen.device import RESERVED, WARP, DeviceFacts
from fusepass.codegen.ir.expr import Window
from fusepass.codegen.ir.index import Index
from fusepass.codegen.ir.output_tiles import Below, TileWindow, deep_windows
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.staged_windows import TileShape
from fusepass.codegen.schedule.output_tile_space import in_turns
from fusepass.codegen.schedule.output_tile_work import Work, cycles_of_launch
from fusepass.codegen.schedule.plan_output_tile import DeepTile
from fusepass.codegen.schedule.shape import ceil

STAGES = 3
"""Places for tiles: of the one at hand, and of those that are on their way."""

_SUMS = 64  # registers of a thread that hold results
_MOST_PUSHED = 3200  # points of windows that a thread adds of a tile: they are written out
_WEIGHTS = 64  # registers that hold what a tile is multiplied by
_HELD = 160  # registers of results, of a row and of weights, up to which weights are held
_OTHERS = 56  # registers besides these
_PARTS = 1, 2, 4, 8
_WAIT = 600  # cycles of an iteration in which a warp waits for others and for what it reads, if it is alone
_TURN = 40  # instructions of an iteration besides what is read, copied and added
_ALONE = 3  # warps whose time is lost where few hide what others wait for
_ACCESS = 4  # cycles of shared memory that a warp's copies take
_COPY = 6  # the same for each vector that a thread copies
_REGISTERS = 255
_START = 3000  # cycles from a block's start to its first iteration, and behind its last


def weights_apart(windows: tuple[TileWindow, ...]) -> int:
    """Numbers from one point to the next of what windows multiply by: whole vectors of up to four."""
    count = sum(len(window.constants) for window in windows)
    return count if count <= 2 else ceil(count, 4) * 4


def weights_of_tile(windows: tuple[TileWindow, ...]) -> int:
    """Numbers that a tile is multiplied by."""
    return prod(axis.size for axis in windows[0].taps) * weights_apart(windows)


def weights_of_iteration(windows: tuple[TileWindow, ...], plan: DeepTile) -> int:
    """Room for what the tiles of an iteration are multiplied by, in numbers: whole vectors of 16 bytes."""
    return ceil(plan.parts * weights_of_tile(windows), 4) * 4


def exchanged_bytes(windows: tuple[TileWindow, ...], plan: DeepTile) -> int:
    """Room for what the other parts of a block hand to the first."""
    others = (plan.parts - 1) * plan.threads // plan.parts
    return others * plan.unroll * plan.width * len(windows) * windows[0].window.dtype.nbytes


def keeps_weights(windows: tuple[TileWindow, ...], plan: DeepTile) -> bool:
    """Whether a thread reads once what a tile is multiplied by, rather than for each row of results."""
    weights, results = weights_of_tile(windows), plan.width * plan.unroll * len(windows)
    return plan.unroll > 1 and weights <= _WEIGHTS and weights + results <= _HELD


def has_deep_windows(kernel: Kernel) -> bool:
    return any(isinstance(node, Window) and len(node.axes) > 2 for node in kernel.nodes)


def deep(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool) -> DeepTile | None:
    """The output tiles that take the least time by an estimate; None where windows are not deep, or nothing fits."""
    return min(_plans(kernel, program, facts, aligned), key=lambda pair: pair[1], default=(None, 0.0))[0]


def serves_deep(kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
    """Whether there are such output tiles."""
    return next(_plans(kernel, program, facts, aligned=True), None) is not None


class _Work(Work):
    """What is to be laid out; all windows are over the same tiles."""

    @property
    def window(self) -> TileWindow:
        return self.windows[0]

    @cached_property
    def pushed(self) -> int:
        """Points of all windows together, over one tile, for each result of one."""
        return sum(map(_taken, self.windows))

    @cached_property
    def weights(self) -> int:
        """Numbers that a tile is multiplied by."""
        return weights_of_tile(self.windows)

    @property
    def loads(self) -> tuple[tuple[TileWindow, Below], ...]:
        return ((self.window, self.window.below[0]),)


def _taken(window: TileWindow) -> int:
    """Points of a window, over one tile, that are reduced."""
    spots = product(*(range(axis.size) for axis in window.taps))

    def there(spot: tuple[int, ...]) -> bool:
        at = {axis: Index(place) for axis, place in zip(window.taps, spot, strict=True)}
        indices = ((bound, bound.index.substitute(at).constant) for bound in window.taken)
        return all(bound.low <= index < bound.high for bound, index in indices)

    return sum(map(there, spots))


def _plans(kernel: Kernel, program: Program, facts: DeviceFacts, aligned: bool) -> Iterator[tuple[DeepTile, float]]:
    """All output tiles that fit, each with the cycles that it takes."""
    image = kernel.rows[-2:]
    windows = deep_windows(kernel, program, image) if len(image) == 2 else ()
    if not facts.copies or not windows:
        return
    work, (y, x) = _Work(kernel, program, facts, windows, aligned), image
    images = work.kernel.row_count // (y.size * x.size)
    parts = [part for part in _PARTS if work.window.deep[0].size % part == 0]
    for width, unroll in product((4, 2, 1), (1, 2, 3, 4, 6, 8)):
        results = width * unroll
        fits = results * len(work.windows) <= _SUMS and results * work.pushed <= _MOST_PUSHED
        if width > x.size or unroll > y.size or not fits:
            continue
        for plan, part in in_turns(DeepTile, image, images, width, unroll, parts, alone=bool(work.window.around)):
            found = _finished(work, replace(plan, parts=part))
            if found is not None:
                yield found


def _finished(work: _Work, plan: DeepTile) -> tuple[DeepTile, float] | None:
    """The plan with its shared memory, and the cycles that it takes; None where a multiprocessor has no room for a block."""
    facts, window, count = work.facts, work.window, len(work.windows)
    results, nbytes = plan.width * plan.unroll, window.window.dtype.nbytes
    (shape,) = work.tiles(plan.tile_height, plan.lanes * plan.width, plan.width)
    copied = ceil(plan.parts * plan.planes * shape.rows * (shape.cols // shape.vector), plan.threads)
    fetched = ceil(plan.parts * work.weights, plan.threads)
    staged = plan.parts * plan.planes * shape.nbytes + weights_of_iteration(work.windows, plan) * nbytes
    shared, warps = max(STAGES * staged, exchanged_bytes(work.windows, plan)), ceil(plan.threads, WARP)
    held = min(work.weights, _WEIGHTS) if plan.unroll > 1 else 2 * weights_apart(work.windows)
    registers = min(results * count + 2 * shape.reach + held + copied + 2 * fetched + _OTHERS, _REGISTERS)
    room = (facts.shared_bytes_per_block + RESERVED) // (shared + RESERVED)
    resident = min(room, facts.registers // (registers * WARP * warps))
    if shared > facts.shared_bytes_per_block or resident < 1:
        return None
    iterations = prod(axis.size for axis in window.deep) // plan.parts
    issued, read = _iteration(work, plan, shape)
    issued += _COPY * (copied + fetched) + (plan.parts - 1) * results * count * 2 / iterations
    busy = max(issued / facts.machine.rates.schedulers, read + _ACCESS * (copied + fetched))

    def cycles(blocks: int) -> float:
        """Of so many blocks of a multiprocessor at once."""
        return iterations * max(busy * (blocks * warps + _ALONE), issued + _WAIT) + _START

    total = cycles_of_launch(plan.blocks, resident, facts, cycles)
    return replace(plan, shared_bytes=shared, resident=resident), total


def _iteration(work: _Work, plan: DeepTile, shape: TileShape) -> tuple[float, float]:
    """The instructions of a thread for a tile without its copies, and the cycles in which a warp's share of it is read from shared memory."""
    (below,), kept = work.window.below, keeps_weights(work.windows, plan)
    rows = (plan.unroll - 1) * below.steps[0] + work.window.taps[0].size
    read = rows * shape.reach * below.load.dtype.nbytes / 4 + work.weights * (1 if kept else plan.unroll)
    cast = rows * shape.reach if below.load.dtype is not work.window.window.dtype else 0
    issued = plan.width * plan.unroll * work.pushed + read / 4 + cast + _TURN
    whole = plan.parts == 1 or plan.threads // plan.parts % WARP == 0
    return issued, read if whole else 2 * read  # a warp with threads of several parts reads in several places
