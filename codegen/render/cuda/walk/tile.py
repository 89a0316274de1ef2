"""A kernel as a CUDA thread goes over it: flat axes split into vectors, and which of these are its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Atom, Axis
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.shares import shares_of_sums
from fusepass.codegen.ir.transpose import with_columns
from fusepass.codegen.ir.twopass import split_statistics
from fusepass.codegen.ir.vectors import across, backwards, coordinate_names, flatten, in_runs, split
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.spelling import Constant
from fusepass.codegen.schedule.plan import Keep, Schedule
from fusepass.codegen.schedule.plan_flat import Transposed
from fusepass.codegen.schedule.plan_output_tile import OutputTile, PlaneTile
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
