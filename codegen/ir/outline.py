"""What is left of a program whose kernels are compiled: what allocates for a call of it, and passes buffers to its entry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusepass.codegen.ir.program import Buffer, Program


@dataclass(frozen=True)
class Outline(Program):
    """A program without its kernels; its `updates` are those that were found to be possible when the kernels were there.

    Attributes:
        passed: names of the buffers that the entry takes.
    """

    passed: tuple[str, ...] = ()

    @cached_property
    def arguments(self) -> tuple[Buffer, ...]:
        return tuple(map(self.buffer, self.passed))
