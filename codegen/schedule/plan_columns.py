"""Schedules of kernels that reduce along columns which lie apart in memory, while neighbouring rows lie together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusepass.codegen.schedule.plan import Keep, Merging, Schedule
from fusepass.codegen.schedule.plan_team import TeamPart


@dataclass(frozen=True)
class Columns(Schedule):
    """Vectors along the rows: `lanes` threads have neighbouring rows, `groups` threads share a row's columns, `unroll` of them at a time.

    Attributes:
        keep: where values stay between phases. In registers, `unroll` covers the whole row.
        exchanges: whether stores that are contiguous along the columns go through shared memory.
        overlap: rows of a block that the next one has, too, so that each stores whole sectors of results whose rows may begin anywhere.
        team: blocks that share strips of rows, through a circular buffer; None where each has rows to itself.
        span: so many neighbouring rows are parts of one: the columns' innermost axis lies along the rows.
    """

    walk: ClassVar[str] = "outer"

    keep: Keep = Keep.NOTHING
    exchanges: bool = False
    overlap: int = 0
    team: TeamPart | None = None
    span: int = 1

    def vectors_of_thread(self, cols: int) -> int:
        return -(-cols // self.groups)

    @property
    def merging(self) -> Merging:
        return Merging(warps=self.groups > 1, states=self.width)

    @property
    def reads_runs(self) -> bool:
        return True

    @property
    def tears(self) -> bool:
        return not self.overlap and not self.exchanges

    @property
    def shared_rows(self) -> float:
        return self.overlap / (self.lanes * self.width)

    @property
    def strip(self) -> int:
        """Rows that a block has at once."""
        return self.lanes * self.width // self.span

    @property
    def iterations(self) -> int:
        """With a team, in how many steps a thread goes over its part of a row."""
        assert self.team is not None
        return -(-self.team.part // (self.unroll * self.groups))

    def shape(self) -> str:
        shape = f"{self.lanes} lanes of rows x {self.groups} groups of columns, {self.unroll} columns at a time"
        shape += f", {self.keep.value}" + (", stores exchanged" if self.exchanges else "")
        shape += f", teams of {self.team.members}, strips of {self.strip} rows" if self.team else ""
        shape += f", a ring of {self.buffer.places} places" if self.buffer else ""
        return shape + (f", {self.overlap} rows also the next block's" if self.overlap else "")
