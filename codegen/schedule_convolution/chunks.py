"""Convolutions by scaled halves that lie in shared memory for all kernel positions: tensor cores take both operands from there.

A block holds the weights of its output channels and a tile of the input with its border, packed: a *place* is 16 bytes, 8 halves
of one position. Where a place has not all of a position's halves, there is a *layer* of places for each 8. Four warps multiply 64
positions at a time by two places of each, which lie a fixed distance apart: two taps, or two layers of one. Positions that
are multiplied together are blocks of 16 neighbours, each with the border to its right, so that from one to the next it is as far
everywhere in a plane of the tile. Where they are all of one row, they share one border, behind the last.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from fusepass.codegen.ir.convolution import HALVES, ROWS, Phase, parts_apart
from fusepass.codegen.ir.dataflow import Dataflow
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import ReductionResult
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule_convolution.tiles import (
    COLUMNS,
    GROUP,
    SECTOR,
    HalvedLaunch,
    Tiles,
    dimensions,
    unaligned,
)

BLOCK = 16  # neighbouring positions that lie in one piece
TOGETHER = 8  # such blocks that four warps multiply at once, 64 positions and 64 more
SHARE = COLUMNS * GROUP  # positions of a warp at once
_WARPS_TOGETHER = 4  # that multiply together
_ROWS_TOGETHER = 4  # so that they need not wait for each other often
LONGEST_CHAIN = 5  # products in a row where accuracy is wanted: tensor cores round their sums towards zero
STEP = 32  # bytes of a row of shared memory, of each operand, that a product takes
_RESULT = {
    1: 0.28,
    2: 0.23,
    4: 0.2,
}  # cycles of a multiprocessor for a result, by how many are stored at once; the latter two guessed
_FETCHED, _TORN = 0.035, 5.0  # the same for a byte of the input, and a sector of the results that is written in part
_PACKED = 0.1  # of a multiprocessor, for a number of which halves are made; guessed
_WAITING = {4: 1.0, 3: 1.05, 2: 1.15, 1: 1.2}  # times as long, with so many teams


@dataclass(frozen=True)
class ChunkSchedule(HalvedLaunch):
    """The shape of one launch; see `HalvedLaunch`.

    Attributes:
        on: the positions in tiles; `Tiles.extent` counts places, those of the borders of all blocks among them.
        layers: places of each position.
        origins: for each part of the phases, as large as each other, that blocks of their own work on, `Tiles.origin`.
        teams: groups of four warps that take tiles of their own, so that one multiplies while another stores; or 1, for all warps.
        vector: neighbouring results that a thread stores at once.
        buffers: tiles of the input in shared memory; with two, one is fetched while the other is worked on.
        source: where halves are made of tiles in the kernel, how these lie as they are fetched; None where halves are fetched.
    """

    layers: int
    origins: tuple[tuple[int, ...], ...]
    teams: int
    vector: int
    buffers: int
    source: Tiles | None

    @property
    def takers(self) -> int:
        return super().takers * self.teams

    def unaligned(self, kernel: Kernel, program: Program) -> ChunkSchedule:
        return self if self.source is None else replace(self, source=unaligned(self.source, kernel, program))

    @property
    def run(self) -> int:
        """Places from one block of positions to the next."""
        return BLOCK if self.neighbours else self.on.extent[-1] // (self.on.tile[-1] // BLOCK)

    @cached_property
    def slices(self) -> tuple[int, ...]:
        """For each phase, the number of products of two places each."""
        places = [len(phase.taps) * self.layers for phase in self.on.phases]
        if self.by_parts:
            return tuple(count // 2 + max(ceil(count / 4), 1) for count in places)
        return tuple(max(ceil(count / 2), 1) for count in places)

    @property
    def neighbours(self) -> bool:
        """Whether the blocks that are multiplied together are neighbours in a row, whose border then lies behind the last alone."""
        return are_neighbours(self.on.tile)

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
        return super().covered // self.phase_blocks

    @property
    def by_parts(self) -> bool:
        """Whether the parts of numbers have places, and products, of their own: those with low parts come first, then those of high parts.

        All go to the same sums: low parts are what high parts leave of a number, as it is.
        """
        return self.source is not None and parts_apart(self.channels, self.parts)

    @property
    def columns(self) -> int:
        """Columns of a product: for each output channel the low parts' sum, then the high parts'; or one."""
        return ROWS * self.rows * (1 if self.by_parts else self.parts)

    def crossed(self, phase: Phase) -> int:
        """Products of a phase of a high and a low part each, where there are such."""
        return len(phase.taps) * self.layers // 2 if self.by_parts else 0

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
        return self.iterations * self.iteration_bytes

    @property
    def iteration_bytes(self) -> int:
        """Of the weights that an iteration takes."""
        return sum(self.slices) // self.phase_blocks * self.columns * STEP

    @property
    def layer_places(self) -> int:
        """Places from one layer to the next: an odd number, so that the halves of a position, copied together, lie in all banks."""
        return self.on.elements if self.layers == 1 else self.on.elements | 1

    @property
    def tile_bytes(self) -> int:
        return 2 * HALVES * self.layers * self.layer_places

    @property
    def source_bytes(self) -> int:
        """Of a tile as it is fetched, and behind it, for each channel, an exponent, and its largest numbers or the factor of its results."""
        if self.source is None:
            return 0
        found = 1 + self.largest_parts
        return DType.F32.nbytes * (self.channels * (self.source.pitch + found) + 2 * self.block_channels)

    def extent(self) -> str:
        iterations = f"{self.iterations} x " if self.iterations > 1 else ""
        channels = f"{iterations}{ROWS * self.rows} channels x {self.on} positions"
        parts = f" in {self.phase_blocks} parts" if self.phase_blocks > 1 else ""
        return channels + (f", {len(self.on.phases)} phases{parts}" if len(self.on.phases) > 1 else "")

    def work(self) -> str:
        return f"{sum(self.slices)} products of two places, {self.products}"


def are_neighbours(tile: tuple[int, ...]) -> bool:
    """`ChunkSchedule.neighbours` of a tile."""
    return tile[-1] % (TOGETHER * BLOCK) == 0


def has_own_values(kernel: Kernel, plan: ChunkSchedule) -> bool:
    """Whether a kernel `makes_own_values`, and threads compute them where sums are.

    What is only reduced is laid out, if a thread has no more of a tile than four positions of four channels: to merge what it found of
    them takes as long.
    """
    if plan.on.pair > 1 or plan.vector > 1 or (kernel.partials is not None and plan.rows * plan.sets == 1):
        return False
    return makes_own_values(kernel)


def makes_own_values(kernel: Kernel) -> bool:
    """Whether a kernel makes one value of its sums, the same function of those of all positions.

    If it is reduced over positions, the sums themselves may be stored beside it.
    """
    if not kernel.is_pointwise or len(kernel.stores) > 1:
        return False
    value = kernel.stores[0].value if kernel.partials is None else kernel.partials.value
    if any(store.value is not value and not isinstance(store.value, ReductionResult) for store in kernel.stores):
        return False
    return value.dtype is DType.F32 and not Dataflow().needs(value) & {*kernel.rows[2:]}


def warps_of_a_run(kernel: Kernel, plan: ChunkSchedule) -> int:
    """How many warps lay results out side by side, so that one of them stores all that they have of a channel; 1 where each stores its own.

    Ends of what a warp stores at once lie in sectors that others fill at another time. With few channels, waiting for each other costs more.
    """
    many = plan.source is not None and plan.rows >= _ROWS_TOGETHER
    return _WARPS_TOGETHER if many and has_own_values(kernel, plan) and kernel.stores else 1


def keeps_sums(kernel: Kernel, plan: ChunkSchedule) -> bool:
    """Whether nothing of such a kernel's sums is laid out."""
    return not kernel.stores and has_own_values(kernel, plan)


def places_of(plan: ChunkSchedule, offset: tuple[int, ...], part: int = 0) -> int:
    """From a position's place to that of the tap at `offset`, of a phase of that part."""
    place = 0
    for at, origin, extent in zip(offset, plan.origins[part], plan.on.extent, strict=True):
        place = place * extent + at - origin
    return place


def padded_places(plan: ChunkSchedule) -> list[list[tuple[int, Phase | None, int, int]]]:
    """For each phase its places in order: (place from a position's, phase or None where nothing is, tap number, layer of its weights).

    The second of a product lies behind the first; what fills a product up lies where the last one does.
    """
    found = []
    layers, lows = plan.layers, plan.layers // 2  # the first layer of low parts
    for at, (phase, slices) in enumerate(zip(plan.on.phases, plan.slices, strict=True)):
        real = list[tuple[int, Phase | None, int, int]]()
        taps = sorted((places_of(plan, tap.offset, at // plan.part), number) for number, tap in enumerate(phase.taps))
        if plan.by_parts:
            for (place, number), layer in itertools.product(taps, range(lows)):
                real.append((layer * plan.layer_places + place, phase, number, layer + lows))
                real.append(((layer + lows) * plan.layer_places + place, phase, number, layer))
        for layer, (place, number) in itertools.product(range(lows if plan.by_parts else layers), taps):
            real.append((layer * plan.layer_places + place, phase, number, layer))
        last = real[-1][0] if real else 0
        found.append([*real, *[(last, None, 0, 0)] * (2 * slices - len(real))])
    return found


def cost_of_few(kernel: Kernel, plan: ChunkSchedule) -> float:
    """Estimated cycles of a multiprocessor for a sample, with few input channels: products as fast as shared memory feeds them, and what surrounds them."""
    on = plan.on
    positions = prod(on.tile)
    products = sum(plan.slices) // plan.phase_blocks * 2 * (positions // 128) * (2048 + STEP * plan.columns) / 128
    packed = 0.0 if plan.source is None else on.elements * plan.channels * _PACKED
    fetched = (plan.source_bytes or plan.tile_bytes) / 20 + packed  # bytes a cycle from the second-level cache
    results = positions * len(on.phases) // plan.phase_blocks * ROWS * plan.rows * 0.2
    ahead = plan.buffers == 2 or plan.source is not None
    waiting = {(2, False): 1.15, (2, True): 1.0, (1, False): 1.6, (1, True): 1.3}[plan.resident, ahead]
    # Whole rows of the result by one block, or long runs by one warp, fill the lines of the second-level cache.
    together = warps_of_a_run(kernel, plan)
    whole = on.tiles[-1] == 1 or 1 < together <= on.tile[-1] / SHARE
    pieces = 1 if whole else 1 + 0.5 * 32 / on.tile[-1]
    tile = plan.iterations * (products + results * pieces) + fetched
    return plan.channel_blocks * prod(on.tiles) * tile * waiting


def cost_of_many(kernel: Kernel, program: Program, plan: ChunkSchedule) -> float:
    """The same with many input channels, after measurements on an H200: teams of warps hide little of each other's work."""
    on = plan.on
    positions, shares = prod(on.tile), plan.phase_blocks
    products = sum(plan.slices) // shares * positions / 64 * (2048 + STEP * plan.columns) / 128
    rows = ROWS * plan.rows * prod(on.tile[:-1]) * plan.part // on.pair
    together = plan.vector if plan.vector > 1 else 2 - dimensions(kernel)[-1].size % 2
    results = positions * plan.part * ROWS * plan.rows * _RESULT[together]
    fetched = plan.tile_bytes * _FETCHED
    whole = on.tiles[-1] == 1 or on.pace or not begins_anywhere(kernel, program)
    torn = 0.0 if whole else 2 * rows * _TORN
    tile = plan.iterations * (products + results) + fetched
    return plan.channel_blocks * prod(on.tiles) * (tile * _WAITING[plan.teams] + plan.iterations * torn)


def begins_anywhere(kernel: Kernel, program: Program) -> bool:
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
