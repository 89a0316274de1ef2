"""Convolutions of few channels by scaled halves, weights in registers, four warps together, of which each has every fourth position.

A group of warps multiplies 64 rows, 16 channels at 4 neighbouring positions along the last axis, by columns, of which each has the 8 numbers
that 4 positions meet in a *run*: at most 4 neighbouring taps along the last axis. A position meets 4 of these 8, of each two that are 4
apart one. So they lie in the order 0 4 1 5 2 6 3 7, and of each four in a row two are multiplied by zero: such products tensor cores leave
out (``wgmma.sp``), and take as long for 32 terms as for 16. A *place* is the 16 bytes of a column and a run; 4 runs whose places lie at
one distance are a *step*, one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, GROUP, HalvedLaunch

NEIGHBOURS = 4  # positions of a column, one for each warp
STEP_RUNS = 4
PLACE_BYTES = 16
SET_POSITIONS = GROUP * NEIGHBOURS  # neighbouring positions of 8 columns
_CHAIN = 5  # products in a row where accuracy is wanted: tensor cores round their sums towards zero


@dataclass(frozen=True)
class Run:
    """Neighbouring taps of a channel, of which those of a step that are none are None."""

    channel: int
    taps: tuple[int | None, ...]


@dataclass(frozen=True)
class Places:
    """How a tile's places lie in shared memory.

    Attributes:
        steps: where those of each step's first run begin, from that of a position's column.
        width: of them in a row of a tile.
        deeper: from a run of a step to the next one.
        shift: where, in a row of the tile as it is fetched, the first place's numbers begin.
        slack: of them behind all others, which are read and multiplied by zero.
    """

    steps: tuple[int, ...]
    width: int
    deeper: int
    shift: int
    slack: int


@dataclass(frozen=True)
class RegisterStationarySchedule(HalvedLaunch):
    """The shape of one launch whose threads hold weights, of 16 output channels; see `HalvedLaunch`.

    Attributes:
        on: the positions in tiles, and the input below them, of which each channel has a plane.
        runs: those of each step, whose places lie `Places.deeper` apart.
        places: how they lie in a tile.
        lines: groups of 8 columns that are multiplied at once: neighbours along the last axis but one, or the last where there is no other.
    """

    runs: tuple[tuple[Run, ...], ...]
    places: Places
    lines: int

    @property
    def steps(self) -> int:
        """Products of one part of each number, for the same sums."""
        return len(self.runs)

    @property
    def chain(self) -> int:
        """Products that a tensor core adds up."""
        return ceil(self.steps / ceil(self.steps / _CHAIN)) if self.parts > 1 else self.steps

    @property
    def sets(self) -> int:
        """Times that a warp could work on 32 positions of a tile."""
        return prod(self.on.tile) // (GROUP * COLUMNS)

    @property
    def found_bytes(self) -> int:
        """Of an exponent and the largest numbers of each channel, and the exponents and factors of output channels."""
        return DType.F32.nbytes * ceil((self.channels * (1 + self.largest_parts) + 2 * self.block_channels) / 4) * 4

    @property
    def groups(self) -> int:
        """Of four warps."""
        return self.on.block_warps // NEIGHBOURS

    @property
    def input_rows(self) -> int:
        """Rows of a tile of the input, of one channel."""
        return prod(self.on.extent[:-1])

    @property
    def layer(self) -> int:
        """Places of one part of a tile."""
        return self.channels * self.input_rows * self.places.width

    @property
    def packed_room(self) -> int:
        """Bytes for a tile's halves, or for results that are laid out instead."""
        laid_out = DType.F32.nbytes * (self.on.staged_floats - self.on.state_floats)
        return max(PLACE_BYTES * (self.parts * self.layer + self.places.slack), laid_out)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sets of positions that are multiplied at once, per axis of a tile."""
        *outer, last = self.on.tile
        if not outer:
            return (last // (SET_POSITIONS * self.lines),)
        return (*outer[:-1], outer[-1] // self.lines, last // SET_POSITIONS)

    @property
    def weight_registers(self) -> int:
        """Registers of a thread for weights."""
        return 4 * self.steps * self.parts

    @property
    def weight_bytes(self) -> int:
        """Of all weights, each warp's own."""
        return self.weight_registers * 4 * 32 * NEIGHBOURS

    @property
    def tile_bytes(self) -> int:
        """Of a tile of the input as it is."""
        return DType.F32.nbytes * self.channels * self.on.pitch

    @property
    def block_bytes(self) -> int:
        """Shared memory of a block. Weights lie where halves and a tile do until threads have them, results that are laid out where a tile was."""
        states = DType.F32.nbytes * self.on.state_floats
        return states + self.found_bytes + max(self.packed_room + self.tile_bytes, self.weight_bytes)

    def work(self) -> str:
        return f"{self.steps} sparse products of {self.lines * GROUP} columns, weights in registers, {self.products}"
