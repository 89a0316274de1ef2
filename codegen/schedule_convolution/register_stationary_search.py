"""The schedules of `register_stationary`, and how long they take by estimate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import MOST_REGISTER_STATIONARY, ROWS, Phase
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule_convolution.chunks import makes_own_values
from fusepass.codegen.schedule_convolution.register_stationary import (
    NEIGHBOURS,
    PLACE_BYTES,
    SET_POSITIONS,
    STEP_RUNS,
    Places,
    RegisterStationarySchedule,
    Run,
)
from fusepass.codegen.schedule_convolution.tiles import (
    GROUP,
    WARPS,
    Tiles,
    anchor_of,
    border_of,
    dimensions,
    launched,
    phases_of,
    state_floats,
    tiles_of,
)

_LINES = 2, 4, 6
_CUTS = 1, 2, 3, 4, 5, 6, 8, 12  # parts that an axis may fall into
_MOST_WARPS = 8  # of a multiprocessor, as many as have registers for weights and sums
_MOST_APART = 1 << 13  # places, for a descriptor
_COLUMN = 0.73  # cycles of a multiprocessor for a product, for each column
_PRODUCT = 26.0  # the same, at least
_RESULT = 0.135  # the same for a result
_PACKED = 0.26  # the same for a number that is fetched and of which halves are made
_TILE = 3000.0  # cycles that a block waits for a tile besides
_HIDDEN = 0.8  # of what surrounds products, the part that those of another block do not hide
_ALONE = 1.2  # times as long with 4 warps on a multiprocessor


def costs(kernel: Kernel, program: Program, facts: DeviceFacts) -> Callable[[RegisterStationarySchedule], float]:
    """See `Way.costs`."""
    return lambda plan: _cost(plan, kernel, facts)


def fitting(kernel: Kernel, program: Program, facts: DeviceFacts) -> Iterator[RegisterStationarySchedule]:
    """Every schedule that fits a multiprocessor, of a kernel that stores nothing but what values reduce to."""
    anchor, sizes = anchor_of(kernel), [axis.size for axis in dimensions(kernel)]
    if kernel.stores or not makes_own_values(kernel) or anchor.dilation[-1] != 1:
        return
    (phase,) = phases_of(kernel, program)
    steps = _Steps.of(phase, program.buffer(anchor.source).shape[1])
    if 4 * anchor.parts * len(steps.runs) > MOST_REGISTER_STATIONARY:
        return
    for tile, lines in _tile_shapes(sizes[2:]):
        on = _tiles(kernel, program, steps, tile)
        if not _is_large(on, steps, anchor.parts, facts):
            yield from _candidates(kernel, facts, on, steps, lines)


def _tile_shapes(sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Tiles that fit evenly along each axis, in whole products, and the lines of these."""
    *outer, last = sizes
    for lines in _LINES:
        if not outer:
            unit = SET_POSITIONS * lines
            yield from (
                ((width,), lines) for width in sorted({ceil(ceil(last / count) / unit) * unit for count in _CUTS})
            )
            continue
        units = [*[1] * (len(outer) - 1), lines, SET_POSITIONS]
        cuts = [
            sorted({ceil(ceil(size / count) / unit) * unit for count in _CUTS})
            for size, unit in zip(sizes, units, strict=True)
        ]
        yield from ((tile, lines) for tile in itertools.product(*cuts))


@dataclass(frozen=True)
class _Steps:
    """What all tiles have in common. Runs lie in a grid: along channels, the outer axes of the kernel, and a row of it.

    Attributes:
        offsets: of the taps of runs, along each of these axes; along the last those of their first ones.
        axis: along which the runs of a step are neighbours.
        runs: `RegisterStationarySchedule.runs`.
        firsts: for each step, the place in the grid of its first run.
    """

    phase: Phase
    offsets: tuple[tuple[int, ...], ...]
    axis: int
    runs: tuple[tuple[Run, ...], ...]
    firsts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, phase: Phase, channels: int) -> _Steps:
        *outer, last = (sorted({*along}) for along in zip(*(tap.offset for tap in phase.taps), strict=True))
        offsets = (*map(tuple, ([*range(channels)], *outer)), tuple(range(last[0], last[-1] + 1, NEIGHBOURS)))
        counts = [len(each) for each in offsets]

        def cost(axis: int) -> tuple[int, int, int]:
            """Steps, how many runs are missing, and how far they would lie from others."""
            count = counts[axis]
            return ceil(count / STEP_RUNS) * prod(counts) // count, max(STEP_RUNS - count, 0), -axis

        axis = min(range(len(counts)), key=cost)
        numbers = {tap.offset: number for number, tap in enumerate(phase.taps)}

        def taps(at: Sequence[int]) -> tuple[int | None, ...]:
            *others, first = (along[i] for along, i in zip(offsets[1:], at[1:], strict=True))
            return tuple(numbers.get((*others, first + k)) for k in range(NEIGHBOURS))

        none: tuple[None, ...] = (None,) * NEIGHBOURS
        runs, firsts = list[tuple[Run, ...]](), list[tuple[int, ...]]()
        for others in itertools.product(*(range(count) for number, count in enumerate(counts) if number != axis)):
            for first in range(0, counts[axis], STEP_RUNS):
                # Of too few runs the last ones are none; what a step before has is multiplied by zero.
                begin = max(min(first, counts[axis] - STEP_RUNS), 0)
                ats = [(*others[:axis], begin + k, *others[axis:]) for k in range(STEP_RUNS)]
                runs.append(tuple(Run(at[0], taps(at) if first <= at[axis] < counts[axis] else none) for at in ats))
                firsts.append(ats[0])
        return cls(phase, offsets, axis, tuple(runs), tuple(firsts))

    def strides(self, on: Tiles) -> list[int]:
        """Places of a tile from an offset to the next one, along each axis of the grid."""
        width = self.width(on)
        rows = contiguous_strides(on.extent[:-1])
        return [prod(on.extent[:-1]) * width, *(stride * width for stride in rows), 1]

    def width(self, on: Tiles) -> int:
        """`Places.width`."""
        return on.tile[-1] // NEIGHBOURS + len(self.offsets[-1]) - 1

    def shift(self, on: Tiles) -> int:
        """`Places.shift`."""
        return self.offsets[-1][0] - on.origin[-1]

    def deeper(self, on: Tiles) -> int:
        """`Places.deeper`."""
        along = self.offsets[self.axis]
        each = along[1] - along[0] if len(along) > 1 and self.axis + 1 < len(self.offsets) else 1
        return self.strides(on)[self.axis] * each

    def places(self, on: Tiles) -> Places:
        """`RegisterStationarySchedule.places`."""
        deeper, strides, origin = self.deeper(on), self.strides(on), (0, *on.origin[:-1])

        def place(at: tuple[int, ...]) -> int:
            *outer, last = at
            along = zip(self.offsets, outer, origin, strides, strict=False)
            return sum((offsets[i] - low) * stride for offsets, i, low, stride in along) + last

        slack = max(STEP_RUNS - len(self.offsets[self.axis]), 0) * deeper
        return Places(tuple(map(place, self.firsts)), self.width(on), deeper, self.shift(on), slack)


def _tiles(kernel: Kernel, program: Program, steps: _Steps, tile: tuple[int, ...]) -> Tiles:
    """The tiles of a shape; rows of the input are as long as places need them."""
    border = border_of((steps.phase,), len(tile))
    plain = tiles_of(kernel, program, (steps.phase,), border, tile, len(steps.offsets[0]))
    last = ceil(max(steps.shift(plain) + NEIGHBOURS * (steps.width(plain) + 1), plain.extent[-1]) / 4) * 4
    on = replace(plain, extent=(*plain.extent[:-1], last))
    return replace(on, pitch=on.elements)


def _is_large(on: Tiles, steps: _Steps, parts: int, facts: DeviceFacts) -> bool:
    """Whether a tile does not fit a multiprocessor, or its places lie too far apart for a descriptor."""
    channels = len(steps.offsets[0])
    packed = PLACE_BYTES * parts * channels * prod(on.extent[:-1]) * steps.width(on)
    nbytes = packed + DType.F32.nbytes * channels * on.elements
    return nbytes > facts.shared_bytes_per_block or max(steps.deeper(on), steps.width(on)) >= _MOST_APART


def _candidates(
    kernel: Kernel, facts: DeviceFacts, on: Tiles, steps: _Steps, lines: int
) -> Iterator[RegisterStationarySchedule]:
    sizes = [axis.size for axis in dimensions(kernel)]
    for warps in (NEIGHBOURS, 2 * NEIGHBOURS):
        plan = RegisterStationarySchedule(
            on=replace(on, block_warps=warps, state_floats=state_floats(kernel, 1) * warps // WARPS),
            rows=1,
            iterations=1,
            parts=anchor_of(kernel).parts,
            channels=len(steps.offsets[0]),
            runs=steps.runs,
            places=steps.places(on),
            lines=lines,
            channel_blocks=ceil(sizes[1] / ROWS),
        )
        found = launched(plan, facts, plan.block_bytes, _MOST_WARPS // warps, sizes[0] * prod(on.tiles))
        if found is not None:
            yield found


def _cost(plan: RegisterStationarySchedule, kernel: Kernel, facts: DeviceFacts) -> float:
    """Estimated cycles of a multiprocessor for a sample: products, results, what is made of tiles, and the time in which a block waits for one."""
    on, columns = plan.on, plan.lines * GROUP
    tiles, sets = prod(on.tiles), ceil(prod(plan.shape) / plan.groups) * plan.groups * prod(on.tiles)
    if plan.groups == 1:  # sets that are no part of the result are left out
        sizes = (axis.size for axis in dimensions(kernel)[2:])
        every = zip(sizes, plan.shape, on.tile, strict=True)
        sets = prod(ceil(size * count / tile) for size, count, tile in every)
    products = sets * plan.steps * (3 if plan.parts > 1 else 1) * max(columns * _COLUMN, _PRODUCT)
    beside = sets * columns * NEIGHBOURS * ROWS * _RESULT + tiles * plan.channels * on.elements * _PACKED
    hidden = _HIDDEN if plan.resident > 1 else 1.0
    shares = dimensions(kernel)[0].size * tiles * plan.channel_blocks / (facts.multiprocessors * plan.resident)
    waiting = ceil(shares) / shares * (_ALONE if plan.resident * plan.groups == 1 else 1.0)
    return plan.channel_blocks * (products + beside * hidden + tiles * _TILE / plan.resident) * waiting
