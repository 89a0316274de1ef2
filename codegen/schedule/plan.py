"""What every schedule of a memory-bound kernel is: how its launch is laid on a GPU, as a frozen value.

Every kernel is a walk over *vectors* of `width` neighbouring elements along the axis that memory is contiguous in. Each walk has
a type of its own, with what means something there:

| type | walk |
|---|---|
| `plan_flat.Pointwise` | all rows as one flat axis |
| `plan_flat.Transposed` | tiles of rows and columns, transposed through shared memory |
| `plan_rows.Rows` | along the columns: `lanes` threads share a row |
| `plan_rows.Columns` | along the rows: neighbouring threads have neighbouring rows |
| `plan_output_tile.OutputTile` | output tiles of an image that windows overlap in |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar


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
        part: vectors of a row that each member has.
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


P = TypeVar("P", covariant=True)


@dataclass(frozen=True)
class Ranked(Generic[P]):
    """A plan and the seconds that it takes by estimate."""

    plan: P
    seconds: float


class Keep(enum.Enum):
    """Where a row's values stay between two phases over its columns; else memory is read again."""

    NOTHING = "not kept"
    REGISTERS = "registers"
    """As they are computed with; a thread's vectors are all that it has of the row."""
    PACKED = "registers, packed"
    """As they were loaded, several numbers in a register."""
    SHARED = "shared memory"
    FETCHED = "shared memory, fetched ahead"
    """Blocks stay, and copy the next row to where the row at hand has been."""

    @property
    def in_registers(self) -> bool:
        return self in (Keep.REGISTERS, Keep.PACKED)

    @property
    def in_shared(self) -> bool:
        return self in (Keep.SHARED, Keep.FETCHED)


@dataclass(frozen=True)
class Memory:
    """How a launch addresses memory and uses the caches.

    Attributes:
        aligned: whether vectors may be used on input buffers.
        wide: whether indices need 64 bits.
        once: buffers larger than the cache that nobody reads again soon.
        backwards: whether blocks run from the last to the first, to meet what the previous kernel left in the cache.
    """

    aligned: bool = True
    wide: bool = False
    once: frozenset[str] = frozenset()
    backwards: bool = False


@dataclass(frozen=True)
class Merging:
    """How threads merge the states of reductions.

    Attributes:
        steps: in which lanes of a warp do so.
        warps: whether warps meet for it.
        states: of a thread, for each reduction.
    """

    steps: float = 0.0
    warps: bool = False
    states: int = 1


@dataclass(frozen=True)
class Schedule:
    """What all walks have.

    Attributes:
        walk: the walk's name in reports and in generated sources.
        width: elements per vector.
        unroll: vectors, columns or rows of results that a thread loads before it uses the first.
        lanes, groups: threads along the vector axis and across it.
        blocks: blocks of the launch.
        shared_bytes: dynamic shared memory of a block.
        resident: blocks that a multiprocessor must have room for; 0 for what comes.
        general: whether sizes come at run time as far as may be (`fusepass.codegen.schedule_general`).
    """

    walk: ClassVar[str]

    width: int
    unroll: int
    lanes: int
    groups: int
    blocks: int
    shared_bytes: int = 0
    resident: int = 0
    memory: Memory = Memory()
    general: bool = False

    @property
    def threads(self) -> int:
        return self.lanes * self.groups

    # ---- what few walks have: a field or a property of theirs

    @property
    def keep(self) -> Keep:
        """Where a row's values stay between phases."""
        return Keep.NOTHING

    @property
    def team(self) -> TeamPart | None:
        """Blocks that share rows."""
        return None

    @property
    def buffer(self) -> CircularBuffer | None:
        """What the vectors of a team's rows pass through."""
        return self.team.buffer if self.team else None

    @property
    def exchanges(self) -> bool:
        """Whether results leave through shared memory."""
        return False

    @property
    def overlap(self) -> int:
        """Rows of a block that the next one has, too."""
        return 0

    @property
    def own_rows(self) -> int:
        """Elements along the vectors from one block's first to the next one's."""
        return self.lanes * self.width - self.overlap

    # ---- what the cost model asks

    def vectors_of_thread(self, cols: int) -> int:
        """That a thread loads of a row of so many columns, or of all that it has."""
        return self.unroll

    @property
    def merging(self) -> Merging:
        """How threads merge what they reduced."""
        return Merging(warps=self.groups > 1)

    @property
    def reads_runs(self) -> bool:
        """Whether neighbouring threads read pieces of rows or of columns, which may be shorter than cache lines."""
        return False

    @property
    def tears(self) -> bool:
        """Whether each block stores what it has of results that may begin anywhere, so that two write parts of a sector."""
        return False

    @property
    def shared_rows(self) -> float:
        """What blocks read that others read as well, as a part of all."""
        return 0.0

    @property
    def spread(self) -> float:
        """How many times the distance of a thread's vectors was doubled."""
        return 0.0

    def shape(self) -> str:
        """What a block and its threads have, for reports."""
        raise NotImplementedError

    def __str__(self) -> str:
        vector = f"vectors of {self.width}" if self.width > 1 else "single elements"
        return f"{self.blocks} blocks, {vector}, {self.shape()}"
