"""Tiles of a convolution's positions: how they are laid along the axes, and the input below them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import Self, TypeVar

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import ROWS, Convolution, Phase
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Role
from fusepass.codegen.ir.team import state_bytes

WARPS = 8
MOST_ROWS = 4  # tiles of 16 channels that a warp works on at once, where not all channels must be with one
COLUMNS = 4  # groups of positions that a warp stores at once
GROUP = 8  # neighbouring positions of one instruction
_BANKS = 32
SECTOR = 32  # bytes that memory is written by
_FLOAT_CYCLES = 0.27  # of a multiprocessor, where all store, for a float
_TORN_CYCLES = 7.0  # the same for a sector that is written in part
_SHARED_CYCLES = 2.5  # the same where phases that a block has one after another write the parts
_MAX_INT = 2**31 - 2**21


@dataclass(frozen=True)
class Tiles:
    """A kernel's positions in tiles.

    Attributes:
        tile: positions of a block's tile per spatial axis; the last is a multiple of 8.
        tiles: tiles per spatial axis.
        extent: input elements of a tile per spatial axis, its border included.
        origin: where a tile's first input element lies, from the tile's first position times the step.
        pitch: floats from one input channel of the tile to the next.
        phases: what `Convolution.phases` gives.
        pair: phases that are worked on together because their results are neighbours: two where the last axis is
            transposed with stride 2; three or four where its stride is that and registers hold so many sums, else one.
        warps: that multiply together; see `Convolution.warps`.
        vector: neighbouring input elements that one copy brings: 4 floats, 8, 4 or 2 halves, or 1; tiles of the input are whole numbers
            of them.
        wide: whether indices need 64 bits.
        state_floats: room for the states of reductions over positions, of all warps.
        block_warps: warps of a block.
        pace: where tiles overlap along the last axis, positions from one to the next: each then stores whole sectors alone, those that
            begin in its first `pace` positions; 0 where they do not.
    """

    tile: tuple[int, ...]
    tiles: tuple[int, ...]
    extent: tuple[int, ...]
    origin: tuple[int, ...]
    pitch: int
    phases: tuple[Phase, ...]
    pair: int
    warps: int
    vector: int
    wide: bool
    state_floats: int = 0
    block_warps: int = WARPS
    pace: int = 0

    def __str__(self) -> str:
        return " x ".join(map(str, self.tile))

    @property
    def threads(self) -> int:
        return 32 * self.block_warps

    @property
    def steps(self) -> tuple[int, ...]:
        """Positions from one tile to the next, per spatial axis."""
        return (*self.tile[:-1], self.pace or self.tile[-1])

    @property
    def elements(self) -> int:
        """Input elements of a tile, of one channel."""
        return prod(self.extent)

    @property
    def staged_pitch(self) -> int:
        """Floats from one row of a warp's results to the next, where they are laid out for the stores.

        A thread has neighbouring channels of one position where groups of warps multiply, else the other way round. Those that share
        a row where values are reduced (``fp::Share``) read longer rows of pairs.
        """
        return GROUP * COLUMNS * self.pair + (4 if self.warps > 1 and not (self.pair > 1 and self.state_floats) else 8)

    @property
    def staged_floats(self) -> int:
        """Floats of all warps' results that are laid out at once, and of states behind them."""
        return self.block_warps * ROWS * self.staged_pitch + self.state_floats


def phases_of(kernel: Kernel, program: Program) -> tuple[Phase, ...]:
    """The phases of a kernel's convolution."""
    anchor = anchor_of(kernel)
    return anchor.phases(program.buffer(anchor.weight).shape[2:], [axis.size for axis in dimensions(kernel)[2:]])


@dataclass(frozen=True)
class Launch:
    """What the schedules of convolutions have in common.

    Attributes:
        on: the positions in tiles.
        channel_blocks: blocks that work on one tile: they share its output channels, each those of one group, and may share its
            phases.
        blocks: blocks of the launch, a multiple of `channel_blocks`.
        resident: blocks that a multiprocessor should hold, which bounds a thread's registers.
        shared_bytes: dynamic shared memory of a block.
    """

    on: Tiles
    channel_blocks: int
    blocks: int = field(default=0, kw_only=True)
    resident: int = field(default=0, kw_only=True)
    shared_bytes: int = field(default=0, kw_only=True)

    @property
    def threads(self) -> int:
        return self.on.threads

    @property
    def block_channels(self) -> int:
        """Output channels of a block, those that fill up tiles of a group's channels among them."""
        raise NotImplementedError

    @property
    def covered(self) -> int:
        """Output channels that all blocks together work on."""
        return self.block_channels * self.channel_blocks

    def extent(self) -> str:
        """What a block works on, for descriptions."""
        phases = f", {len(self.on.phases)} phases" if len(self.on.phases) > 1 else ""
        return f"{self.block_channels} channels x {self.on} positions{phases}"

    def work(self) -> str:
        """How it does so."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.blocks} blocks, {self.extent()}, {self.work()}"

    @property
    def takers(self) -> int:
        """How many take tiles side by side, for each part of the channels: blocks, or teams of theirs."""
        return self.blocks // self.channel_blocks

    def unaligned(self, kernel: Kernel, program: Program) -> Self:
        """The same where inputs of the program may start anywhere."""
        return replace(self, on=unaligned(self.on, kernel, program))


@dataclass(frozen=True)
class HalvedLaunch(Launch):
    """What those have in common that multiply by scaled halves.

    Attributes:
        rows: tiles of 16 output channels that a warp works on at once.
        iterations: times that a block does so for a tile of the input, each with channels of its own.
        parts: halves that stand for a number.
        channels: of the input.
    """

    rows: int
    iterations: int
    parts: int
    channels: int

    @property
    def block_channels(self) -> int:
        return ROWS * self.rows * self.iterations

    @property
    def largest_parts(self) -> int:
        """Parts in which warps look for the largest number of a channel."""
        return ceil(self.on.block_warps / self.channels)

    @property
    def products(self) -> str:
        """For descriptions."""
        return "halves x 3" if self.parts > 1 else "halves"


P = TypeVar("P", bound=Launch)


def launched(plan: P, facts: DeviceFacts, shared_bytes: int, most: int, tiles: int) -> P | None:
    """`plan` with as many blocks as the device holds at once, or fewer where there are fewer `tiles` of all samples; None where a
    multiprocessor has not so much shared memory. It has registers for `most` blocks.
    """
    if shared_bytes > facts.shared_bytes_per_block:
        return None
    resident = max(min(facts.shared_bytes_per_block // shared_bytes, most), 1)
    blocks = max(min(tiles, resident * facts.multiprocessors // plan.channel_blocks), 1) * plan.channel_blocks
    return replace(plan, blocks=blocks, resident=resident, shared_bytes=shared_bytes)


def dimensions(kernel: Kernel) -> tuple[Axis, ...]:
    """The axes of a kernel's convolution: sample, channel, then spatial ones."""
    column = anchor_of(kernel).column
    return (*kernel.rows[:column], *kernel.cols, *kernel.rows[column:])


def in_channels(kernel: Kernel, program: Program) -> int:
    """Input channels of a group of a kernel's convolution."""
    return program.buffer(anchor_of(kernel).source).shape[1] // anchor_of(kernel).groups


def out_channels(kernel: Kernel) -> int:
    """Output channels of a group."""
    return dimensions(kernel)[1].size // anchor_of(kernel).groups


def anchor_of(kernel: Kernel) -> Convolution:
    """The convolution of a kernel that has one."""
    assert isinstance(kernel.anchor, Convolution)
    return kernel.anchor


def tile_shapes(axes: int, groups: int) -> Iterator[tuple[int, ...]]:
    """Ways to lay `groups` groups of 8 positions, a power of two, along the axes, the last axis in whole groups."""
    powers = [1 << n for n in range(groups.bit_length())]
    for shape in itertools.product(powers, repeat=axes):
        if prod(shape) == groups:
            yield (*shape[:-1], shape[-1] * GROUP)


def tiles_of(
    kernel: Kernel,
    program: Program,
    phases: tuple[Phase, ...],
    border: Sequence[tuple[int, int]],
    tile: tuple[int, ...],
    channels: int,
    pair: int | None = None,
) -> Tiles:
    """The positions of `kernel` in tiles of shape `tile`; `channels` of the input lie side by side.

    `pair` is by default what all kernels do.
    """
    anchor, sizes = anchor_of(kernel), [axis.size for axis in dimensions(kernel)]
    extent = tuple(
        (size - 1) * step + high - low + 1 for size, step, (low, high) in zip(tile, anchor.step, border, strict=True)
    )
    source = program.buffer(anchor.source)
    origin, vector = [low for low, _ in border], _vector(source)
    if vector > 1:  # from a multiple of it on: tiles are 8 positions or more apart
        before = origin[-1] % vector
        origin[-1] -= before
        extent = (*extent[:-1], ceil((extent[-1] + before) / vector) * vector)
    positions = [ceil(size / spread) for size, spread in zip(sizes[2:], anchor.spread, strict=True)]
    extents = [buffer.extent for buffer in map(program.buffer, kernel.reads | kernel.writes)]
    return Tiles(
        tile=tile,
        tiles=tuple(ceil(count / size) for count, size in zip(positions, tile, strict=True)),
        extent=extent,
        origin=tuple(origin),
        pitch=_pitch(prod(extent), channels),
        phases=phases,
        pair=pair or pair_of(kernel),
        warps=anchor.warps,
        vector=vector,
        wide=max(*extents, prod(sizes)) >= _MAX_INT,
        state_floats=state_floats(kernel, min(ceil(out_channels(kernel) / ROWS), MOST_ROWS)),
    )


def source_tiles(kernel: Kernel, program: Program, on: Tiles) -> Tiles:
    """The tiles `on` of places, with the input below them as it is."""
    channels = program.buffer(anchor_of(kernel).source).shape[1]
    plain = tiles_of(kernel, program, on.phases, border_of(on.phases, len(on.tile)), on.tile, channels)
    return replace(plain, tiles=on.tiles, pace=on.pace)


def pair_of(kernel: Kernel) -> int:
    """`Tiles.pair` of a kernel's convolution."""
    return 2 if anchor_of(kernel).spread[-1] == 2 <= dimensions(kernel)[-1].size else 1


def _vector(source: Buffer) -> int:
    """The elements that an aligned copy from a convolution's input may bring; such copies are inside of a row or outside."""
    *others, last = source.strides
    widths = (8, 4, 2) if source.dtype.is_half else (4,)
    if last != 1:
        return 1
    return next((width for width in widths if not any(size % width for size in (*others, source.shape[-1]))), 1)


def state_floats(kernel: Kernel, rows: int) -> int:
    """Room for the states of each warp and each of its channels, `rows` times 16; a multiple of 4 floats."""
    reductions = kernel.partials.reductions if kernel.partials else ()
    return WARPS * rows * ROWS * sum(map(state_bytes, reductions)) // DType.F32.nbytes


def products_in_words(precision: Precision, on: Tiles) -> str:
    """For descriptions of schedules."""
    return ("TF32" if precision is Precision.TF32 else "TF32 x 3") + (
        f", {on.warps} warps together" if on.warps > 1 else ""
    )


def group_cycles(channels: int, precision: Precision) -> float:
    """Cycles of a multiprocessor for a slice of 64 positions by `channels`, multiplied by four warps together.

    Measured on an H200 with enough warps at work; inputs come from shared memory into registers.
    """
    return 36 + 0.31 * channels if precision is Precision.TF32 else 42 + 1.2 * channels


def group_registers(on: Tiles, rows: int, parts: int, precision: Precision) -> int:
    """Registers of a thread, about, where four warps multiply 32 `parts` positions each by `rows` times 16 channels.

    They hold the sums, inputs of two slices and the next two, and, for three products, sums of up to 64 channels of those.
    """
    split = 0 if precision is Precision.TF32 else ROWS * parts * min(rows, 4) + 16 * parts
    return ROWS * rows * parts * on.pair + 32 * parts + split + 16


def written_cycles(kernel: Kernel, program: Program, on: Tiles, channels: int) -> float:
    """Cycles of a multiprocessor for what a tile stores of `channels`, from measurements of stores alone on an H200.

    Rows of the result often begin anywhere. Then both ends of each piece of a row lie in sectors of which the rest is
    written by another warp, or by another block at another time.
    """
    phases = len(on.phases) if anchor_of(kernel).pooled is None else 1
    rows = prod(on.tile[:-1]) * phases // on.pair
    width = on.tile[-1] * on.pair
    channels = min(channels, out_channels(kernel))
    spread = anchor_of(kernel).spread[-1]
    cycles = 0.0
    for store in kernel.stores:
        *others, last = (store.index.stride(axis) for axis in kernel.rows)
        nbytes = program.buffer(store.buffer).dtype.nbytes
        whole = all(stride is not None and stride * nbytes % SECTOR == 0 for stride in others)
        torn = 0 if last != 1 or (whole and width * nbytes % SECTOR == 0) else 2 * rows * channels
        if last == 1 and spread > on.pair:
            cycles += rows * channels * width * min(spread * nbytes / SECTOR, 1) * _SHARED_CYCLES
        cycles += rows * width * channels * _FLOAT_CYCLES * nbytes / DType.F32.nbytes + torn * _TORN_CYCLES
    return cycles


def unaligned(on: Tiles, kernel: Kernel, program: Program) -> Tiles:
    """The same tiles where inputs of the program may start anywhere."""
    return replace(on, vector=1) if program.buffer(anchor_of(kernel).source).role is Role.INPUT else on


def border_of(phases: Sequence[Phase], axes: int) -> list[tuple[int, int]]:
    """Per axis, the first and the last input element that any tap reads, from a position times the step."""
    offsets = [tap.offset for phase in phases for tap in phase.taps] or [(0,) * axes]
    return [(min(along), max(along)) for along in zip(*offsets, strict=True)]


def _pitch(elements: int, channels: int) -> int:
    """Floats per channel, so that the same position of four neighbouring channels lies in different banks."""
    return elements if channels == 1 else elements + (GROUP - elements) % _BANKS
