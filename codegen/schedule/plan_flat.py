"""Schedules of pointwise kernels: along all elements as they lie, or in tiles where operands are contiguous along different axes."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import ClassVar

from fusepass.codegen.ir.index import Axis
from fusepass.codegen.schedule.plan import Schedule


@dataclass(frozen=True)
class Pointwise(Schedule):
    """All rows as one flat axis. A thread has `unroll` vectors, a block's width apart; there is one group.

    Attributes:
        ragged: whether the last vector may have fewer elements; `width` divides the axis otherwise.
        apart: vectors from one of a thread's vectors to the next; 0 for a block's width.
    """

    walk: ClassVar[str] = "pointwise"

    ragged: bool = False
    apart: int = 0

    @property
    def spread(self) -> float:
        return 0.0 if self.apart else log2(self.unroll)

    def shape(self) -> str:
        shape = f"{self.unroll} per thread, {self.threads} threads"
        shape += f", {self.apart} vectors apart" if self.apart else ""
        return shape + (", the last one shorter" if self.ragged else "")


@dataclass(frozen=True)
class Transposed(Schedule):
    """Vectors along the rows, as in `Columns`; a block has a tile of rows and columns, and what is contiguous along the columns goes through
    shared memory.

    Attributes:
        columns: the kernel's axes that are the tile's columns, slowest first.
        panel: tiles along the rows that blocks take before they go on along the columns; a divisor of all tiles along the rows.
        realigned: buffers whose rows may begin anywhere, stored from a tile, too, in whole accesses.
        overlap: rows of a block that the next one has, too, so that each stores whole sectors of results whose rows may begin anywhere.
    """

    walk: ClassVar[str] = "crossing"

    columns: tuple[Axis, ...] = ()
    panel: int = 1
    realigned: frozenset[str] = frozenset()
    overlap: int = 0

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return self.lanes * self.width, self.groups * self.unroll

    def shape(self) -> str:
        rows, cols = self.tile
        return f"{self.unroll} per thread, {self.threads} threads, tiles of {rows} x {cols} exchanged"
