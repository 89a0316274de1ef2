"""Convolutions by scaled halves that lie in shared memory for all kernel positions: tensor cores take both operands from there.

A block holds the weights of its output channels and a tile of the input with its border, packed: a *place* is 16 bytes, 8 halves
of one position. Where a place has not all of a position's halves, there is a *layer* of places for each 8. Four warps multiply 64
positions at a time by two places of each, which lie a fixed distance apart: two taps, or two layers of one. Positions that
are multiplied together are blocks of 16 neighbours, each with the border to its right, so that from one to the next it is as far
everywhere in a plane of the tile.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import HALVES, ROWS, Phase, few_halves, halves_of_place
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule_convolution.tiles import (
    COLUMNS,
    GROUP,
    MOST_ROWS,
    WARPS,
    Tiles,
    anchor_of,
    border_of,
    dimensions,
    pair_of,
    phases_of,
    tiles_of,
)

BLOCK = 16  # neighbouring positions that lie in one piece
TOGETHER = 8  # such blocks that four warps multiply at once, 64 positions and 64 more
SET = WARPS * COLUMNS * GROUP  # positions that all warps of a block multiply at once

_MOST_SETS = 4
_MOST_SUMS = 128  # registers of a thread
_STEP = 32  # bytes of a row of shared memory, of each operand, that a product takes


@dataclass(frozen=True)
class PlacesSchedule:
    """The shape of one launch.

    Attributes:
        on: the positions in tiles; `Tiles.extent` counts places, those of the borders of all blocks among them.
        run: places from one block of positions to the next.
        layers: places of each position.
        slices: for each phase, the number of products of two places each.
        phase_blocks: parts of the phases, as large as each other, that blocks of their own work on.
        rows: tiles of 16 output channels that a block works on.
        parts: halves that stand for a number; there are as many columns for an output channel.
        buffers: tiles of the input in shared memory; with two, one is fetched while the other is worked on.
        channel_blocks: blocks that work on a tile: one for each part of the output channels and of the phases.
        blocks, resident, shared_bytes: as those of `ResidentSchedule`.
    """

    on: Tiles
    run: int
    layers: int
    slices: tuple[int, ...]
    phase_blocks: int
    rows: int
    parts: int
    buffers: int
    channel_blocks: int
    blocks: int
    resident: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        return self.on.threads

    @property
    def covered(self) -> int:
        """Output channels that all blocks together work on."""
        return ROWS * self.rows * (self.channel_blocks // self.phase_blocks)

    @property
    def columns(self) -> int:
        """Columns of a product: for each output channel the low parts' sum, then the high parts'; or one."""
        return ROWS * self.rows * self.parts

    @property
    def sets(self) -> int:
        """Times that a block's warps go over a tile."""
        return prod(self.on.tile) // SET

    @property
    def weight_bytes(self) -> int:
        return sum(self.slices) // self.phase_blocks * self.columns * _STEP

    @property
    def layer_places(self) -> int:
        """Places from one layer to the next: an odd number, so that the halves of a position, copied together, lie in all banks."""
        return self.on.elements if self.layers == 1 else self.on.elements | 1

    @property
    def tile_bytes(self) -> int:
        return 2 * HALVES * self.layers * self.layer_places

    def __str__(self) -> str:
        tile = " x ".join(map(str, self.on.tile))
        channels = f"{ROWS * self.rows} channels x {tile} positions"
        parts = f" in {self.phase_blocks} parts" if self.phase_blocks > 1 else ""
        phases = f", {len(self.on.phases)} phases{parts}" if len(self.on.phases) > 1 else ""
        products = "halves x 3" if self.parts > 1 else "halves"
        return f"{self.blocks} blocks, {channels}{phases}, {sum(self.slices)} products of two places, {products}"


def places_schedule(kernel: Kernel, program: Program, facts: DeviceFacts) -> PlacesSchedule | None:
    """The schedule with the least estimated time that fits a multiprocessor; None where none fits."""
    phases = phases_of(kernel, program)
    shares = list(itertools.product((2, 1), _rows(kernel, program), _phase_blocks(kernel)))
    candidates = (
        _candidate(kernel, program, facts, on, *share)
        for on in (_tiles(kernel, program, phases, tile) for tile in _tile_shapes(len(dimensions(kernel)) - 2))
        for share in shares
    )
    fitting = [(_cost(plan, facts), number, plan) for number, plan in enumerate(candidates) if plan is not None]
    return min(fitting)[2] if fitting else None


def _tile_shapes(axes: int) -> Iterator[tuple[int, ...]]:
    """Whole sets of positions, in planes of which each has whole numbers of blocks that are multiplied together."""
    powers = [1 << n for n in range((_MOST_SETS * SET).bit_length())]
    for shape in itertools.product(powers, repeat=axes):
        if SET <= prod(shape) <= _MOST_SETS * SET and shape[-1] >= BLOCK and prod(shape[-2:]) % (TOGETHER * BLOCK) == 0:
            yield shape


def _rows(kernel: Kernel, program: Program) -> list[int]:
    """How many times 16 output channels a block may work on; all of them where it reduces over these.

    With few input channels two blocks share a multiprocessor, which leaves a thread half of the registers for its sums.
    """
    anchor = anchor_of(kernel)
    every = ceil(dimensions(kernel)[1].size / ROWS)
    if kernel.sweeps:
        return [every]
    few = few_halves(program.buffer(anchor.source).shape[1], anchor.step)
    room = _MOST_SUMS // (ROWS * anchor.parts * pair_of(kernel))
    most = min(every, MOST_ROWS) if kernel.partials else every
    return sorted({max(min(most, each), 1) for each in ((room // 2,) if few else (room // 2, room))})


def _phase_blocks(kernel: Kernel) -> list[int]:
    """Into how many parts the phases may fall: whole pairs, and along an axis all phases or one."""
    if kernel.partials is not None:
        return [1]
    pairs = zip(anchor_of(kernel).spread, (axis.size for axis in dimensions(kernel)[2:]), strict=True)
    *outer, _ = map(min, pairs)
    return sorted(set(itertools.accumulate([1, *outer], operator.mul)))


def _tiles(kernel: Kernel, program: Program, phases: tuple[Phase, ...], tile: tuple[int, ...]) -> Tiles:
    """The positions in tiles of a shape, each with the places of its blocks."""
    border = border_of(phases, len(tile))
    channels = program.buffer(anchor_of(kernel).source).shape[1]
    extent = [size + high - low for size, (low, high) in zip(tile, border, strict=True)]
    extent[-1] = tile[-1] // BLOCK * (BLOCK + border[-1][1] - border[-1][0])
    on = tiles_of(kernel, program, phases, border, tile, channels)
    return replace(on, extent=tuple(extent), origin=tuple(low for low, _ in border), vector=1)


def _candidate(
    kernel: Kernel, program: Program, facts: DeviceFacts, on: Tiles, buffers: int, rows: int, phase_blocks: int
) -> PlacesSchedule | None:
    sizes, anchor = [axis.size for axis in dimensions(kernel)], anchor_of(kernel)
    parts = anchor.parts
    layers = prod(halves_of_place(program.buffer(anchor.source).shape[1], parts)) // HALVES
    sums = ROWS * rows * parts * on.pair
    channel_blocks = ceil(sizes[1] / (ROWS * rows)) * phase_blocks
    slices = tuple(max(ceil(len(phase.taps) * layers / 2), 1) for phase in on.phases)
    each = len(slices) // phase_blocks
    if len({sum(slices[at : at + each]) for at in range(0, len(slices), each)}) > 1:
        return None
    if sums > _MOST_SUMS or ROWS * rows * parts > _MOST_SUMS:
        return None
    plan = PlacesSchedule(
        on=on,
        run=on.extent[-1] // (on.tile[-1] // BLOCK),
        layers=layers,
        slices=slices,
        phase_blocks=phase_blocks,
        rows=rows,
        parts=parts,
        buffers=buffers,
        channel_blocks=channel_blocks,
        blocks=0,
        resident=0,
        shared_bytes=0,
    )
    shared = plan.weight_bytes + 4 * on.staged_floats + buffers * plan.tile_bytes
    if shared > facts.shared_bytes_per_block:
        return None
    resident = max(min(facts.shared_bytes_per_block // shared, _most_resident(plan, anchor.precision)), 1)
    each = max(min(sizes[0] * prod(on.tiles), resident * facts.multiprocessors // channel_blocks), 1)
    return replace(plan, blocks=each * channel_blocks, resident=resident, shared_bytes=shared)


def _most_resident(plan: PlacesSchedule, precision: Precision) -> int:
    """Blocks for which a multiprocessor has registers: for the sums, those of a chain, and a few besides."""
    chain = plan.columns if precision is Precision.FLOAT32 else 0
    return 2 if plan.columns * plan.on.pair + chain <= 96 else 1


def _cost(plan: PlacesSchedule, facts: DeviceFacts) -> float:
    """Estimated cycles of a multiprocessor for a sample: products as fast as shared memory feeds them, and what surrounds them."""
    on = plan.on
    positions = prod(on.tile)
    products = sum(plan.slices) // plan.phase_blocks * 2 * (positions // 128) * (2048 + _STEP * plan.columns) / 128
    fetched = plan.tile_bytes / 20  # bytes a cycle from the second-level cache
    results = positions * len(on.phases) // plan.phase_blocks * ROWS * plan.rows * 0.2
    waiting = {(2, 1): 1.15, (2, 2): 1.0, (1, 1): 1.6, (1, 2): 1.3}[plan.resident, plan.buffers]
    # Whole rows of the result by one block fill the lines of the second-level cache.
    pieces = 1 + 0.5 * 32 / on.tile[-1] if on.tiles[-1] > 1 else 1
    return plan.channel_blocks * prod(on.tiles) * (products + fetched + results * pieces) * waiting


def places_of(plan: PlacesSchedule, offset: tuple[int, ...]) -> int:
    """From a position's place to that of the tap at `offset`."""
    place = 0
    for at, origin, extent in zip(offset, plan.on.origin, plan.on.extent, strict=True):
        place = place * extent + at - origin
    return place


def padded_places(plan: PlacesSchedule) -> list[list[tuple[int, Phase | None, int, int]]]:
    """For each phase its places in order: (place from a position's, phase or None where nothing is, tap number, layer).

    They ascend, because the second of a product lies behind the first; what fills a product up lies where the last one does.
    """
    found = []
    for phase, slices in zip(plan.on.phases, plan.slices, strict=True):
        real: list[tuple[int, Phase | None, int, int]] = sorted(
            (
                (layer * plan.layer_places + places_of(plan, tap.offset), phase, number, layer)
                for number, tap in enumerate(phase.taps)
                for layer in range(plan.layers)
            ),
            key=lambda each: each[0],
        )
        last = real[-1][0] if real else 0
        found.append([*real, *[(last, None, 0, 0)] * (2 * slices - len(real))])
    return found
