"""Convolutions of any number of input channels: input and weights stream through shared memory.

A block works on a tile of positions for up to 128 output channels, of one group where there are several. It goes over the input channels in *chunks*: the input
of a chunk below the tile, border included, lies in shared memory while the weights of its kernel positions come in
*pieces*, several of them under way at any time. A slice of weights is one kernel position of 8 input channels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import DEPTH, ROWS, Phase
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule_convolution.tiles import (
    COLUMNS,
    GROUP,
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
    phases_of,
    products_in_words,
    tile_shapes,
    tiles_of,
    written_cycles,
)

SLICE_FLOATS = ROWS * DEPTH
_MOST_SUMS = 128  # registers of a thread that hold results
_WIDEST = 8  # tiles of 16 channels that four warps multiply at once
_REGISTERS = 256  # of a thread, with a few to spare
_SHARED_SUMS = 64  # at most so many, and two blocks fit a multiprocessor's registers
_MOST_PIECES = 2048  # of a tile: they are listed in constant memory
_ROW_ENDS = 16  # positions
_SHAPES = 4  # tile shapes that are looked at further
_MMA_CYCLES = 6.5  # of one product of a slice by 8 positions, in one of four tensor cores of a multiprocessor
_BYTES_PER_CYCLE = 24.0  # that a multiprocessor gets from the second-level cache while all others do
_STORE_CYCLES = 30.0  # of a warp, for 32 results: few warps hide little
_COPY_CYCLES = 25.0  # of a warp, for one copy of each thread
_BARRIER_CYCLES = 100.0  # for each piece: waiting for copies and for the other warps


@dataclass(frozen=True)
class Piece:
    """Slices of weights that are fetched and multiplied together.

    Attributes:
        chunk: of the input channels.
        swaps: whether it belongs to the other phase of a pair than the piece before it.
        first, count: slices, as `MultistageSchedule.slices` lists them.
        loads: whether the input of another chunk is fetched with it.
        last: whether the results of its phases are complete behind it.
    """

    chunk: int
    swaps: bool
    first: int
    count: int
    loads: bool
    last: bool


@dataclass(frozen=True)
class MultistageSchedule(Launch):
    """The shape of one launch; see `Launch`.

    Attributes:
        depth: groups of 8 input channels in a chunk.
        chunks: of the input channels; one stays in shared memory for all phases of a tile.
        longest: slices of a piece, at most.
        stages: pieces in shared memory.
        inputs: chunks of the input in shared memory.
        rows: tiles of 16 output channels that a warp works on.
        parts: sets of 4 groups of 8 positions that a warp works on.
        high: warps side by side along the output channels; the others lie along the positions.
        precision: of the products.
        parts_of_weights: see `Convolution.parts`.
    """

    depth: int
    chunks: int
    longest: int
    stages: int
    inputs: int
    rows: int
    parts: int
    high: int
    precision: Precision
    parts_of_weights: int

    @property
    def block_channels(self) -> int:
        return ROWS * self.block_rows

    @property
    def block_rows(self) -> int:
        """Tiles of 16 output channels that a block works on."""
        return self.rows * self.high

    @property
    def chunk_floats(self) -> int:
        """Floats of a chunk of the input in shared memory."""
        return self.depth * DEPTH * self.on.pitch

    @property
    def piece_floats(self) -> int:
        """Floats of the longest piece."""
        return self.longest * self.units * SLICE_FLOATS

    @property
    def units(self) -> int:
        """Slices of 16 output channels that a block fetches for one kernel position, each part of the weights counted."""
        return self.block_rows * max(self.parts_of_weights, 1)

    def slices(self) -> tuple[tuple[int, int, int], ...]:
        """(phase, group of 8 channels in a chunk, tap) of each slice, in order."""
        return tuple(
            (number, group, tap)
            for number, phase in enumerate(self.on.phases)
            for group in range(self.depth)
            for tap in range(len(phase.taps))
        )

    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of a tile, in order."""
        return tuple(_pieces(self.on.phases, self.on.pair, self.chunks, self.depth, self.longest))

    def work(self) -> str:
        chunks = f"{self.chunks} chunks of {self.depth * DEPTH} input channels"
        return f"{chunks}, {self.stages} stages of {self.longest} slices, {products_in_words(self.precision, self.on)}"


def costs(kernel: Kernel, program: Program, facts: DeviceFacts) -> Callable[[MultistageSchedule], float]:
    """See `Way.costs`."""
    written = functools.cache(functools.partial(written_cycles, kernel, program))
    return lambda plan: _cost(kernel, written, plan, facts)


def fitting(kernel: Kernel, program: Program, facts: DeviceFacts) -> Iterator[MultistageSchedule]:
    """Every schedule that fits a multiprocessor."""
    phases, axes = phases_of(kernel, program), len(dimensions(kernel)) - 2
    border = border_of(phases, axes)
    row_tiles = ceil(out_channels(kernel) / ROWS)
    groups = ceil(in_channels(kernel, program) / DEPTH)
    most = MOST_ROWS if anchor_of(kernel).warps == 1 or kernel.partials else _WIDEST
    if kernel.reduction_loops:  # a thread reduces over what its warp has, which must be all channels
        most = row_tiles
    side = (1, 2, 4) if anchor_of(kernel).warps == 1 else (1, 2)  # a group of warps shares its channels
    for high, parts in itertools.product((1,) if kernel.reduction_loops else side, (2, 1)):
        shapes = (
            tiles_of(kernel, program, phases, border, tile, DEPTH)
            for tile in tile_shapes(axes, WARPS // high * parts * COLUMNS)
        )
        for on in sorted(shapes, key=_fetched)[:_SHAPES]:
            rows = min(ceil(row_tiles / high), _most_rows(kernel, on, parts), most)
            if on.warps > 1 and rows:
                rows = ceil(row_tiles / (high * ceil(row_tiles / (high * rows))))  # as many for all blocks
            if rows and rows * (high - 1) < row_tiles and (rows == row_tiles or not kernel.reduction_loops):
                yield from _arrangements(kernel, facts, on, groups, (rows, parts, high))


def _most_rows(kernel: Kernel, on: Tiles, parts: int) -> int:
    """Tiles of 16 output channels that a warp's registers have room for."""
    precision = anchor_of(kernel).precision
    if on.warps == 1:
        return _MOST_SUMS // (ROWS * parts * on.pair)
    return max((n for n in range(1, _WIDEST + 1) if group_registers(on, n, parts, precision) <= _REGISTERS), default=0)


def _fetched(on: Tiles) -> int:
    """Positions and input elements of all tiles: what is multiplied and what is fetched, the parts past the end among them.

    A row counts as some more: its ends cost when they are written; see `written_cycles`.
    """
    return prod(on.tiles) * (prod(on.tile) + prod(on.extent) + _ROW_ENDS * prod(on.tile[:-1]))


def _arrangements(
    kernel: Kernel, facts: DeviceFacts, on: Tiles, groups: int, warp: tuple[int, int, int]
) -> Iterator[MultistageSchedule]:
    """How chunks and pieces may share what a multiprocessor has; `warp` is (rows, parts, high) of a schedule."""
    rows, parts, high = warp
    samples, anchor = dimensions(kernel)[0].size, anchor_of(kernel)
    channel_blocks = anchor.groups * ceil(out_channels(kernel) / (ROWS * rows * high))
    if on.warps == 1:
        most = 1 if rows * parts * on.pair * 16 > _SHARED_SUMS else 2
    else:
        most = 1 if group_registers(on, rows, parts, anchor.precision) > 128 else 2
    per_phase = max(len(phase.taps) for phase in on.phases)
    for depth in (depth for depth in range(1, groups + 1) if groups % depth == 0):
        wanted = [length for length in (4, 8, 16, 32) if length < depth * per_phase]
        for longest, stages in itertools.product([*wanted, min(max(depth * per_phase, 1), 64)], (3, 2)):
            inputs = 1 + ceil((stages - 1) / _least_pieces(on, groups // depth, depth, longest))
            units = rows * high * max(anchor.parts, 1)
            streams = stages * longest * units * SLICE_FLOATS + inputs * depth * DEPTH * on.pitch
            shared = 4 * (streams + on.staged_floats)
            plan = MultistageSchedule(
                on=on,
                depth=depth,
                chunks=groups // depth,
                longest=longest,
                stages=stages,
                inputs=inputs,
                rows=rows,
                parts=parts,
                high=high,
                precision=anchor.precision,
                parts_of_weights=anchor.parts,
                channel_blocks=channel_blocks,
            )
            found = launched(plan, facts, shared, most, samples * prod(on.tiles))
            if found is not None and _count(found) <= _MOST_PIECES:
                yield found


def _least_pieces(on: Tiles, chunks: int, depth: int, longest: int) -> int:
    """The fewest pieces between two fetches of input: a chunk of it may not be overwritten before they are done."""
    counts = [max(ceil(depth * len(phase.taps) / longest), 1) for phase in on.phases]
    together = [sum(counts[start : start + on.pair]) for start in range(0, len(counts), on.pair)]
    return min(together) if chunks > 1 else sum(together)


def _count(plan: MultistageSchedule) -> int:
    return plan.chunks * sum(max(ceil(plan.depth * len(phase.taps) / plan.longest), 1) for phase in plan.on.phases)


def _pieces(phases: Sequence[Phase], pair: int, chunks: int, depth: int, longest: int) -> Iterator[Piece]:
    counts = [depth * len(phase.taps) for phase in phases]
    firsts = [0, *itertools.accumulate(counts)]
    for start, chunk in itertools.product(range(0, len(phases), pair), range(chunks)):
        loads = chunks > 1 or start == 0
        for half in range(pair):
            count = counts[start + half]
            for begin in range(0, max(count, 1), longest):
                length = min(longest, count - begin)
                done = chunk == chunks - 1 and half == pair - 1 and begin + length == count
                swaps = begin == 0 and half + chunk > 0 and pair > 1
                yield Piece(chunk, swaps, firsts[start + half] + begin, length, loads, done)
                loads = False


def _cost(
    kernel: Kernel, written_by: Callable[[Tiles, int], float], plan: MultistageSchedule, facts: DeviceFacts
) -> float:
    """Estimated cycles: of a multiprocessor's tensor cores, shared memory or share of the cache, whichever needs most.

    An estimate to rank schedules by; most of its constants are argued, not measured. `written_by` are `written_cycles` of the kernel.
    """
    on = plan.on
    products = 1 if plan.precision is Precision.TF32 else 3
    slices = plan.chunks * plan.depth * sum(len(phase.taps) for phase in on.phases)
    apart = min(anchor_of(kernel).step[-1], 4)  # positions that lie apart share banks
    fetches = plan.chunks * len(on.phases) / on.pair if plan.chunks > 1 else 1
    elements = fetches * plan.depth * DEPTH * prod(on.extent)
    fetched = 4 * (elements + slices * plan.units * SLICE_FLOATS) / _BYTES_PER_CYCLE
    written = written_by(on, ROWS * plan.rows * plan.high)
    if on.warps == 1:
        tensor = slices * plan.rows * plan.parts * COLUMNS * products * WARPS / 4 * _MMA_CYCLES
        shared = slices * WARPS * (4 * plan.rows + 2 * COLUMNS * plan.parts * apart)
        busiest = max(tensor, shared, fetched, written)
        rest = (0.3 if plan.resident == 1 else 0.15) * (tensor + shared + fetched + written - busiest)
    else:
        tensor = slices * WARPS * COLUMNS * GROUP * plan.parts / 64 * group_cycles(ROWS * plan.rows, plan.precision)
        conflicts = slices * WARPS * 2.0 * COLUMNS * plan.parts * (apart - 1)
        stored = len(on.phases) * ROWS * plan.rows * plan.parts * WARPS  # by warps
        copied = elements / on.vector / 32 + slices * plan.units
        # What a block does besides multiplying goes on while another block multiplies.
        alone = 1.0 if plan.resident == 1 else 0.35
        busiest = max(tensor, fetched, written)
        rest = conflicts + alone * (_STORE_CYCLES * stored + _COPY_CYCLES * copied) / 4
    waiting = _count(plan) * _BARRIER_CYCLES / plan.stages * 2
    tile = busiest + rest + (waiting if plan.resident == 1 else waiting / 2)
    narrow = 1.0 if on.tile[-1] >= GROUP * COLUMNS else 1.05  # a warp's stores of one row are not all neighbours
    tiles = kernel.rows[0].size * prod(on.tiles) * plan.channel_blocks
    return ceil(tiles / plan.blocks) * max(plan.blocks / facts.multiprocessors, 1) * tile * narrow
