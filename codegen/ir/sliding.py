"""How windows along a line share what they have in common (van Herk 1992; Gil and Werman 1993), and what a thread does to reduce them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.output_tiles import TileWindow, finds_pairs
from fusepass.codegen.ir.staged_windows import TileShape


@dataclass(frozen=True)
class Line:
    """`count` windows of `size` parts: part t of window u is number u * `step` + t * `apart` of what lies along the line.

    Windows that meet the same numbers go in groups of `together`, as far as there are so many. A group first reduces the parts that all
    of its windows have; to these each window adds those before, which the one before it begins with, and those behind.
    """

    count: int
    step: int
    apart: int
    size: int

    @property
    def together(self) -> int:
        """Windows of a group, so that the fewest reductions are left."""
        fitting = [many for many in range(1, self._alike[0] + 1) if (many - 1) * self._step < self.size]
        return min(fitting, key=self._reductions)

    @property
    def reductions(self) -> int:
        """How many times two numbers become one."""
        return self._reductions(self.together)

    @property
    def _step(self) -> int:
        """Parts from a window to the next one that meets the same numbers."""
        return self.step // gcd(self.step, self.apart)

    @property
    def _alike(self) -> list[int]:
        """How many windows meet the same numbers as the first one does, the second one, and so on."""
        classes = self.apart // gcd(self.step, self.apart)
        return [-(-(self.count - first) // classes) for first in range(min(classes, self.count))]

    def _reductions(self, together: int) -> int:
        groups = (divmod(alike, together) for alike in self._alike)
        return sum(whole * self._of_group(together) + (self._of_group(rest) if rest else 0) for whole, rest in groups)

    def _of_group(self, together: int) -> int:
        others = (together - 1) * self._step  # parts before those that all have, and as many behind them
        return self.size - 1 + (others + together - 2 if together > 1 else 0)


@dataclass(frozen=True)
class Reduced:
    """How a window comes to the `unroll` rows of `width` results of a thread; if it is separable, along each row of a tile, then down the rows.

    Attributes:
        along: neighbouring results whose shares of a row are found at once.
        lanes: neighbouring results that are reduced at once: maxima of 16-bit numbers are found in pairs.
        everywhere: whether what is not there is reduced like anything else, as tiles have numbers in its place that change nothing.
    """

    window: TileWindow
    unroll: int
    width: int
    along: int
    lanes: int
    everywhere: bool

    @property
    def states(self) -> int:
        """What a thread's results are made of."""
        return self.unroll * self.width // self.lanes

    @property
    def points(self) -> Line:
        """What of a row makes the row's share of each result, or of each few."""
        (_, across), below = self.window.taps, self.window.below[0]
        step, apart = below.steps[1] * self.lanes, below.dilation[1] or 1
        return Line(self.along // self.lanes, step, apart, across.size)

    @property
    def rows(self) -> Line:
        """What of the rows makes results."""
        (down, _), below = self.window.taps, self.window.below[0]
        return Line(self.unroll, below.steps[0], below.dilation[0] or 1, down.size)

    @property
    def shares_sums(self) -> bool:
        """Whether sums of the same points are added up in an order of their own for each of a thread's results."""
        shared = self.points.together > 1 or self.rows.together > 1
        return self.window.separable and shared and self.window.window.op is ReduceOp.SUM

    @property
    def reductions(self) -> int:
        """How many times two numbers, or pairs of them, become one in a thread that finds what it needs of rows itself."""
        rows, _ = self.window.below[0].span(self.window.taps, (self.unroll, 1))
        return rows * self.points.reductions + self.reductions_down

    @property
    def reductions_down(self) -> int:
        """The same, down the rows."""
        return self.width // self.lanes * self.rows.reductions


def reduced(window: TileWindow, shapes: Sequence[TileShape], unroll: int, width: int, along: int = 0) -> Reduced:
    """The way of a window whose input has tiles of these shapes; `along` if other threads find what rows come to."""
    alone = window.separable and window.plain
    everywhere = alone and not shapes[0].run
    along = along or width
    paired = alone and finds_pairs(window.window, window.below[0].load) and width % 2 == 0 and along % 2 == 0
    return Reduced(window, unroll, width, along, 2 if paired else 1, everywhere)
