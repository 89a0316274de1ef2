"""How several blocks share rows: the values that schedules of rows and of columns have for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CircularBuffer:
    """Shared memory through which the vectors of a block's rows pass in order.

    Attributes:
        places: of `unroll` vectors for each thread.
        ahead: how many places what is reduced is ahead of what is stored: at least those of a row, fewer than those of two.
        nearer: how many places ahead of its copies loaded vectors are brought to the L2 cache; 0 for not at all.
        waiting: vectors of what is the same for all rows that each thread holds in registers, evenly spread.
    """

    places: int
    ahead: int
    nearer: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class TeamPart:
    """What a block has of each row where the blocks of a team share rows: these are resident all at once, and go from row to row.

    Attributes:
        members: blocks of a team, two at least.
        part: vectors (columns in `Columns`) of a row that each member has.
        kept: of these, how many it keeps in shared memory, the first of them.
        held: how many of the next ones each thread holds in registers; what is left is read again.
        buffer: the circular buffer that its vectors pass through; None where each has a place of its own.
    """

    members: int
    part: int
    kept: int
    held: int = 0
    buffer: CircularBuffer | None = None

    def on_chip(self, lanes: int) -> int:
        """Vectors of its part of a row that a block of so many lanes need not read again."""
        return min(self.kept + self.held * lanes, self.part)


@dataclass(frozen=True)
class Pieces:
    """Pieces of the rows of each sample, for a kernel that reduces over its rows, too: a block has one, row by row.

    Attributes:
        count: pieces of each sample.
        over: rows of each sample.
        early: whether what a thread reads of its next row is under way while it has a row at hand.
    """

    count: int
    over: int
    early: bool = False

    @property
    def rows(self) -> int:
        """Rows of each piece but the last ones, which may have fewer."""
        return -(-self.over // self.count)
