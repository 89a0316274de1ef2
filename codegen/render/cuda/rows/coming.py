"""What a circular buffer's threads load for later steps, some of it once for all rows."""

from __future__ import annotations

from dataclasses import dataclass

from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.cuda.walk.loads import Ahead


@dataclass(frozen=True)
class Waiting(Ahead):
    """What stays in an array of vectors from before the first row on.

    Attributes:
        place: the C text of the step's first vector there.
    """

    place: str = ""

    def of_step(self, frame: Frame) -> str:
        return f"{self.name}[{self.place} + {frame.u}]" if frame.unroll > 1 else f"{self.name}[{self.place}]"


@dataclass(frozen=True)
class Coming(Ahead):
    """A load for a later step; of some steps of a row, what `waiting` has for all rows.

    Attributes:
        waiting: that, where there is any.
        held: the C condition that the step is one of those.
    """

    waiting: Waiting | None = None
    held: str = ""

    def of_step(self, frame: Frame) -> str:
        loaded = super().of_step(frame)
        return f"({self.held} ? {self.waiting.of_step(frame)} : {loaded})" if self.waiting else loaded
