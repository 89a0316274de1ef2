"""How windows over three axes go through the planes of their input."""

from __future__ import annotations

from dataclasses import dataclass

from fusepass.codegen.ir.index import Axis


@dataclass(frozen=True)
class Planes:
    """How windows go through the planes of their input, and results through theirs.

    Attributes:
        axis: of the results.
        tap: of the window.
        step: planes further on for the next result.
        dilation: the same for the next point of the window.
    """

    axis: Axis
    tap: Axis
    step: int
    dilation: int

    @property
    def span(self) -> int:
        """Planes below one result."""
        return (self.tap.size - 1) * self.dilation + 1

    @property
    def open(self) -> int:
        """Results that a thread has begun and not finished while it takes planes one after another."""
        return (self.span - 1) // self.step + 1

    @property
    def iteration(self) -> int:
        """Planes of an iteration, in which a result begins and another one is finished."""
        return min(self.step, self.span)

    def iterations(self, results: int) -> int:
        """In how many iterations so many results, one after another, are finished."""
        return results + self.open - 1

    def point(self, result: int, plane: int) -> int | None:
        """Which point of the window plane number `plane` of an iteration is, for the result that began `result` iterations before; None where none."""
        at, apart = divmod(result * self.step + plane, self.dilation)
        return at if not apart and at < self.tap.size else None
