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
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule_convolution.tiles import (
    COLUMNS,
    GROUP,
    MOST_ROWS,
    SECTOR,
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
SHARE = COLUMNS * GROUP  # positions of a warp at once

_MOST_SETS = 4
_LAID_OUT, _STORED = 3.5, 1.25  # cycles for a result, by five: of a team alone, of all teams
_BUSY = 1.15  # times as long as they should, products take
_LATENCY = 1500  # cycles until copies arrive
_LARGE_TEAMS = 3  # for which threads have registers for all of these sums
_TEAMS = 4, 3, 2  # groups of four warps of a block, where each has tiles of its own
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
        origins: for each part of the phases, as large as each other, that blocks of their own work on, `Tiles.origin`.
        rows: tiles of 16 output channels that a block works on.
        teams: groups of four warps that take tiles of their own, so that one multiplies while another stores; or 1, for all warps.
        parts: halves that stand for a number; there are as many columns for an output channel.
        buffers: tiles of the input in shared memory; with two, one is fetched while the other is worked on.
        channel_blocks: blocks that work on a tile: one for each part of the output channels and of the phases.
        blocks, resident, shared_bytes: as those of `ResidentSchedule`.
    """

    on: Tiles
    run: int
    layers: int
    slices: tuple[int, ...]
    origins: tuple[tuple[int, ...], ...]
    rows: int
    teams: int
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
    def phase_blocks(self) -> int:
        """Parts of the phases."""
        return len(self.origins)

    @property
    def origins_vary(self) -> bool:
        """Whether a block's tiles begin elsewhere than another's."""
        return len({*self.origins}) > 1

    @property
    def part(self) -> int:
        """Phases of a part."""
        return len(self.on.phases) // self.phase_blocks

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
        """Times that its warps go over a tile."""
        return prod(self.on.tile) // (SHARE * self.tile_warps)

    @property
    def tile_warps(self) -> int:
        """Warps that work on a tile."""
        return self.on.block_warps // self.teams

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
    phases, axes = phases_of(kernel, program), len(dimensions(kernel)) - 2
    shares = list(itertools.product((2, 1), _rows(kernel, program)))
    candidates = (
        _candidate(kernel, program, facts, on, origins, teams, *share)
        for teams in _teams(kernel, program)
        for tile in _tile_shapes(axes, teams)
        for on, origins in (_tiles(kernel, program, phases, tile, parts) for parts in _phase_blocks(kernel))
        for share in shares
    )
    fitting = [(_cost(plan, facts), number, plan) for number, plan in enumerate(candidates) if plan is not None]
    return min(fitting)[2] if fitting else None


def _is_few(kernel: Kernel, program: Program) -> bool:
    """Whether a kernel's convolution has few input channels: then two blocks share a multiprocessor."""
    anchor = anchor_of(kernel)
    return few_halves(program.buffer(anchor.source).shape[1], anchor.step)


def _teams(kernel: Kernel, program: Program) -> tuple[int, ...]:
    return (1,) if _is_few(kernel, program) else _TEAMS


def _tile_shapes(axes: int, teams: int) -> Iterator[tuple[int, ...]]:
    """Whole sets of positions, in planes of which each has whole numbers of blocks that are multiplied together."""
    least = SHARE * (WARPS if teams == 1 else 4)
    powers = [1 << n for n in range((_MOST_SETS * least).bit_length())]
    for shape in itertools.product(powers, repeat=axes):
        if (
            least <= prod(shape) <= _MOST_SETS * least
            and shape[-1] >= BLOCK
            and prod(shape[-2:]) % (TOGETHER * BLOCK) == 0
        ):
            yield shape


def _rows(kernel: Kernel, program: Program) -> list[int]:
    """How many times 16 output channels a block may work on; all of them where it reduces over these.

    Where two blocks share a multiprocessor, a thread has half of the registers for its sums.
    """
    anchor = anchor_of(kernel)
    every = ceil(dimensions(kernel)[1].size / ROWS)
    if kernel.sweeps:
        return [every]
    room = _MOST_SUMS // (ROWS * anchor.parts * pair_of(kernel))
    most = min(every, MOST_ROWS) if kernel.partials else every
    return sorted(
        {max(min(most, each), 1) for each in ((room // 2,) if _is_few(kernel, program) else (room // 2, room))}
    )


def _phase_blocks(kernel: Kernel) -> list[int]:
    """Into how many parts the phases may fall: whole pairs, and along an axis all phases or one."""
    if kernel.partials is not None:
        return [1]
    pairs = zip(anchor_of(kernel).spread, (axis.size for axis in dimensions(kernel)[2:]), strict=True)
    *outer, _ = map(min, pairs)
    return sorted(set(itertools.accumulate([1, *outer], operator.mul)))


def _tiles(
    kernel: Kernel, program: Program, phases: tuple[Phase, ...], tile: tuple[int, ...], parts: int
) -> tuple[Tiles, tuple[tuple[int, ...], ...]]:
    """The positions in tiles of a shape, each with the places of its blocks, and the origins for parts of the phases."""
    each = len(phases) // parts
    borders = [border_of(phases[at : at + each], len(tile)) for at in range(0, len(phases), each)]
    widest = [max(high - low for low, high in along) for along in zip(*borders, strict=True)]
    channels = program.buffer(anchor_of(kernel).source).shape[1]
    extent = [size + width for size, width in zip(tile, widest, strict=True)]
    extent[-1] = tile[-1] // BLOCK * (BLOCK + widest[-1])
    on = tiles_of(kernel, program, phases, borders[0], tile, channels)
    origins = tuple(tuple(low for low, _ in border) for border in borders)
    return _overlapping(kernel, program, replace(on, extent=tuple(extent), origin=origins[0], vector=1)), origins


def _overlapping(kernel: Kernel, program: Program, on: Tiles) -> Tiles:
    """The same tiles, overlapping by a sector of the results where theirs begin anywhere: two blocks that write to one at different times
    cost more than what is computed twice.
    """
    spread, size = anchor_of(kernel).spread[-1], dimensions(kernel)[-1].size
    if on.tiles[-1] == 1 or spread != on.pair or not _begin_anywhere(kernel, program):
        return on
    pace = on.tile[-1] - SECTOR // DType.F32.nbytes // spread
    tiles = 1 + ceil((ceil(size / spread) - on.tile[-1]) / pace)
    return replace(on, pace=pace, tiles=(*on.tiles[:-1], tiles))


def _begin_anywhere(kernel: Kernel, program: Program) -> bool:
    """Whether all that is stored are rows of float32 numbers along the last axis, which begin at any place in a sector."""
    *others, last = dimensions(kernel)
    for store in (*kernel.row_stores, *kernel.stores):
        nbytes = program.buffer(store.buffer).dtype.nbytes
        if nbytes != DType.F32.nbytes or store.index.stride(last) != 1:
            return False
        strides = [store.index.stride(axis) for axis in others if axis.size > 1]
        if all(stride is not None and stride * nbytes % SECTOR == 0 for stride in strides):
            return False
    return True


def _candidate(
    kernel: Kernel,
    program: Program,
    facts: DeviceFacts,
    on: Tiles,
    origins: tuple[tuple[int, ...], ...],
    teams: int,
    buffers: int,
    rows: int,
) -> PlacesSchedule | None:
    sizes, anchor = [axis.size for axis in dimensions(kernel)], anchor_of(kernel)
    if teams > 1:
        on = replace(on, block_warps=4 * teams, state_floats=on.state_floats * 4 * teams // WARPS)
    parts = anchor.parts
    layers = prod(halves_of_place(program.buffer(anchor.source).shape[1], parts)) // HALVES
    sums = ROWS * rows * parts * on.pair
    channel_blocks = ceil(sizes[1] / (ROWS * rows)) * len(origins)
    slices = tuple(max(ceil(len(phase.taps) * layers / 2), 1) for phase in on.phases)
    each = len(slices) // len(origins)
    if len({sum(slices[at : at + each]) for at in range(0, len(slices), each)}) > 1:
        return None
    if sums > (_MOST_SUMS if teams <= _LARGE_TEAMS else _MOST_SUMS // 2) or ROWS * rows * parts > _MOST_SUMS:
        return None
    plan = PlacesSchedule(
        on=on,
        run=on.extent[-1] // (on.tile[-1] // BLOCK),
        layers=layers,
        slices=slices,
        origins=origins,
        rows=rows,
        teams=teams,
        parts=parts,
        buffers=buffers,
        channel_blocks=channel_blocks,
        blocks=0,
        resident=0,
        shared_bytes=0,
    )
    shared = plan.weight_bytes + 4 * on.staged_floats + teams * buffers * plan.tile_bytes
    if shared > facts.shared_bytes_per_block:
        return None
    resident = max(min(facts.shared_bytes_per_block // shared, _most_resident(plan, anchor.precision)), 1)
    tiles = sizes[0] * prod(on.tiles)
    if kernel.partials and tiles < teams:  # each has a piece
        return None
    each = max(min(tiles // teams, resident * facts.multiprocessors // channel_blocks), 1)
    return replace(plan, blocks=each * channel_blocks, resident=resident, shared_bytes=shared)


def _most_resident(plan: PlacesSchedule, precision: Precision) -> int:
    """Blocks for which a multiprocessor has registers: for the sums, those of a chain, and a few besides."""
    if plan.teams > 1:
        return 1
    chain = plan.columns if precision is Precision.FLOAT32 else 0
    return 2 if plan.columns * plan.on.pair + chain <= 96 else 1


def _cost(plan: PlacesSchedule, facts: DeviceFacts) -> float:
    """Estimated cycles of a multiprocessor for a sample: products as fast as shared memory feeds them, and what surrounds them."""
    on = plan.on
    positions = prod(on.tile)
    products = sum(plan.slices) // plan.phase_blocks * 2 * (positions // 128) * (2048 + _STEP * plan.columns) / 128
    fetched = plan.tile_bytes / 20  # bytes a cycle from the second-level cache
    results = positions * len(on.phases) // plan.phase_blocks * ROWS * plan.rows * 0.2
    if plan.teams > 1:  # whatever takes longest, of all teams together or of one alone
        alone = products + results * _LAID_OUT + (fetched + _LATENCY if plan.buffers == 1 else 0)
        found = max(alone / plan.teams, products * _BUSY, fetched, results * _STORED)
        return plan.channel_blocks * prod(on.tiles) * found
    waiting = {(2, 1): 1.15, (2, 2): 1.0, (1, 1): 1.6, (1, 2): 1.3}[plan.resident, plan.buffers]
    # Whole rows of the result by one block fill the lines of the second-level cache.
    pieces = 1 + 0.5 * 32 / on.tile[-1] if on.tiles[-1] > 1 else 1
    return plan.channel_blocks * prod(on.tiles) * (products + fetched + results * pieces) * waiting


def places_of(plan: PlacesSchedule, offset: tuple[int, ...], part: int = 0) -> int:
    """From a position's place to that of the tap at `offset`, of a phase of that part."""
    place = 0
    for at, origin, extent in zip(offset, plan.origins[part], plan.on.extent, strict=True):
        place = place * extent + at - origin
    return place


def padded_places(plan: PlacesSchedule) -> list[list[tuple[int, Phase | None, int, int]]]:
    """For each phase its places in order: (place from a position's, phase or None where nothing is, tap number, layer).

    They ascend, because the second of a product lies behind the first; what fills a product up lies where the last one does.
    """
    found = []
    for at, (phase, slices) in enumerate(zip(plan.on.phases, plan.slices, strict=True)):
        real: list[tuple[int, Phase | None, int, int]] = sorted(
            (
                (layer * plan.layer_places + places_of(plan, tap.offset, at // plan.part), phase, number, layer)
                for number, tap in enumerate(phase.taps)
                for layer in range(plan.layers)
            ),
            key=lambda each: each[0],
        )
        last = real[-1][0] if real else 0
        found.append([*real, *[(last, None, 0, 0)] * (2 * slices - len(real))])
    return found
