"""Schedules of kernels that reduce: along contiguous rows, or along columns which lie apart in memory, while neighbouring rows lie together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2
from typing import ClassVar

from fusepass.codegen.ir.index import Index
from fusepass.codegen.schedule.plan import Keep, Merging, Pieces, Schedule, TeamPart

_LINE = 8  # vectors of 16 bytes in a cache line


@dataclass(frozen=True)
class Start:
    """Where rows begin in memory that may begin anywhere: a row's vectors then begin at the multiple of `width` at or before that place, and
    what its first and last one have of other rows is left out.

    Attributes:
        index: of a row's first element.
        run: how many columns lie together in memory; each such run of a row begins anywhere. 0 where all of a row do.
        covers: whether a row's vectors cover all of it, its ends among them; else these may be taken one by one.
        begin: at a multiple of how many elements a run's first vector begins; 0 for those of a vector.
    """

    index: Index
    run: int = 0
    covers: bool = False
    begin: int = 0


@dataclass(frozen=True)
class Rows(Schedule):
    """Vectors along the columns: `lanes` threads share a row, `groups` rows make a block. `width` divides a row unless it has a `start`.

    Attributes:
        keep: where values stay between phases. In registers, `unroll` covers the whole row.
        start: where rows begin, where that may be anywhere.
        exchanges: whether stores that are contiguous along the rows go through shared memory.
        split: how blocks share rows; None where each has rows to itself.
        backward: with a running reduction, whether columns are counted, and run over, from their other end.
    """

    walk: ClassVar[str] = "inner"

    keep: Keep = Keep.NOTHING
    start: Start | None = None
    exchanges: bool = False
    split: TeamPart | Pieces | None = None
    backward: bool = False

    @property
    def team(self) -> TeamPart | None:
        return self.split if isinstance(self.split, TeamPart) else None

    @property
    def pieces(self) -> Pieces | None:
        return self.split if isinstance(self.split, Pieces) else None

    @property
    def run(self) -> int:
        """Columns that lie together in memory, of which each run begins anywhere; 0 where all of a row do."""
        return self.start.run if self.start else 0

    @property
    def covering(self) -> Rows:
        """The same, with vectors that cover rows that begin anywhere."""
        return replace(self, start=replace(self.start, covers=True)) if self.start else self

    def vectors(self, cols: int) -> int:
        """Vectors of a row of so many columns; the most, where rows begin anywhere."""
        if self.ends_apart:
            return cols // self.width
        return cols // (self.run or cols or 1) * self.vectors_of_run(cols)

    def vectors_of_run(self, cols: int) -> int:
        """The same of columns that lie together, of a row of so many."""
        before = self.begins_at - 1 if self.start else 0  # elements of other rows, at most
        return -(-((self.run or cols) + before) // self.width)

    @property
    def begins_at(self) -> int:
        """Of how many elements the place is a multiple at which the first vector of a row, or run, begins that may begin anywhere."""
        return (self.start.begin if self.start else 0) or self.width

    @property
    def unit(self) -> int:
        """With ends apart, a row's whole vectors begin at a multiple of so many elements in memory: of those of a cache line, so that warps
        touch no line in part that they need not, or of fewer where the row has too few threads for what comes before and after."""
        unit = self.width
        while unit < _LINE * self.width and 2 * unit + self.width - 2 <= self.lanes:
            unit *= 2
        return unit

    @property
    def ends_apart(self) -> bool:
        """Whether rows begin anywhere, and the elements before and after their whole vectors are taken one by one."""
        covered = self.start is None or self.start.run > 0 or self.start.covers
        return not (covered or self.keep is Keep.FETCHED or self.general)

    @property
    def ends(self) -> int:
        """Elements of a row that begins anywhere before and after its whole vectors, at most; with ends apart, each is for a thread of its own."""
        return 2 * self.width - 2 if self.start else 0

    @property
    def overhangs(self) -> bool:
        """Whether rows begin anywhere, and the vectors at both ends have elements of other rows, too."""
        return self.start is not None and not self.ends_apart

    def vectors_of_thread(self, cols: int) -> int:
        members = self.team.members if self.team else 1
        return -(-self.vectors(cols) // (self.lanes * members))

    @property
    def merging(self) -> Merging:
        return Merging(log2(min(self.lanes, 32)), warps=self.lanes > 32)

    @property
    def reads_runs(self) -> bool:
        return True

    @property
    def iterations(self) -> int:
        """With a team, in how many steps a thread goes over its part of a row."""
        assert self.team is not None
        return -(-self.team.part // (self.unroll * self.lanes))

    def shape(self) -> str:
        team, buffer = self.team, self.buffer
        shared = f"teams of {team.members}, " if team else ""
        kept, _, how = self.keep.value.partition(", ")
        kept += f" for {team.kept} of {team.part} vectors" if team and team.kept < team.part else ""
        kept += f" and {team.held} a thread in registers" if team and team.held else ""
        kept += f", {how}" if how else ""
        if buffer:
            kept += f", a ring of {buffer.places} places"
            kept += f", {buffer.waiting} vectors of weights a thread in registers" if buffer.waiting else ""
        kept += f", pieces of {self.pieces.rows} rows" if self.pieces else ""
        kept += ", the next one under way" if self.pieces and self.pieces.early else ""
        kept += ", stores exchanged" if self.exchanges else ""
        kept += f", runs of {self.run} begin anywhere" if self.run else ", rows begin anywhere" if self.start else ""
        shape = f"{shared}{self.lanes} lanes x {self.groups} rows, {self.unroll} per thread at a time, {kept}"
        return shape + (", from the last column on" if self.backward else "")


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
