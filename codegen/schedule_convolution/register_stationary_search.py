"""The schedule of `held` or `sparse` with the least estimated time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import MOST_REGISTER_STATIONARY, ROWS, Phase
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule_convolution.register_stationary import (
    LANES,
    TOGETHER,
    Pair,
    PairsSchedule,
    held_registers,
    place_in,
)
from fusepass.codegen.schedule_convolution.sparse import SparseSchedule, sparse_cost, sparse_schedules
from fusepass.codegen.schedule_convolution.tiles import (
    COLUMNS,
    GROUP,
    MOST_ROWS,
    WARPS,
    Tiles,
    anchor_of,
    border_of,
    dimensions,
    launched,
    phases_of,
    state_floats,
    tiles_of,
    written_cycles,
)

_BLOCK_WARPS = 4, 8
_MOST_REGISTERS = {16: 128, 12: 168, 8: 255}  # of a thread, with which so many warps share a multiprocessor
_BESIDE = 40  # registers for what is neither weights nor sums
_CUTS = 1, 2, 3, 4, 5, 6, 8, 12  # parts that an axis may fall into
_LEAST_POSITIONS, _MOST_POSITIONS = 1024, 8192  # of a tile
_MOST_PATTERNS = 10
_LOOKED_AT = 2  # quarters
_PRODUCT = 7.0  # cycles of a quarter of a multiprocessor for a product
_BESIDE_READS = 0.25  # of the lesser one of what products take and what is read for them
_BESIDE_STORES = 0.35  # of the lesser one of what results take and what storing them does
_RESULT = 0.15  # cycles of a multiprocessor for a result
_PACKED = 0.16  # the same for a number of which halves are made
_FETCHED = 0.05  # the same for a byte of the input
_MEASURED = 1.1  # times what these add up to, of kernels as a whole
_HIDDEN = 0.5  # of what is made of a tile, the part that other blocks' products do not hide
_WAITING = {16: 1.0, 12: 1.0, 8: 1.06, 4: 1.25}  # times as long, with so many warps on a multiprocessor


def register_stationary_schedule(
    kernel: Kernel, program: Program, facts: DeviceFacts
) -> PairsSchedule | SparseSchedule | None:
    """The schedule with the least estimated time that fits a multiprocessor; None where none fits."""
    costs: list[tuple[float, PairsSchedule | SparseSchedule]] = []
    costs += [(_cost(plan, kernel, program, facts), plan) for plan in _fitting(kernel, program, facts)]
    costs += [(sparse_cost(plan, kernel, facts), plan) for plan in sparse_schedules(kernel, program, facts)]
    return min(costs, key=lambda each: each[0])[1] if costs else None


def fits_held(kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
    """Whether there is one; quicker than to find the best."""
    return any(
        True for _ in itertools.chain(_fitting(kernel, program, facts), sparse_schedules(kernel, program, facts))
    )


def _fitting(kernel: Kernel, program: Program, facts: DeviceFacts) -> Iterator[PairsSchedule]:
    anchor, sizes = anchor_of(kernel), [axis.size for axis in dimensions(kernel)]
    channels = program.buffer(anchor.source).shape[1]
    (phase,) = phases_of(kernel, program)
    quarters = _quarters(phase, channels)
    if _pattern_count(quarters) > _MOST_PATTERNS:
        return
    room = facts.shared_bytes_per_block // (DType.F32.nbytes * channels)  # elements of a tile
    reach = [high - low for low, high in border_of((phase,), len(phase.start))]
    for tile in _tile_shapes(sizes[2:]):
        if prod(size + more for size, more in zip(tile, reach, strict=True)) > room:
            continue
        on = _laid_out(kernel, program, phase, tile, quarters)
        for warps, rows in itertools.product(_BLOCK_WARPS, _rows(kernel)):
            plan = _candidate(kernel, facts, on, quarters, warps, rows, channels)
            if plan is not None:
                yield plan


def _tile_shapes(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Tiles that fit evenly along each axis, in whole sets of positions."""
    *outer, last = sizes
    cuts = [sorted({ceil(size / count) for count in _CUTS}) for size in outer]
    widths = sorted({ceil(ceil(last / count) / GROUP) * GROUP for count in _CUTS})
    found = set()
    for tile in itertools.product(*cuts, widths):
        sets = [tile] if prod(tile) % (GROUP * COLUMNS) == 0 else _filled(tile)
        found |= {each for each in sets if prod(each) <= _MOST_POSITIONS}
    least = min(max(map(prod, found), default=0), _LEAST_POSITIONS)
    yield from sorted(each for each in found if prod(each) >= least)


def _filled(tile: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The same tile, a little longer along the last but one axis, or the last, so that it has whole sets."""
    most = GROUP * COLUMNS
    if len(tile) == 1:
        yield (ceil(tile[0] / most) * most,)
        return
    rows = next(rows for rows in itertools.count(tile[-2]) if rows * tile[-1] % most == 0)
    yield (*tile[:-2], rows, tile[-1])


def _rows(kernel: Kernel) -> tuple[int, ...]:
    """How many times 16 output channels a warp may work on; all of them where it reduces over these."""
    every = ceil(dimensions(kernel)[1].size / ROWS)
    return (every,) if kernel.reduction_loops else tuple(range(1, min(every, MOST_ROWS) + 1))


def _laid_out(
    kernel: Kernel,
    program: Program,
    phase: Phase,
    tile: tuple[int, ...],
    quarters: tuple[tuple[Pair, ...], ...],
) -> Tiles:
    """The tiles of a shape; rows of the input are so long that threads meet in few banks."""
    channels = program.buffer(anchor_of(kernel).source).shape[1]
    border = border_of((phase,), len(tile))
    plain = tiles_of(kernel, program, (phase,), border, tile, channels)
    found = []
    for more in range(0, 32, 4) if prod(tile[:-1]) > 1 else (0,):
        last = ceil(plain.extent[-1] / 4) * 4 + more
        on = replace(plain, extent=(*plain.extent[:-1], last))
        on = replace(on, pitch=on.elements + (4 - on.elements) % 8)
        met = sum(_wavefronts([place_in(on, pair) for pair in quarter]) for quarter in quarters[:_LOOKED_AT])
        # A row that is longer by 4 floats costs a part of what is fetched and made halves of.
        found.append((met / min(len(quarters), _LOOKED_AT) + more / 16, more, on))
    return min(found, key=lambda each: each[:2])[-1]


def _pattern_count(quarters: Sequence[Sequence[Pair]]) -> int:
    """How many patterns of places there are, at most."""

    def apart(pair: Pair, first: Pair) -> tuple[int, ...]:
        return (pair.channel - first.channel, *(a - b for a, b in zip(pair.offset, first.offset, strict=True)))

    return len({tuple(apart(pair, quarter[0]) for pair in quarter) for quarter in quarters})


def _wavefronts(places: Sequence[int]) -> int:
    """How often a bank is met where 8 neighbouring words from each of these places on are read."""
    words = {place + column for place in places for column in range(GROUP)}
    banks = [word % 32 for word in words]
    return max(map(banks.count, set(banks)))


def _quarters(phase: Phase, channels: int) -> tuple[tuple[Pair, ...], ...]:
    """All pairs."""
    pairs = []
    for number, tap in enumerate(phase.taps):
        for channel in range(0, channels, 2):
            second = (number, channel + 1) if channel + 1 < channels else None
            pairs.append(Pair(channel, tap.offset, (number, channel), second))
    quarters = [pairs[at : at + LANES] for at in range(0, len(pairs), LANES)]
    whole: list[tuple[Pair, ...]] = []
    for quarter in [*quarters, *([[quarters[-1][0]]] if len(quarters) % 2 else [])]:
        real = quarter if len(whole) < len(quarters) else []
        filling = replace(quarter[0], first=None, second=None)
        whole.append((*real, *[filling] * (LANES - len(real))))
    return tuple(whole)


def _candidate(
    kernel: Kernel,
    facts: DeviceFacts,
    on: Tiles,
    quarters: tuple[tuple[Pair, ...], ...],
    warps: int,
    rows: int,
    channels: int,
) -> PairsSchedule | None:
    sizes, anchor = [axis.size for axis in dimensions(kernel)], anchor_of(kernel)
    every = ceil(sizes[1] / (ROWS * rows))
    iterations = min(every, MOST_ROWS // rows) if kernel.partials else every
    on = replace(on, block_warps=warps, state_floats=state_floats(kernel, rows * iterations) * warps // WARPS)
    plan = PairsSchedule(
        on=on,
        quarters=quarters,
        rows=rows,
        iterations=iterations,
        parts=anchor.parts,
        channels=channels,
        sizes=tuple(sizes[2:]),
        channel_blocks=ceil(every / iterations),
    )
    fitting = _fitting_warps(plan)
    if held_registers(plan) > MOST_REGISTER_STATIONARY or fitting < warps:
        return None
    return launched(plan, facts, shared_bytes(plan), fitting // warps, sizes[0] * prod(on.tiles))


def shared_bytes(plan: PairsSchedule) -> int:
    """Of a block. Weights lie in the place of a tile until threads have them, if they stay there."""
    weights = plan.kept_bytes
    tile = max(plan.tile_bytes, 0 if weights else plan.iteration_bytes)
    return weights + 4 * plan.room_floats + plan.found_bytes + tile


def _fitting_warps(plan: PairsSchedule) -> int:
    """Warps for which a multiprocessor has registers: for weights, sums of 32 positions, those in the tensor core, and words of the groups
    that are multiplied at once.
    """
    sums = 4 * plan.rows * (COLUMNS + TOGETHER * (2 if plan.parts > 1 else 1))
    registers = held_registers(plan) + sums + TOGETHER * 4 * plan.parts + _BESIDE
    return max((warps for warps, most in _MOST_REGISTERS.items() if registers <= most), default=0)


def _cost(plan: PairsSchedule, kernel: Kernel, program: Program, facts: DeviceFacts) -> float:
    """Estimated cycles of a multiprocessor for a sample: products, the results of warps, what is stored, and what is made of a tile.

    Where several blocks share it, one makes halves of its tile while others multiply.
    """
    on = plan.on
    inside = [ceil(size / count) for size, count in zip(plan.sizes, on.tiles, strict=True)]
    rows = prod(inside[:-1]) * ceil(min(on.tile[-1], inside[-1]) / GROUP) / COLUMNS
    sets = ceil(rows / on.block_warps) * on.block_warps
    products = plan.steps * plan.rows * COLUMNS * (3 if plan.parts > 1 else 1)
    multiplied, read = products * _PRODUCT / 4, plan.steps * plan.parts * 8
    each = max(multiplied, read) + _BESIDE_READS * min(multiplied, read)
    each += GROUP * COLUMNS * ROWS * plan.rows * _RESULT
    packed = plan.channels * on.elements * (_PACKED + 4 * _FETCHED) * (1.0 if plan.resident == 1 else _HIDDEN)
    shares = dimensions(kernel)[0].size * prod(on.tiles) * plan.channel_blocks / (facts.multiprocessors * plan.resident)
    waiting = _WAITING[min(plan.resident * on.block_warps, 16)] * ceil(shares) / shares
    computed = plan.iterations * each * sets * waiting
    written = written_cycles(kernel, program, on, plan.block_channels)
    tile = max(computed, written) + _BESIDE_STORES * min(computed, written) + packed
    return plan.channel_blocks * prod(on.tiles) * tile * _MEASURED
