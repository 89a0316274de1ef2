"""Loops of contractions, which most lines are in: where one has a single point, the lines are those of that point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusepass.codegen.render.spelling import block

UNROLL = "#pragma unroll"


@dataclass(frozen=True)
class Loop:
    """A loop with a pragma over a number of points. Its text is the point at hand: the variable, or 0 where there is no other point."""

    variable: str
    count: int

    def __str__(self) -> str:
        return self.variable if self.count > 1 else "0"

    def over(self, lines: Sequence[str], pragma: str = UNROLL) -> list[str]:
        """`lines`, which name the point by the loop, for each point."""
        if self.count == 1:
            return list(lines)
        head = f"for (int {self.variable} = 0; {self.variable} < {self.count}; ++{self.variable})"
        return [pragma, *block(head, lines)]
