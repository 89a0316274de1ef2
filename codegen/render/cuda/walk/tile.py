"""A kernel as a CUDA thread goes over it: flat axes split into vectors, which of these are its own, and where its output tile lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Atom, Axis
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.shares import shares_of_sums
from fusepass.codegen.ir.transpose import with_columns
from fusepass.codegen.ir.twopass import split_statistics
from fusepass.codegen.ir.vectors import across, backwards, coordinate_names, flatten, in_runs, split
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import Constant
from fusepass.codegen.schedule.plan import Keep, Schedule
from fusepass.codegen.schedule.plan_flat import Transposed
from fusepass.codegen.schedule.plan_output_tile import DeepTile, OutputTile, PlaneTile, WindowTile
from fusepass.codegen.schedule.plan_rows import Columns, Rows


@dataclass(frozen=True)
class Arranged:
    """A kernel on flat axes, its vector axis split into vectors and their lanes.

    Attributes:
        axis: what vectors run along; `row` or `col`; None where there is no such axis.
        lane: the position in a vector.
        coordinates: names of the original axes' positions.
        image: the two axes that windows walk over, of an `OutputTile`; they are no rows then.
        through: the axis of the planes that a block goes through there, if there are; no row either.
        anywhere: whether vectors may begin anywhere on their axis.
    """

    kernel: Kernel
    row: Axis | None
    col: Axis | None
    axis: Axis | None
    lane: Axis
    coordinates: dict[Atom, str]
    image: tuple[Axis, ...] = ()
    through: Axis | None = None
    anywhere: bool = False


def arrange(kernel: Kernel, program: Program, schedule: Schedule) -> Arranged:
    """`kernel` of `program` as `schedule` walks it."""
    builder = Builder()
    rows, start = isinstance(schedule, Rows), schedule.start if isinstance(schedule, Rows) else None
    if isinstance(schedule, Rows) and schedule.backward:
        kernel = backwards(kernel, builder)
    if isinstance(schedule, Transposed):
        kernel = with_columns(kernel, program, schedule.columns)
    image = schedule.image if isinstance(schedule, OutputTile) else ()
    through = kernel.rows[-3] if isinstance(schedule, PlaneTile) else None
    kernel = replace(kernel, rows=tuple(axis for axis in kernel.rows if axis not in (*image, through)))
    if isinstance(schedule, Columns) and schedule.span > 1:
        kernel = across(kernel)
    coordinates = coordinate_names(kernel)
    kernel = flatten(kernel, builder)
    if start and start.run:
        kernel = in_runs(kernel, start.run, builder)
    stays = schedule.keep is not Keep.NOTHING
    if stays and kernel.team is None:  # a team meets once for each reduction loop
        kernel = shares_of_sums(split_statistics(kernel, builder), program, builder)
    row = kernel.rows[0] if kernel.rows else None
    col = kernel.cols[-1] if kernel.cols else None
    axis = image[1] if image else col if rows else row
    lane = Axis("lane of the vector", schedule.width)
    anywhere = start is not None or (bool(image) and image[1].size % schedule.width > 0)
    if axis is not None:
        kernel = split(kernel, axis, lane, builder, anywhere=anywhere)
    return Arranged(kernel, row, col, axis, lane, coordinates, image, through, anywhere)


@dataclass(frozen=True)
class Tile:
    """How a thread goes over the vectors (`Columns`: columns) of a phase: number ``start + u * step`` of `count`.

    Attributes:
        axis: the axis they lie on; the position on it is the number times `scale`.
        variable: the C name of that position.
        loop: whether one pass over `u` is not enough.
        tail: whether some threads stand past the end.
        once: each thread has one vector, whose position is defined before all phases.
        first: number of the first vector of those meant.
        base: with a team, the number of the block's first vector in the row; other numbers count from it.
        limit: the C text of the count, where a member of a team may have less; else empty.
    """

    axis: Axis | None
    variable: str
    start: str | Constant
    step: int
    count: int
    scale: int
    loop: bool
    tail: bool
    once: bool
    first: int = 0
    base: str = ""
    limit: str = ""

    @property
    def end(self) -> str:
        """The C text of one past the last number."""
        return self.limit or free(self.count)

    @property
    def last(self) -> str:
        """The C text of the last number."""
        return f"{self.limit} - 1" if self.limit else free(self.count - 1)


@dataclass(frozen=True)
class OutputTilePlace:
    """The C texts of these numbers; empty where a block has one image, or one row of threads, and where there are no planes.

    Attributes:
        first_image, first_plane, first_row, first_column: the block's first image, and the first of its planes, rows and columns.
        image: a thread's image.
        top_row: a thread's first row.
        plane, row_in_tile, column_in_tile: a thread's image, first row and first column, counted from the block's.
        number: which of an image's output tiles the block has.
        before: how many of the first rows and columns of the output tile are those of the output tile before, too.
        above: how many of a thread's first rows are those of the thread above, too.
    """

    first_image: Constant
    image: Constant
    first_plane: str
    first_row: str
    first_column: str
    top_row: str
    plane: str
    row_in_tile: str
    column_in_tile: str
    number: str
    before: tuple[str, str]
    above: str

    @property
    def own(self) -> tuple[str, str]:
        """The first row and column of a thread's results that no other one has."""
        rows, columns = self.before
        if rows != "0" and self.row_in_tile:
            rows = f"{rows} - {self.row_in_tile}"
        if self.above != "0":
            rows = self.above if rows == "0" else f"fp::greatest({rows}, {self.above})"
        if columns != "0":
            columns = f"{columns} - {self.column_in_tile}"
        return rows, columns


def output_tile_place(
    arranged: Arranged,
    plan: OutputTile,
    top: Scope,
    number: str,
    constant: Callable[[str, str], str],
    read_constant: Callable[[str, Callable[[], str] | str], Constant],
) -> OutputTilePlace:
    """Defines the image and the column of a thread in `top`; block `number`; `constant` declares a name with a value, and `read_constant` one
    that is declared if anything reads it."""
    y, x = arranged.image
    turns = plan.parts if isinstance(plan, DeepTile) else 1
    upright = isinstance(plan, WindowTile) and plan.upright
    groups, cols = plan.groups // plan.planes // turns, plan.lanes * plan.width
    image, first_row, first_column, row_in_tile, plane = number, "0", "0", "", ""
    tile_heights, parts = -(-y.size // plan.tile_height), -(-x.size // cols)
    numbers, rows_before, columns_before, above = list[str](), "0", "0", "0"
    along = f"threadIdx.x / {plan.groups}" if upright else f"threadIdx.x % {plan.lanes}"
    lane = constant("lane", along if plan.groups > 1 else "threadIdx.x")
    down = f"threadIdx.x % {plan.groups}" if upright else f"threadIdx.x / {plan.lanes}"
    column = column_in_tile = f"{lane} * {plan.width}" if plan.width > 1 else lane
    if parts > 1:
        image = constant("strip", f"fp::div({number}, {parts})")
        numbers.append(f"fp::mod({number}, {parts})")
        first_column = constant("first_column", _start(numbers[-1], cols, x.size))
        columns_before = _before(numbers[-1], cols, x.size, first_column)
        column_in_tile = constant("column", column)
        column = f"{first_column} + {column_in_tile}"
    column = constant(x.name, column)
    top.define_axis(x, column)
    if tile_heights > 1:
        tile_height = f"fp::mod({image}, {tile_heights})"
        numbers.append(f"{tile_height} * {parts}" if parts > 1 else tile_height)
        first_row = constant("first_row", _start(tile_height, plan.tile_height, y.size))
        rows_before = _before(tile_height, plan.tile_height, y.size, first_row)
        image = f"fp::div({image}, {tile_heights})"
    first_plane = ""
    if arranged.through is not None and isinstance(plan, PlaneTile):
        pieces = -(-arranged.through.size // plan.depth)
        first_plane = "0"
        if pieces > 1:
            first_plane = constant(
                "first_plane", _start(f"fp::mod({image}, {pieces})", plan.depth, arranged.through.size)
            )
            image = f"fp::div({image}, {pieces})"
    top_row = first_row
    if groups > 1:
        group = f"int({down})" + (f" % {groups}" if plan.planes * turns > 1 else "")
        top_row = row_in_tile = constant("group", _start(group, plan.unroll, plan.tile_height))
        above = _before(group, plan.unroll, plan.tile_height, row_in_tile)
        if tile_heights > 1:
            top_row = constant("top_row", f"{first_row} + {row_in_tile}")
    if plan.planes > 1:
        image = f"{image} * {plan.planes}"
        which = f"{down} / {groups}" + (f" % {plan.planes}" if turns > 1 else "")
        plane = constant("plane", which)
    first_image = at_image = read_constant("first_image", image)
    if arranged.row is not None:
        at_image = read_constant("row", lambda: f"{first_image} + {plane}" if plane else str(first_image))
        top.define_axis(arranged.row, at_image)
    in_output_tile = column_in_tile if parts > 1 else column
    return OutputTilePlace(
        first_image,
        at_image,
        first_plane,
        first_row,
        first_column,
        top_row,
        plane,
        row_in_tile,
        in_output_tile,
        number=" + ".join(numbers) or "0",
        before=(rows_before, columns_before),
        above=above,
    )


def _before(which: str, length: int, count: int, start: str) -> str:
    """How many points of a part that begins at `start` are those of the part before, too."""
    return "0" if count % length == 0 else f"{which} * {length} - {start}"


def _start(which: str, length: int, count: int) -> str:
    """Where a part of so many of `count` points begins; the last one does so earlier where it would end behind them."""
    begin = f"{which} * {length}" if length > 1 else which
    return begin if count % length == 0 else f"fp::least({begin}, {count - length})"
