"""What a schedule is: how one kernel is laid on a GPU, as a frozen value.

Every kernel is a walk over *vectors* of `width` neighbouring elements along the axis that memory is contiguous in:

- `POINTWISE`: all rows as one flat axis; each thread handles `unroll` vectors, a block's width apart.
- `INNER`: vectors along the columns; `lanes` threads share a row, `groups` rows make a block.
- `OUTER`: vectors along the rows; `lanes` threads stand on neighbouring rows, `groups` threads share a row's columns.
- `TRANSPOSE`: pointwise, where operands are contiguous along different axes. Vectors along the rows, as `OUTER`; a block
  takes a tile of rows and columns, and what is contiguous along the columns goes through shared memory.
- `OUTPUT_TILE`: pointwise, with windows that overlap over the axes of an image. A block takes an output tile of an image (or of a few
  small ones): `lanes` threads along its rows, `groups` threads down, each with `unroll` rows of `width` results. What the
  windows load comes to shared memory first (`fusepass.codegen.ir.output_tiles`). Where windows have three axes, a block goes through
  planes, with such an output tile in each. Where it lies channels last, an image is a line of results and their channels, and threads read
  memory themselves (`fusepass.codegen.ir.line_windows`).

Between reduction loops over the same columns a row's values stay in registers, else in shared memory, else memory is read again.
A row that is too large for one block may be shared by a team of them (`INNER`), each with a slice of the columns.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from fusepass.codegen.ir.index import Axis, Index

_LINE = 8  # vectors of 16 bytes in a cache line


class Walk(enum.Enum):
    """Which axis a kernel's vectors run along."""

    POINTWISE = "pointwise"
    INNER = "inner"
    OUTER = "outer"
    TRANSPOSE = "crossing"
    OUTPUT_TILE = "patch"


class Keep(enum.Enum):
    """Where a row's values stay between two phases over its columns."""

    NOTHING = "not kept"
    REGISTERS = "registers"
    SHARED = "shared memory"


@dataclass(frozen=True)
class Schedule:
    """The shape of one launch; the module's text says what the walks mean.

    Attributes:
        width: elements per vector; a power of two that divides the vector axis, unless `ragged`. Where `OUTPUT_TILE`, perhaps a row of any length.
        unroll: vectors (columns where `OUTER` or `TRANSPOSE`, rows where `OUTPUT_TILE`) that a thread loads before it uses the first.
        lanes, groups: threads along the vector axis and across it; `POINTWISE` has one group.
        blocks: blocks of the launch.
        keep: where values stay between phases. With `REGISTERS`, `unroll` covers the whole row.
        packed: with `REGISTERS`: what stays is what was loaded, several numbers in a register.
        shared_bytes: dynamic shared memory of a block.
        aligned: whether vectors may be used on input buffers.
        wide: whether indices need 64 bits.
        once: buffers larger than the cache that nobody reads again soon.
        backwards: whether blocks run from the last to the first, to meet what the previous kernel left in the cache.
        ragged: `POINTWISE`: the last vector may have fewer elements.
        start: `INNER`: where rows begin in memory, which may be anywhere: a row's vectors then begin at the multiple of `width` at or
            before that place, and what its first and last one have of other rows is left out.
        run: with `start`, how many columns lie together in memory; each such run of a row begins anywhere. 0 where all of a row do.
        covers: with `start`, whether a row's vectors cover all of it, its ends among them; else these may be taken one by one.
        begin: with `run`, at a multiple of how many elements a run's first vector begins; 0 for those of a vector.
        apart: `POINTWISE`: vectors from one of a thread's vectors to the next, where that is not a block's width.
        columns: `TRANSPOSE`: the kernel's axes that are the tile's columns, slowest first.
        panel: `TRANSPOSE`: tiles along the rows that blocks take one after another before they go on along the columns;
            a divisor of all tiles along the rows.
        realigned: `TRANSPOSE`: buffers whose rows begin anywhere, so they are stored from a tile, too, in whole accesses.
        covered: `TRANSPOSE`: whether loads that cross, and of which rows begin anywhere, come by the aligned vectors that cover them.
        exchanges: whether what is contiguous along the other axis goes through shared memory: loads and stores where
            `TRANSPOSE`, stores where `INNER` or `OUTER`. Where `OUTPUT_TILE`, whether a block's results leave through it as they lie in memory.
        overlap: `OUTER`: rows of a block that the next one has, too, so that each stores whole sectors of results whose rows
            begin anywhere.
        image: `OUTPUT_TILE`: the axes down an image and along its rows.
        planes: `OUTPUT_TILE`: images that a block takes; of more than one, all of each.
        parts: `OUTPUT_TILE`: groups of threads that take the tiles of deep windows in turn, each for all results of the output tile.
        tile_height: `OUTPUT_TILE`: rows of results of an image that a block takes; the last of them are also others', where images do not divide.
        along: `OUTPUT_TILE`: where rows are reduced in a turn of their own, whose results go through shared memory: of how many neighbouring results
            a thread finds at once what a row comes to; 0 where each thread reduces the rows that it needs.
        direct: `OUTPUT_TILE`: whether threads read what windows go over themselves, as vectors along the second axis of the image: windows go along the
            first one, of which each thread has `unroll` neighbours.
        upright: `OUTPUT_TILE`: whether neighbouring threads stand below each other, not along a row; results then leave together.
        depth: `OUTPUT_TILE`: planes of results that a block goes through where windows have three axes, the last of them also others' where
            these do not divide; 0 where windows have two.
        members: blocks that share each row; with more than one, blocks are resident all at once and go from row to row.
        cluster: blocks that share each row, and show each other their states in their shared memory; each takes one row.
        part: vectors of a row that each member or block of a cluster has.
        kept: of these, how many it keeps in shared memory, the first of them.
        held: how many of the next ones each thread holds in registers; what is left is read again.
        fetches: whether what is kept of the next row is copied into places that the row at hand has left; blocks stay and go
            from row to row.
        circular_buffer: with a team, in how many places of `unroll` vectors for each thread the loaded vectors stand by turns; 0 for a place
            for each vector of a row.
        ahead: with a circular buffer, how many such places what is reduced is ahead of what is stored; at least those of `together` rows, less than
            those of one more.
        together: with a circular buffer, for how many rows a team meets at once.
        span: `OUTER`: so many neighbouring rows are parts of one: the columns' innermost axis lies along the rows.
        nearer: with a circular buffer, how many places ahead of its copies loaded vectors are brought to the L2 cache; 0 for not at all.
        waiting: with a circular buffer, how many vectors of what is the same for all rows each thread holds in registers, evenly spread.
        staged: with `REGISTERS`, for how many of the first steps what lies in `stages` is copied to shared memory while a row is reduced.
        stages: buffers that all rows meet along their columns, in the last phase alone.
        resident: blocks that a multiprocessor must have room for; 0 for what comes.
        pieces: `INNER`, of a kernel that reduces over its rows, too: in how many pieces of them, of each sample; a block takes one, row by row.
        over: with pieces, how many rows there are of each sample.
        early: with pieces, whether what a thread reads of its next row is under way while it has a row at hand.
        backward: with a running reduction, whether columns are counted, and run over, from their other end.
        general: whether sizes come at run time as far as may be (`fusepass.codegen.schedule_general`).
    """

    walk: Walk
    width: int
    unroll: int
    lanes: int
    groups: int
    blocks: int
    keep: Keep = Keep.NOTHING
    packed: bool = False
    shared_bytes: int = 0
    aligned: bool = True
    wide: bool = False
    once: frozenset[str] = frozenset()
    backwards: bool = False
    ragged: bool = False
    start: Index | None = None
    run: int = 0
    covers: bool = False
    begin: int = 0
    apart: int = 0
    columns: tuple[Axis, ...] = ()
    panel: int = 1
    realigned: frozenset[str] = frozenset()
    covered: bool = False
    exchanges: bool = False
    overlap: int = 0
    image: tuple[Axis, ...] = ()
    planes: int = 1
    parts: int = 1
    tile_height: int = 0
    along: int = 0
    direct: bool = False
    upright: bool = False
    depth: int = 0
    members: int = 1
    cluster: int = 1
    part: int = 0
    kept: int = 0
    held: int = 0
    fetches: bool = False
    circular_buffer: int = 0
    ahead: int = 0
    together: int = 1
    span: int = 1
    nearer: int = 0
    waiting: int = 0
    staged: int = 0
    stages: frozenset[str] = frozenset()
    resident: int = 0
    pieces: int = 0
    over: int = 0
    early: bool = False
    backward: bool = False
    general: bool = False

    def vectors(self, cols: int) -> int:
        """Vectors of a row of so many columns; the most, where rows begin anywhere."""
        if self.ends_apart:
            return cols // self.width
        return cols // (self.run or cols or 1) * self.vectors_of_run(cols)

    def vectors_of_run(self, cols: int) -> int:
        """The same of columns that lie together, of a row of so many."""
        before = self.begins_at - 1 if self.start is not None else 0  # elements of other rows, at most
        return -(-((self.run or cols) + before) // self.width)

    @property
    def begins_at(self) -> int:
        """Of how many elements the place is a multiple at which the first vector of a row, or run, begins that may begin anywhere."""
        return self.begin or self.width

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
        return self.start is not None and not (
            self.run or self.covers or self.fetches or self.members > 1 or self.general
        )

    @property
    def ends(self) -> int:
        """Elements of a row that begins anywhere before and after its whole vectors, at most; with ends apart, each is for a thread of its own."""
        return 2 * self.width - 2 if self.start is not None else 0

    @property
    def overhangs(self) -> bool:
        """Whether rows begin anywhere, and the vectors at both ends have elements of other rows, too."""
        return self.start is not None and not self.ends_apart

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block, where `TRANSPOSE`."""
        return self.lanes * self.width, self.groups * self.unroll

    @property
    def turned(self) -> bool:
        """Whether a thread's row is another one in each column, where `TRANSPOSE`: threads are turned by where the column begins in a
        sector, as a sector that two warps store parts of takes the memory longer than one that a warp stores."""
        return self.covered and self.overlap > 0 and self.width == 1 and self.unroll > 1 and not self.realigned

    @property
    def own_rows(self) -> int:
        """Rows from one block's first to the next one's, where `OUTER`."""
        return self.lanes * self.width - self.overlap

    @property
    def on_chip(self) -> int:
        """Vectors of its part of a row that a block of a team need not read again."""
        return min(self.kept + self.held * self.lanes, self.part)

    @property
    def iterations(self) -> int:
        """With a circular buffer, in how many steps a thread goes over its part of a row."""
        return -(-self.part // (self.unroll * (self.lanes if self.walk is Walk.INNER else self.groups)))

    @property
    def rows_of_piece(self) -> int:
        """Rows of each piece but the last ones, which may have fewer."""
        return -(-self.over // self.pieces)

    @property
    def strip(self) -> int:
        """Rows that a block has at once, where `OUTER`."""
        return self.lanes * self.width // self.span

    @property
    def threads(self) -> int:
        return self.lanes * self.groups

    def stands(self, thread: int) -> tuple[int, int, int]:
        """Where a thread stands, where `OUTPUT_TILE`: along the rows, down, and in which image."""
        groups = self.groups // self.planes // self.parts
        lane, rest = divmod(thread, self.groups) if self.upright else divmod(thread, self.lanes)[::-1]
        return lane, rest % groups, rest // groups % self.planes

    def __str__(self) -> str:
        vector = f"vectors of {self.width}" if self.width > 1 else "single elements"
        exchanged = ", stores exchanged" if self.exchanges else ""
        match self.walk:
            case Walk.POINTWISE:
                shape = f"{self.unroll} per thread, {self.threads} threads"
                shape += f", {self.apart} vectors apart" if self.apart else ""
                shape += ", the last one shorter" if self.ragged else ""
            case Walk.INNER:
                shared = f"teams of {self.members}, " if self.members > 1 else ""
                shared = f"clusters of {self.cluster}, " if self.cluster > 1 else shared
                partly = f" for {self.kept} of {self.part} vectors" if self.kept < self.part else ""
                partly += f" and {self.held} a thread in registers" if self.held else ""
                shape = f"{shared}{self.lanes} lanes x {self.groups} rows, {self.unroll} per thread at a time"
                fetched = ", fetched ahead" if self.fetches else ""
                fetched = f", a ring of {self.circular_buffer} places" if self.circular_buffer else fetched
                fetched += f", meetings for {self.together} rows" if self.together > 1 else ""
                fetched += f", {self.waiting} vectors of weights a thread in registers" if self.waiting else ""
                anywhere = ", rows begin anywhere" if self.start is not None else ""
                anywhere = f", runs of {self.run} begin anywhere" if self.run else anywhere
                packed = ", packed" if self.packed else ""
                fetched += f", weights of {self.staged} steps in shared memory" if self.staged else ""
                fetched += f", pieces of {self.rows_of_piece} rows" if self.pieces else ""
                fetched += ", the next one under way" if self.early else ""
                shape += f", {self.keep.value}{packed}{partly}{fetched}{exchanged}{anywhere}"
            case Walk.OUTER:
                shape = f"{self.lanes} lanes of rows x {self.groups} groups of columns, {self.unroll} columns at a time"
                shape += f", {self.keep.value}{', packed' if self.packed else ''}{exchanged}"
                shape += f", teams of {self.members}, strips of {self.strip} rows" if self.members > 1 else ""
                shape += f", a ring of {self.circular_buffer} places" if self.circular_buffer else ""
                shape += f", {self.overlap} rows also the next block's" if self.overlap else ""
            case Walk.TRANSPOSE:
                rows, cols = self.tile
                shape = f"{self.unroll} per thread, {self.threads} threads, tiles of {rows} x {cols} exchanged"
                shape += ", rows covered by aligned vectors" if self.covered else ""
            case Walk.OUTPUT_TILE:
                rows, cols = self.tile_height, self.lanes * self.width
                images = f"{self.planes} images of " if self.planes > 1 else ""
                parts = f"{self.parts} parts of " if self.parts > 1 else ""
                depth = f"{self.depth} x " if self.depth else ""
                leaving = ", read from memory" if self.direct else ""
                leaving += f", rows first by {self.along} results" if self.along else ""
                leaving += ", threads below each other" if self.upright else ""
                leaving += ", results leave together" if self.exchanges else ""
                shape = f"{self.unroll} per thread, {parts}{self.threads // self.parts} threads, patches of {images}{depth}{rows} x {cols}"
                shape += leaving
        backward = ", from the last column on" if self.backward else ""
        return f"{self.blocks} blocks, {vector}, {shape}{backward}"
