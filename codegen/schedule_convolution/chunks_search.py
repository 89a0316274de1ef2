"""The schedules of `chunks`, and how long they take by estimate."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import HALVES, ROWS, Phase, ScaledWeights, few_halves, halves_of_place, parts_apart
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program, Store
from fusepass.codegen.ir.vectors import ACCESS, is_vector, split_index
from fusepass.codegen.schedule_convolution.chunks import (
    BLOCK,
    LONGEST_CHAIN,
    SHARE,
    TOGETHER,
    ChunkSchedule,
    are_neighbours,
    begins_anywhere,
    cost_of_few,
    cost_of_many,
)
from fusepass.codegen.schedule_convolution.tiles import (
    MOST_ROWS,
    SECTOR,
    WARPS,
    Tiles,
    anchor_of,
    border_of,
    dimensions,
    launched,
    pair_of,
    phases_of,
    source_tiles,
    state_floats,
    tiles_of,
)

_NEIGHBOURS = 4
_MOST_SETS = 4
_MOST_ITERATIONS = 4
_LARGE_TEAMS = 3  # for which threads have registers for all of these sums
_TEAMS = 4, 3, 2, 1  # groups of four warps of a block, where each has tiles of its own
_MOST_SUMS = 128  # registers of a thread


def costs(kernel: Kernel, program: Program, facts: DeviceFacts) -> Callable[[ChunkSchedule], float]:
    """See `Way.costs`."""
    few = _is_few(kernel, program)
    return lambda plan: cost_of_few(kernel, plan) if few else cost_of_many(kernel, program, plan)


def estimated_seconds(kernel: Kernel, program: Program, plan: ChunkSchedule, facts: DeviceFacts) -> float:
    """The estimated time of a kernel with few input channels."""
    samples = program.buffer(anchor_of(kernel).source).shape[0]
    return cost_of_few(kernel, plan) * samples / facts.multiprocessors / facts.machine.rates.product_clock


def fitting(kernel: Kernel, program: Program, facts: DeviceFacts) -> Iterator[ChunkSchedule]:
    """Every schedule that fits a multiprocessor."""
    phases, axes = phases_of(kernel, program), len(dimensions(kernel)) - 2
    few, scaling = _is_few(kernel, program), isinstance(anchor_of(kernel).halves, ScaledWeights)
    shares = list(itertools.product((1,) if scaling else (2, 1), _rows(kernel, program)))
    vector = _vector(kernel, program)
    parts = [_Part.of(phases, count) for count in _phase_blocks(kernel)]
    room = facts.shared_bytes_per_block // (2 * HALVES * _layers(kernel, program))  # places of tiles, of one layer
    if _reduces_along(kernel) and not _has_whole_rows(kernel, vector):
        return iter(())
    candidates = (
        _candidate(kernel, program, facts, on, part.origins, teams, vector, iterations, *share)
        for teams in ((1,) if few else _TEAMS)
        for tile in _tile_shapes(axes, teams)
        if tile[-1] == SHARE or not _reduces_along(kernel)
        for part in parts
        if teams * prod(part.extent(tile)) <= room
        for on in [_tiles(kernel, program, phases, tile, part)]
        for share in shares
        for iterations in _iterations(kernel, share[-1])
    )
    return (plan for plan in candidates if plan is not None)


def _reduces_along(kernel: Kernel) -> bool:
    """Whether a kernel reduces along the last axis."""
    return bool(kernel.reduction_loops) and anchor_of(kernel).column > 1


def _has_whole_rows(kernel: Kernel, vector: int) -> bool:
    """Whether a warp has whole rows of the result, and stores what goes along them as vectors."""
    last, spread = dimensions(kernel)[-1].size, anchor_of(kernel).spread[-1]
    positions = ceil(last / spread)
    return spread == pair_of(kernel) and SHARE // 2 < positions <= SHARE and (vector > 1 or not kernel.stores)


def _vector(kernel: Kernel, program: Program) -> int:
    """`ChunkSchedule.vector`: 4 where rows of the results are whole numbers of these, and nothing but results goes along them; else 1.

    Where rows are reduced, what else goes along them is the same for many of them.
    """
    last = dimensions(kernel)[-1]
    if kernel.partials or _is_few(kernel, program) or not (kernel.is_pointwise or _reduces_along(kernel)):
        return 1
    if kernel.is_pointwise and any(load.index.stride(last) != 0 for load in kernel.loads()):
        return 1

    def fits(store: Store) -> bool:
        nbytes = lane.size * program.buffer(store.buffer).dtype.nbytes
        return nbytes <= ACCESS and is_vector(split_index(store.index, last, lane), last, lane)

    whole = anchor_of(kernel).spread[-1] == pair_of(kernel)  # neighbours of a position are neighbours of the next one
    lane = Axis("lane", _NEIGHBOURS)
    fit = whole and last.size % lane.size == 0 and all(fits(store) for store in kernel.stores)
    return lane.size if fit else 1


def _is_few(kernel: Kernel, program: Program) -> bool:
    """Whether a kernel's convolution has few input channels: then two blocks share a multiprocessor."""
    anchor = anchor_of(kernel)
    return few_halves(program.buffer(anchor.source).shape[1], anchor.step)


def _tile_shapes(axes: int, teams: int) -> Iterator[tuple[int, ...]]:
    """Whole sets of positions, in planes of which each has whole numbers of blocks that are multiplied together."""
    least, sets = (SHARE * WARPS, _MOST_SETS) if teams == 1 else (SHARE * 4, _MOST_SETS // 2)
    powers = [1 << n for n in range((sets * least).bit_length())]
    for shape in itertools.product(powers, repeat=axes):
        if least <= prod(shape) <= sets * least and shape[-1] >= BLOCK and prod(shape[-2:]) % (TOGETHER * BLOCK) == 0:
            yield shape


def _rows(kernel: Kernel, program: Program) -> list[int]:
    """How many times 16 output channels a block may work on; all of them where it reduces over these.

    Where two blocks share a multiprocessor, a thread has half of the registers for its sums.
    """
    every = ceil(dimensions(kernel)[1].size / ROWS)
    if kernel.reduction_loops and not _reduces_along(kernel):
        return [every]
    room = _MOST_SUMS // (ROWS * _sums_of_number(kernel, program) * pair_of(kernel))
    most = min(every, MOST_ROWS) if kernel.partials else every
    shares = {room // 2} if _is_few(kernel, program) else {room // 2, room}
    return sorted({max(min(most, each), 1) for each in shares})


def _iterations(kernel: Kernel, rows: int) -> list[int]:
    """How many times a block may take as many channels as it works on at once, so that it fetches a tile once for all of these."""
    every = ceil(dimensions(kernel)[1].size / (ROWS * rows))
    most = MOST_ROWS // rows if kernel.partials else _MOST_ITERATIONS
    if kernel.reduction_loops and not _reduces_along(kernel):
        return [1]
    return list(range(1, min(_MOST_ITERATIONS, every, max(most, 1)) + 1))


def _phase_blocks(kernel: Kernel) -> list[int]:
    """Into how many parts the phases may fall: whole pairs, and along an axis all phases or one."""
    if kernel.partials is not None or isinstance(anchor_of(kernel).halves, ScaledWeights):
        return [1]
    pairs = zip(anchor_of(kernel).spread, (axis.size for axis in dimensions(kernel)[2:]), strict=True)
    *outer, _ = map(min, pairs)
    return sorted(set(itertools.accumulate([1, *outer], operator.mul)))


@dataclass(frozen=True)
class _Part:
    """The phases in parts: `ChunkSchedule.origins`, and how far the border of any part reaches along each axis."""

    origins: tuple[tuple[int, ...], ...]
    reach: tuple[int, ...]

    @staticmethod
    def of(phases: tuple[Phase, ...], count: int) -> _Part:
        each, axes = len(phases) // count, len(phases[0].start)
        borders = [border_of(phases[at : at + each], axes) for at in range(0, len(phases), each)]
        reach = tuple(max(high - low for low, high in along) for along in zip(*borders, strict=True))
        return _Part(tuple(tuple(low for low, _ in border) for border in borders), reach)

    def extent(self, tile: tuple[int, ...]) -> tuple[int, ...]:
        """The places of a tile; where not all blocks that are multiplied together are neighbours, those of all of their borders among them."""
        *outer, last = (size + more for size, more in zip(tile, self.reach, strict=True))
        return (*outer, last if are_neighbours(tile) else tile[-1] // BLOCK * (BLOCK + self.reach[-1]))


def _layers(kernel: Kernel, program: Program) -> int:
    """Places of a position."""
    anchor = anchor_of(kernel)
    return prod(halves_of_place(program.buffer(anchor.source).shape[1], anchor.parts)) // HALVES


def _sums_of_number(kernel: Kernel, program: Program) -> int:
    """Sums for a result: as many as a number has parts, or one where products are `ChunkSchedule.by_parts`."""
    anchor = anchor_of(kernel)
    apart = isinstance(anchor.halves, ScaledWeights) and parts_apart(
        program.buffer(anchor.source).shape[1], anchor.parts
    )
    return 1 if apart else anchor.parts


def _tiles(kernel: Kernel, program: Program, phases: tuple[Phase, ...], tile: tuple[int, ...], part: _Part) -> Tiles:
    """The positions in tiles of a shape, each with the places of its blocks."""
    channels = program.buffer(anchor_of(kernel).source).shape[1]
    on = tiles_of(kernel, program, phases, [(0, 0)] * len(tile), tile, channels)
    on = replace(on, extent=part.extent(tile), origin=part.origins[0], vector=1)
    odd = on.pair > 1 and dimensions(kernel)[-1].size % 2 > 0
    return _overlapping(kernel, program, on) if odd else on


def _overlapping(kernel: Kernel, program: Program, on: Tiles) -> Tiles:
    """The same tiles, overlapping by a sector of the results where theirs begin anywhere: two blocks that write to one at different times
    cost more than what is computed twice.
    """
    spread, size = anchor_of(kernel).spread[-1], dimensions(kernel)[-1].size
    if on.tiles[-1] == 1 or spread != on.pair or not begins_anywhere(kernel, program):
        return on
    pace = on.tile[-1] - SECTOR // DType.F32.nbytes // spread
    tiles = 1 + ceil((ceil(size / spread) - on.tile[-1]) / pace)
    return replace(on, pace=pace, tiles=(*on.tiles[:-1], tiles))


def _candidate(
    kernel: Kernel,
    program: Program,
    facts: DeviceFacts,
    on: Tiles,
    origins: tuple[tuple[int, ...], ...],
    teams: int,
    vector: int,
    iterations: int,
    buffers: int,
    rows: int,
) -> ChunkSchedule | None:
    sizes, anchor = [axis.size for axis in dimensions(kernel)], anchor_of(kernel)
    parts = anchor.parts
    layers = _layers(kernel, program)
    sums = ROWS * rows * _sums_of_number(kernel, program) * on.pair
    if sums > (_MOST_SUMS if teams <= _LARGE_TEAMS else _MOST_SUMS // 2) or sums > _MOST_SUMS * on.pair:
        return None
    channel_blocks = ceil(sizes[1] / (ROWS * rows * iterations)) * len(origins)
    on = replace(
        on, state_floats=state_floats(kernel, rows * iterations)
    )  # iterations may take more channels than there are
    if teams > 1:
        on = replace(on, block_warps=4 * teams, state_floats=on.state_floats * 4 * teams // WARPS)
    plan = ChunkSchedule(
        on=on,
        layers=layers,
        origins=origins,
        rows=rows,
        iterations=iterations,
        teams=teams,
        vector=vector,
        parts=parts,
        buffers=buffers,
        source=source_tiles(kernel, program, on) if isinstance(anchor.halves, ScaledWeights) else None,
        channels=program.buffer(anchor.source).shape[1],
        channel_blocks=channel_blocks,
    )
    each = len(plan.slices) // len(origins)
    if len({sum(plan.slices[at : at + each]) for at in range(0, len(plan.slices), each)}) > 1:
        return None
    shared = plan.weight_bytes + 4 * on.staged_floats + teams * buffers * plan.tile_bytes + plan.source_bytes
    most, tiles = _most_resident(plan, anchor.precision), sizes[0] * prod(on.tiles)
    found = launched(plan, facts, shared, most, tiles // teams)
    if found is None or (kernel.partials and tiles < teams):  # each has a piece
        return None
    # A block for each iteration, or in the room of the weights, hides more than iterations save.
    alone = tiles < found.resident * facts.multiprocessors or (found.resident < most and _is_few(kernel, program))
    return None if iterations > 1 and alone else found


def _most_resident(plan: ChunkSchedule, precision: Precision) -> int:
    """Blocks for which a multiprocessor has registers: for the results of two tiles of positions, and some besides.

    With float32 accuracy, sums of high parts outside of the tensor core and of both in it are those of one tile, of both where they
    are few; see `fp::add_places_exactly`. Where products are `by_parts`, they are one tile's sums in it, if it does not add up all.
    """
    if plan.teams > 1:
        return 1
    each = ROWS * plan.rows // 2
    if plan.by_parts:
        highs = max(count - plan.crossed(phase) for count, phase in zip(plan.slices, plan.on.phases, strict=True))
        beside = each if highs > LONGEST_CHAIN else 0
    else:
        beside = 3 * each * (2 if plan.rows == 1 else 1) if precision is Precision.FLOAT32 else 0
    return 2 if 2 * each * plan.on.pair + beside <= 96 else 1
