"""How a convolution kernel is laid on a GPU with tensor cores, and whether it should be one.

A block holds, in shared memory, the weights of up to 64 output channels and a tile of the input with its border, for all
input channels. Its warps multiply 16 channels x 8 taps by 8 taps x 8 positions at a time; positions that belong
together lie along the last axis. Blocks stay on the device and take one tile after another, so weights are fetched once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import Convolution, Phase
from fusepass.codegen.ir.program import Kernel, Program

WARPS = 8
COLUMNS = 4  # tiles of 8 positions that a warp works on at once
SLICE = 8  # taps of one step
_M, _N = 16, 8  # channels and positions of one instruction
_MOST_ROWS = 4  # tiles of 16 channels that a warp works on at once
_MOST_CHANNELS = 8  # input channels; above, the library's convolution is the better one
_MOST_SCATTERED = 16  # the same for transposed convolutions with a stride, whose phases have few taps each
_BANKS = 32
_MAX_INT = 2**31 - 2**21


@dataclass(frozen=True)
class ConvolutionSchedule:
    """The shape of one launch.

    Attributes:
        tile: positions of a block's tile per spatial axis; the last is a multiple of 8.
        tiles: tiles per spatial axis.
        extent: input elements of a tile per spatial axis, its border included.
        origin: where a tile's first input element lies, from the tile's first position times the step.
        pitch: floats from one input channel of the tile to the next.
        phases: what `Convolution.phases` gives.
        steps: for each phase, the number of slices of 8 taps.
        pair: phases that are worked on together because their results are neighbours: two where the last axis is
            transposed with stride 2.
        rows: tiles of 16 output channels that a block works on.
        buffers: tiles of the input in shared memory; with two, one is fetched while the other is worked on.
        channel_blocks: blocks that share the output channels of one tile.
        blocks: blocks of the launch, a multiple of `channel_blocks`.
        resident: blocks that a multiprocessor should hold, which bounds a thread's registers.
        shared_bytes: dynamic shared memory of a block.
        wide: whether indices need 64 bits.
    """

    tile: tuple[int, ...]
    tiles: tuple[int, ...]
    extent: tuple[int, ...]
    origin: tuple[int, ...]
    pitch: int
    phases: tuple[Phase, ...]
    steps: tuple[int, ...]
    pair: int
    rows: int
    buffers: int
    channel_blocks: int
    blocks: int
    resident: int
    shared_bytes: int
    wide: bool

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def staged_pitch(self) -> int:
        """Floats from one row of a warp's results to the next, where they are laid out for the stores."""
        return _staged_pitch(self.pair)

    def __str__(self) -> str:
        tile = " x ".join(map(str, self.tile))
        channels = f"{_M * self.rows} channels x {tile} positions"
        phases = f", {len(self.phases)} phases" if len(self.phases) > 1 else ""
        return f"{self.blocks} blocks, {channels}{phases}, {sum(self.steps)} steps of {SLICE} taps, TF32 x 3"


def serves(program: Program, kernel: Kernel, facts: DeviceFacts) -> bool:
    """Whether the convolution of `kernel` is one that generated code does better than the library.

    Libraries lay convolutions out for many channels. With few they convert the layout before and after, or fall back to plain
    float32 arithmetic.
    """
    anchor = kernel.anchor
    assert isinstance(anchor, Convolution)
    if not few_channels(program.buffer(anchor.source).shape[1], anchor.spread) or facts.capability < 80:
        return False
    return schedule_convolution(kernel, program, facts) is not None


def few_channels(channels: int, spread: Sequence[int]) -> bool:
    """Whether a convolution has so few input channels that generated code is the faster one; see `Convolution.spread`."""
    return channels <= (_MOST_SCATTERED if max(spread) > 1 else _MOST_CHANNELS)


def schedule_convolution(kernel: Kernel, program: Program, facts: DeviceFacts) -> ConvolutionSchedule | None:
    """The schedule with the least work that fits a multiprocessor; None where none fits."""
    anchor = kernel.anchor
    assert isinstance(anchor, Convolution)
    kernel_size = program.buffer(anchor.weight).shape[2:]
    phases = anchor.phases(kernel_size, [axis.size for axis in kernel.rows[2:]])
    shapes = itertools.product(_tile_shapes(len(anchor.stride)), (2, 1))
    border = _border(phases, len(anchor.stride))
    candidates = (_candidate(kernel, program, facts, phases, border, *shape) for shape in shapes)
    fitting = [(_cost(plan), number, plan) for number, plan in enumerate(candidates) if plan is not None]
    return min(fitting)[2] if fitting else None


def _tile_shapes(axes: int) -> Iterator[tuple[int, ...]]:
    """Ways to lay a block's positions along the axes, the last axis in whole groups of 8."""
    groups = WARPS * COLUMNS
    powers = [1 << n for n in range(groups.bit_length())]
    for shape in itertools.product(powers, repeat=axes):
        if prod(shape) == groups:
            yield (*shape[:-1], shape[-1] * _N)


def _border(phases: Sequence[Phase], axes: int) -> list[tuple[int, int]]:
    """Per axis, the first and the last input element that any tap reads, from a position times the step."""
    offsets = [tap.offset for phase in phases for tap in phase.taps] or [(0,) * axes]
    return [(min(along), max(along)) for along in zip(*offsets, strict=True)]


def _candidate(
    kernel: Kernel,
    program: Program,
    facts: DeviceFacts,
    phases: tuple[Phase, ...],
    border: Sequence[tuple[int, int]],
    tile: tuple[int, ...],
    buffers: int,
) -> ConvolutionSchedule | None:
    anchor = kernel.anchor
    assert isinstance(anchor, Convolution)
    sizes = [axis.size for axis in kernel.rows]
    extent = tuple(
        (size - 1) * step + high - low + 1 for size, step, (low, high) in zip(tile, anchor.step, border, strict=True)
    )
    channels = program.buffer(anchor.source).shape[1]
    pitch = _pitch(prod(extent), channels)
    steps = tuple(ceil(len(phase.taps) * channels / SLICE) for phase in phases)
    pair = 2 if anchor.spread[-1] == 2 <= sizes[-1] else 1
    rows = min(ceil(sizes[1] / _M), _MOST_ROWS // pair)
    staged = WARPS * _M * _staged_pitch(pair)
    shared = 4 * (sum(steps) * rows * _M * SLICE + sum(steps) * SLICE + staged + buffers * channels * pitch)
    if shared > facts.shared_bytes_per_block:
        return None
    positions = [ceil(size / spread) for size, spread in zip(sizes[2:], anchor.spread, strict=True)]
    tiles = tuple(ceil(count / size) for count, size in zip(positions, tile, strict=True))
    channel_blocks = ceil(sizes[1] / (_M * rows))
    resident = max(min(facts.shared_bytes_per_block // shared, 3 if rows * pair == 1 else 2), 1)
    each = max(min(sizes[0] * prod(tiles), resident * facts.multiprocessors // channel_blocks), 1)
    extents = [buffer.extent for buffer in map(program.buffer, kernel.reads | kernel.writes)]
    wide = max(*extents, prod(sizes)) >= _MAX_INT
    return ConvolutionSchedule(
        tile=tile,
        tiles=tiles,
        extent=extent,
        origin=tuple(low for low, _ in border),
        pitch=pitch,
        phases=phases,
        steps=steps,
        pair=pair,
        rows=rows,
        buffers=buffers,
        channel_blocks=channel_blocks,
        blocks=each * channel_blocks,
        resident=resident,
        shared_bytes=shared,
        wide=wide,
    )


def _staged_pitch(pair: int) -> int:
    return 8 * COLUMNS * pair + 8


def _pitch(elements: int, channels: int) -> int:
    """Floats per channel, so that the same position of four neighbouring channels lies in different banks."""
    return elements if channels == 1 else elements + (_N - elements) % _BANKS


def _cost(plan: ConvolutionSchedule) -> float:
    """Relative time: multiplications of all tiles, and what is loaded for them; a multiprocessor wants two blocks."""
    loaded = plan.pitch / prod(plan.tile)
    waiting = {(2, 1): 1.15, (2, 2): 1.0, (1, 1): 1.6, (1, 2): 1.3}[min(plan.resident, 2), plan.buffers]
    narrow = 1.0 if plan.tile[-1] >= 32 else 1.1  # a warp's stores of one row are not all neighbours
    return plan.channel_blocks * prod(plan.tiles) * (sum(plan.steps) * SLICE + 4 * loaded) * waiting * narrow


def padded_taps(plan: ConvolutionSchedule, channels: int) -> list[tuple[int, Phase | None, int]]:
    """For each place of the weights in order: (input channel, phase or None where nothing is, tap number)."""
    places: list[tuple[int, Phase | None, int]] = []
    for phase, steps in zip(plan.phases, plan.steps, strict=True):
        real = [(channel, phase, tap) for tap in range(len(phase.taps)) for channel in range(channels)]
        places += [*real, *[(0, None, 0)] * (steps * SLICE - len(real))]
    return places


def first_steps(steps: Sequence[int]) -> list[int]:
    """Where each phase's slices begin, and where the last ends."""
    return [0, *itertools.accumulate(steps)]
