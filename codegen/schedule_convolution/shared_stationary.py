"""Convolutions of few input channels: a block keeps all weights of its output channels and whole tiles of the input.

A block holds, in shared memory, the weights of up to 64 output channels, fewer where kernels are large, and a tile of the input with its border, for all
input channels. Where these are in groups, it works on channels of one group. Its warps multiply 16 channels x 8 taps by 8 taps x 8 positions at a time; positions that belong
together lie along the last axis. Blocks stay on the device and take one tile after another, so weights are fetched once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import DEPTH, ROWS, Phase
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule_convolution.tiles import (
    COLUMNS,
    MOST_ROWS,
    WARPS,
    Launch,
    Tiles,
    anchor_of,
    border_of,
    dimensions,
    group_cycles,
    group_registers,
    in_channels,
    launched,
    out_channels,
    pair_of,
    phases_of,
    products_in_words,
    tile_shapes,
    tiles_of,
    written_cycles,
)

SLICE = 8  # taps of one step
_MOST_TOGETHER = 4  # phases, of sums in registers
_BESIDE = 0.35  # of what takes less time is not done while the other is


@dataclass(frozen=True)
class SharedStationarySchedule(Launch):
    """The shape of one launch; see `Launch`.

    Attributes:
        steps: for each phase, the number of slices of 8 taps.
        rows: tiles of 16 output channels that a block works on.
        channels: output channels that it multiplies: these, or 8 where a group has no more and warps multiply together.
        buffers: tiles of the input in shared memory; with two, one is fetched while the other is worked on.
        precision: of the products.
    """

    steps: tuple[int, ...]
    rows: int
    channels: int
    buffers: int
    precision: Precision

    @property
    def block_channels(self) -> int:
        return self.channels

    def work(self) -> str:
        return f"{sum(self.steps)} steps of {SLICE} taps, {products_in_words(self.precision, self.on)}"


def costs(kernel: Kernel, program: Program, facts: DeviceFacts) -> Callable[[SharedStationarySchedule], float]:
    """See `Way.costs`."""
    return lambda plan: _cost(kernel, program, plan)


def fitting(kernel: Kernel, program: Program, facts: DeviceFacts) -> Iterator[SharedStationarySchedule]:
    """Every schedule that fits a multiprocessor.

    Where the weights of as many output channels as registers have sums for do not fit, a block has fewer of them, if windows overlap, so
    that they are no matrix as they lie, and the input's channels are so few that streamed slices of `DEPTH` would be zeros for the most part.
    """
    phases = phases_of(kernel, program)
    border = border_of(phases, len(dimensions(kernel)) - 2)
    channels = in_channels(kernel, program)
    shapes = [*itertools.product(tile_shapes(len(dimensions(kernel)) - 2, WARPS * COLUMNS), _pairs(kernel), (2, 1))]
    tiles = [tiles_of(kernel, program, phases, border, tile, channels, pair) for tile, pair, _ in shapes]
    anchor = anchor_of(kernel)
    overlap = any(size > step for size, step in zip(program.buffer(anchor.weight).shape[2:], anchor.step, strict=True))
    for most in (MOST_ROWS, *((2, 1) if overlap and channels <= DEPTH // 2 else ())):
        candidates = (
            _candidate(kernel, facts, channels, on, buffers, most)
            for on, (_, _, buffers) in zip(tiles, shapes, strict=True)
        )
        found = [plan for plan in candidates if plan is not None]
        if found:
            return iter(found)
    return iter(())


def _pairs(kernel: Kernel) -> tuple[int, ...]:
    """What `Tiles.pair` may be: sectors are stored whole where neighbouring results come together."""
    spread = anchor_of(kernel).spread[-1]
    return (spread, 1) if 2 < spread <= min(_MOST_TOGETHER, dimensions(kernel)[-1].size) else (pair_of(kernel),)


def _candidate(
    kernel: Kernel, facts: DeviceFacts, channels: int, on: Tiles, buffers: int, most: int
) -> SharedStationarySchedule | None:
    """The schedule for `on`, with sums of at most `most` times 16 channels in a thread's registers."""
    samples, anchor, outs = dimensions(kernel)[0].size, anchor_of(kernel), out_channels(kernel)
    steps = tuple(ceil(len(phase.taps) * channels / SLICE) for phase in on.phases)
    kept = 1 if anchor.pooled is None else 2  # sums of a phase, and what was pooled of others
    rows = min(ceil(outs / ROWS), most // (on.pair * kept))
    if not rows:
        return None
    together = ROWS // 2 if anchor.warps > 1 and outs <= ROWS // 2 else ROWS * rows
    weights = sum(steps) * SLICE * (together * max(anchor.parts, 1) + 1)  # with their taps
    shared = 4 * (weights + on.staged_floats + buffers * channels * on.pitch)
    channel_blocks = anchor.groups * ceil(outs / (ROWS * rows))
    if kernel.reduction_loops and channel_blocks > 1:
        return None  # a thread reduces what its block has
    plan = SharedStationarySchedule(
        on=on,
        steps=steps,
        rows=rows,
        channels=together,
        buffers=buffers,
        precision=anchor.precision,
        channel_blocks=channel_blocks,
    )
    most_resident = _most_resident(on, rows, kept, anchor.precision)
    return launched(plan, facts, shared, most_resident, samples * prod(on.tiles))


def _most_resident(on: Tiles, rows: int, kept: int, precision: Precision) -> int:
    """Blocks for which a multiprocessor has registers, if a thread has so many sums of each result."""
    if on.warps == 1:
        return 3 if rows * on.pair * kept == 1 else 2
    registers = group_registers(on, rows, 1, precision) + ROWS * rows * on.pair * (kept - 1)
    return 3 if registers <= 72 else 2 if registers <= 128 else 1


def _cost(kernel: Kernel, program: Program, plan: SharedStationarySchedule) -> float:
    """Estimated cycles of a multiprocessor for a sample: multiplications and what is loaded for them, beside what is written; it
    wants two blocks.
    """
    on = plan.on
    waiting = {(2, 1): 1.15, (2, 2): 1.0, (1, 1): 1.6, (1, 2): 1.3}[min(plan.resident, 2), plan.buffers]
    narrow = 1.0 if on.tile[-1] >= 32 else 1.1  # a warp's stores of one row are not all neighbours
    slices = prod(on.tile) / 64 * sum(plan.steps) * group_cycles(plan.channels, plan.precision)
    computed = slices + 4 * on.pitch * group_cycles(64, plan.precision) / (64 * SLICE)
    written = written_cycles(kernel, program, on, plan.channels)
    tile = max(computed, written) + _BESIDE * min(computed, written)
    return plan.channel_blocks * prod(on.tiles) * tile * waiting * narrow


@dataclass(frozen=True)
class Place:
    """A place of the weights: input channel of a group, phase, number of its tap, and how often the weight is halved there.

    What fills a slice up shares the last weight with it. Were it zero, its product with what is not finite would be NaN.
    """

    channel: int
    phase: Phase
    tap: int
    halved: int = 0


def places_of_weights(plan: SharedStationarySchedule, channels: int) -> list[Place]:
    """The places of the weights in order; the powers of two of those that share a weight sum up to one."""
    places: list[Place] = []
    for phase, steps in zip(plan.on.phases, plan.steps, strict=True):
        real = [Place(channel, phase, tap) for tap in range(len(phase.taps)) for channel in range(channels)]
        filling = steps * SLICE - len(real)
        if filling:
            last = real.pop()
            real += [replace(last, halved=number) for number in (*range(1, filling + 1), filling)]
        places += real
    return places


def first_steps(steps: Sequence[int]) -> list[int]:
    """Where each phase's slices begin, and where the last ends."""
    return [0, *itertools.accumulate(steps)]
