"""At which positions of a convolution's result a thread stands that takes it from a warp's sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.render.cuda.contraction.convolution.tiles import TileWriter, quotient, remainder
from fusepass.codegen.render.cuda.contraction.loop import UNROLL, Loop
from fusepass.codegen.render.spelling import Locals, bare
from fusepass.codegen.schedule_convolution.tiles import SECTOR, Tiles


@dataclass(frozen=True)
class Sums:
    """Where the writer of results finds them.

    Attributes:
        staging: the statement that lays the sums of a `phase`, or of all phases of a pair, and of 16 channels, those at hand in `rows`, out in
            ``room``; nothing where `repair` computes all results.
        rows: the loop over 16 channels after another.
        covered: channels that all blocks together work on; those past the result's are not stored.
        group: the first of these groups in the tile.
        repair: lines before the results of a position are taken, of which ``row`` says the channel.
        unroll: the pragma of the loop over channels.
        height: channels that are laid out at once.
        phase: the loop over the phases of a pair, where they are laid out one after another.
    """

    staging: str
    rows: Loop
    covered: int
    group: str
    repair: tuple[str, ...] = ()
    unroll: str = UNROLL
    height: int = ROWS
    phase: Loop | None = None

    @property
    def defined(self) -> Sums:
        """The same where all results are computed by their definition."""
        return replace(self, staging="")

    def over_rows(self, lines: Sequence[str]) -> list[str]:
        """`lines` for 16 channels after another, whose sums are laid out before."""
        if not self.staging:
            return self.rows.over(["__syncwarp();", *lines], "#pragma unroll 1")
        staged = [self.staging] if self.phase is None else self.phase.over([self.staging])
        return self.rows.over(["__syncwarp();", *staged, "__syncwarp();", *lines])


def own_sectors(on: Tiles, spread: int, c: Locals) -> list[str]:
    """``ahead``, how far a result is from the tile's first one, and ``own``: the tile stores it where that, counted from the beginning
    of its sector, is less. The first tile of a row and the last one store all to its ends. `spread` is `Convolution.spread`.
    """
    step = on.pace * spread
    before = f"({c.tile_x} ? 0 : {SECTOR})"  # of a row begins a sector
    return [
        f"const int {c.ahead} = int({c.x}) - {c.tile_x} * {step} + {before};",
        f"const unsigned {c.own} = {c.tile_x} == {on.tiles[-1] - 1} ? {1 << 30} : {step} + {before};",
    ]


def store_own(target: str, index: str, value: str, index_type: str, nbytes: int, c: Locals) -> str:
    """The statement that stores `value`, of so many bytes, at `target[index]`, if the tile stores it."""
    own = f"unsigned({c.ahead} - int({c.at} % {SECTOR // nbytes})) < {c.own}"
    return f"if (const {index_type} {c.at} = {index}; {own}) {target}[{c.at}] = {value};"


def is_first(on: Tiles, spread: int, c: Locals) -> str:
    """The condition that no later tile has a result."""
    return f"int({c.x}) < ({c.tile_x} + 1) * {on.pace * spread} || {c.tile_x} == {on.tiles[-1] - 1}"


class PositionWriter(TileWriter):
    """Lines of a kernel that find positions; see `TileWriter`."""

    def position(self, group: str, column: str = "", start: str = "") -> tuple[list[str], str]:
        """The coordinates of the result that a thread takes, and the condition that it exists.

        It is the position of the warp that `column` says, in the phase of a pair that `start` says; by default a warp takes neighbours.
        """
        c = self.c
        on, sizes = self.on, self.sizes
        column = column or (c.lane if on.pair == 1 else f"({self.half} * 32 + {c.lane}) / {on.pair}")
        coordinates = self.group_coordinates(f"({group} + {column} / 8)")
        inner = f"{column} % 8"
        coordinates[-1] = inner if coordinates[-1] == "0" else f"{coordinates[-1]} + {inner}"
        own = f"({self.half} * 32 + {c.lane}) % {on.pair}" if 32 % on.pair else f"{c.lane} % {on.pair}"
        starts, conditions, lines = self._phase_starts(start or own), [], []
        for number, axis in enumerate(self.axes):
            position = f"({self.tile_at[number]} * {on.steps[number]} + {coordinates[number]})"
            spread = self.anchor.spread[number]
            at = position if spread == 1 else f"{position} * {spread} + {starts[number]}"
            lines.append(f"const {self.index_type} {axis} = {bare(at)};")
            if on.pace or on.tiles[number] * on.tile[number] * spread > sizes[2 + number]:
                conditions.append(f"{axis} < {sizes[2 + number]}")
        if on.pace:
            lines += own_sectors(on, self.anchor.spread[-1], self.c)
        return lines, " && ".join(conditions) or "true"

    def _phase_starts(self, start: str) -> list[str]:
        """The first result element of a phase, per axis; `start` is that of a pair along the last one."""
        starts, rest = [], self.c.phase
        for spread, size in reversed(list(zip(self.anchor.spread, self.sizes[2:], strict=True))):
            starts.append(remainder(rest, min(spread, size)) if len(self.on.phases) > 1 else "0")
            rest = quotient(rest, min(spread, size))
        if self.on.pair > 1:
            starts[0] = start
        return starts[::-1]
