"""Convolutions of few channels by scaled halves, whose weights the threads of each warp hold in registers, for all kernel positions.

Positions are columns of products, output channels their rows: a warp multiplies 16 channels by 8 positions and 16 terms at a time
(``mma.m16n8k16``), and its threads have sums of channels of their own at several positions. The block has a tile of the input in shared
memory, with its border, and makes two words of each two numbers of two channels in their place, one with the halves of their high parts and
one with those of their low parts. A *pair* is what such a word meets at one place from a position, and 4 of them, one for each of the threads
that share a position, are a *quarter* of a block's instruction: half of its terms.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, GROUP, HalvedLaunch, Tiles

LANES = 4  # threads that share a position: a quarter has a pair for each
TOGETHER = 2  # groups of 8 positions that a warp multiplies at once
_CHAIN = 5  # products in a row where accuracy is wanted: tensor cores round their sums towards zero


@dataclass(frozen=True)
class Pair:
    """Two numbers that a position meets in one word: the first is of a channel, and lies `offset` from the position.

    Attributes:
        first, second: (number of a tap, channel) of the weights that they are multiplied with; None for zero.
    """

    channel: int
    offset: tuple[int, ...]
    first: tuple[int, int] | None
    second: tuple[int, int] | None


@dataclass(frozen=True)
class RegisterStationarySchedule(HalvedLaunch, abc.ABC):
    """The shape of one launch whose threads hold weights; see `HalvedLaunch`.

    Attributes:
        on: the positions in tiles, and the input below them, of which each channel has a plane.
        sizes: of the result, along its spatial axes.
    """

    sizes: tuple[int, ...]

    @property
    @abc.abstractmethod
    def steps(self) -> int:
        """Products of one part of each number, for the same sums."""

    @property
    def chain(self) -> int:
        """Products that a tensor core adds up."""
        return ceil(self.steps / ceil(self.steps / _CHAIN)) if self.parts > 1 else self.steps

    @property
    def sets(self) -> int:
        """Times that a warp could work on 32 positions of a tile."""
        return prod(self.on.tile) // (GROUP * COLUMNS)

    @property
    def covered(self) -> int:
        """Output channels that all blocks together work on."""
        return self.block_channels * self.channel_blocks

    @property
    @abc.abstractmethod
    def iteration_bytes(self) -> int:
        """Of the weights that an iteration takes."""

    @property
    def kept_bytes(self) -> int:
        """Of weights that stay in shared memory."""
        return self.iterations * self.iteration_bytes if self.iterations > 1 else 0

    @property
    def room_floats(self) -> int:
        """Room for states, and, beside a tile, for results that are laid out."""
        return self.on.staged_floats

    @property
    def found_bytes(self) -> int:
        """Of an exponent and the largest numbers of each channel, and the exponents and factors of output channels."""
        return DType.F32.nbytes * ceil((self.channels * (1 + self.largest_parts) + 2 * self.block_channels) / 4) * 4


@dataclass(frozen=True)
class PairsSchedule(RegisterStationarySchedule):
    """The shape of one launch whose warps multiply by themselves; see `RegisterStationarySchedule`.

    Attributes:
        quarters: what each half of a product's terms is multiplied with: a pair for each of `LANES` threads.
    """

    quarters: tuple[tuple[Pair, ...], ...]

    @property
    def steps(self) -> int:
        """Products for 16 channels, 8 positions, and one part of each number."""
        return len(self.quarters) // 2

    @property
    def places(self) -> list[list[int]]:
        """For each quarter, where its pairs' words lie in a tile, from a position's place."""
        return [[place_in(self.on, pair) for pair in quarter] for quarter in self.quarters]

    @property
    def iteration_bytes(self) -> int:
        return held_registers(self) * 4 * 32

    @property
    def tile_bytes(self) -> int:
        return DType.F32.nbytes * ceil(self.channels / 2) * 2 * self.on.pitch

    def __str__(self) -> str:
        iterations = f"{self.iterations} x " if self.iterations > 1 else ""
        channels = f"{iterations}{ROWS * self.rows} channels x {self.on} positions"
        return f"{self.blocks} blocks, {channels}, {self.steps} products of two channels, weights in registers, {self.products}"


def held_registers(plan: RegisterStationarySchedule) -> int:
    """Registers of a thread for the weights of an iteration."""
    return plan.rows * plan.steps * plan.parts * 4


def pattern_of(places: Sequence[int]) -> tuple[int, ...]:
    """How far the places of a quarter lie from the first one."""
    return tuple(place - places[0] for place in places)


def place_in(on: Tiles, pair: Pair) -> int:
    strides = contiguous_strides(on.extent)
    at = sum((at - first) * stride for at, first, stride in zip(pair.offset, on.origin, strides, strict=True))
    return pair.channel * on.pitch + at
