"""Schedules of pointwise kernels with windows that overlap over the axes of an image: a block has an output tile.

A block takes an output tile of an image, or of a few small ones: `lanes` threads along its rows, `groups` threads down, each with `unroll`
rows of `width` results. What the windows load comes to shared memory first (`fusepass.codegen.ir.output_tiles`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusepass.codegen.ir.index import Axis
from fusepass.codegen.schedule.plan import Schedule


@dataclass(frozen=True)
class OutputTile(Schedule):
    """What all of them have; rows may have any length.

    Attributes:
        image: the axes down an image and along its rows.
        planes: images that a block takes; of more than one, all of each.
        tile_height: rows of results of an image that a block takes; the last of them are also others', where images do not divide.
    """

    walk: ClassVar[str] = "patch"

    image: tuple[Axis, ...] = ()
    planes: int = 1
    tile_height: int = 0

    def shape(self) -> str:
        return f"{self.unroll} per thread, {self.threads} threads, patches of {self.tile()}"

    def tile(self, depth: str = "") -> str:
        """What a block has, for reports."""
        images = f"{self.planes} images of " if self.planes > 1 else ""
        return f"{images}{depth}{self.tile_height} x {self.lanes * self.width}"


@dataclass(frozen=True)
class WindowTile(OutputTile):
    """Windows over two axes.

    Attributes:
        along: where rows are reduced first, with results that go through shared memory: of how many neighbouring results a thread finds at once
            what a row comes to; 0 where each thread reduces the rows that it needs.
        upright: whether neighbouring threads stand below each other, not along a row; results then leave together.
        exchanges: whether a block's results leave through shared memory as they lie in memory.
    """

    along: int = 0
    upright: bool = False
    exchanges: bool = False

    def stands(self, thread: int) -> tuple[int, int, int]:
        """Where a thread stands: along the rows, down, and in which image."""
        groups = self.groups // self.planes
        lane, rest = divmod(thread, self.groups) if self.upright else divmod(thread, self.lanes)[::-1]
        return lane, rest % groups, rest // groups % self.planes

    def shape(self) -> str:
        shape = super().shape() + (f", rows first by {self.along} results" if self.along else "")
        shape += ", threads below each other" if self.upright else ""
        return shape + (", results leave together" if self.exchanges else "")


@dataclass(frozen=True)
class LineTile(OutputTile):
    """An image that lies channels last is a line of results and their channels (`fusepass.codegen.ir.line_windows`). Threads read memory
    themselves, as vectors along the second axis; windows go along the first one, of which each thread has `unroll` neighbours."""

    def shape(self) -> str:
        return f"{super().shape()}, read from memory"


@dataclass(frozen=True)
class DeepTile(OutputTile):
    """Windows over channels, too, whose tiles come one after another.

    Attributes:
        parts: groups of threads that take the tiles in turn, each for all results of the output tile.
    """

    parts: int = 1

    def shape(self) -> str:
        parts = f"{self.parts} parts of " if self.parts > 1 else ""
        return f"{self.unroll} per thread, {parts}{self.threads // self.parts} threads, patches of {self.tile()}"


@dataclass(frozen=True)
class PlaneTile(OutputTile):
    """Windows over three axes: a block goes through planes, with such an output tile in each.

    Attributes:
        depth: planes of results that a block goes through, the last of them also others' where these do not divide.
    """

    depth: int = 0

    def shape(self) -> str:
        return f"{self.unroll} per thread, {self.threads} threads, patches of {self.tile(f'{self.depth} x ')}"
