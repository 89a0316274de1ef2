"""What the parts of a CUDA kernel's writer share.

A *lane of the vector* (``v``) is an element of a vector; a *step* (``u``) is one of the vectors, or columns, that a
thread handles at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fusepass.codegen.ir.dataflow import Dataflow
from fusepass.codegen.ir.digits import few_digits
from fusepass.codegen.ir.expr import Builder, Expr, Gather, Load, Prefix, ReductionResult
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.ir.vectors import Picked, access_along, begins_with, is_vector, picked, start_of
from fusepass.codegen.render.cuda.walk.tile import Arranged, OutputTilePlace, Tile
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import UNROLL, Constant, Identifiers, block, loop, where
from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.plan_flat import Pointwise, Transposed
from fusepass.codegen.schedule.plan_output_tile import OutputTile, WindowTile
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from fusepass.codegen.schedule.shape import ACCESS
from fusepass.errors import RenderError


@dataclass(frozen=True)
class Number:
    """That of a vector or column, as its text: where a thread's part begins, and how far the step at hand is from there, if it is."""

    start: str | Constant
    step: str

    def __str__(self) -> str:
        start = str(self.start)
        return " + ".join(part for part in (start if start != "0" else "", self.step) if part) or "0"


@dataclass(frozen=True)
class Around:
    """Lines around the loop over the lanes of a vector, and around that over steps."""

    before_lanes: list[str]
    after_lanes: list[str]
    before_steps: list[str]
    after_steps: list[str]


class Pool:
    """A block's dynamic shared memory, whose parts lie one after another."""

    def __init__(self, name: str, number: Callable[[int], str] = str) -> None:
        """`name` in C; `number` prints where a part begins."""
        self.name, self.used, self._number = name, 0, number
        self.declaration = f"extern __shared__ __align__(16) unsigned char {name}[];"

    def take(self, nbytes: int) -> str:
        """Where the next `nbytes`, a multiple of 16, begin."""
        start = f"{self.name} + {self._number(self.used)}" if self.used else self.name
        self.used += nbytes
        return start

    def array(self, element: str, name: str, nbytes: int) -> str:
        """The line that declares `name` as their place."""
        return f"{element}* const {name} = reinterpret_cast<{element}*>({self.take(nbytes)});"

    def check(self, kernel: str, room: int, used: int = 0) -> None:
        """Raises RenderError where the schedule of that kernel has less `room` than was taken, or is `used`."""
        if max(self.used, used) > room:
            raise RenderError(f"{kernel} has {max(self.used, used)} bytes in shared memory, not {room}")


class Frame:
    """What the parts of a kernel's writer share."""

    def __init__(
        self, arranged: Arranged, program: Program, schedule: Schedule, pointers: dict[str, str], names: Identifiers
    ) -> None:
        self.arranged, self.kernel, self.lane = arranged, arranged.kernel, arranged.lane
        self.program, self.schedule, self.pointers, self.names = program, schedule, pointers, names
        # What only some schedules have: threads along rows, where a row's values stay, the members of a team, and blocks that overlap.
        self.in_rows = schedule if isinstance(schedule, Rows) else None
        self.keep = schedule.keep
        self.of_block = schedule.team
        self.overlap = schedule.overlap
        self.own_rows = schedule.own_rows
        self.start = schedule.start if isinstance(schedule, Rows) else None
        self.overhangs = isinstance(schedule, Rows) and schedule.overhangs
        self.ends_apart = isinstance(schedule, Rows) and schedule.ends_apart
        self.index_type = "int64_t" if schedule.memory.wide else "int"
        self.dataflow = Dataflow()
        # Of values that are written out differently; they live as long as what is known of them.
        self.builder = Builder()
        self.printer = Printer(names, pointers, self.index_type, general=schedule.general, branches=False)
        self.printer.coordinates = arranged.coordinates
        self.printer.few = few_digits(arranged.kernel, program)
        if arranged.kernel.reduction_loops and arranged.col is not None:
            inside = {arranged.lane} if self.in_rows else set()
            self.printer.along = frozenset({arranged.col} | inside)
        self.printer.window_vector = self._window_vector
        self.printer.lane_of = self._lane_of
        self.top = Scope(self.printer)
        self.u, self.v = names.exact("u"), names.exact("v")
        self.live = ""  # the condition that a thread stands on a row of its own, where that can fail
        # Of a block that exchanges a tile: its first points with a plus sign (along) or without (across), none for 0;
        # and a thread's vector along and point across.
        self.first_along = self.first_across = ""
        self.place: tuple[str, str | Constant] = "", ""
        self.first_of_row = ""  # the condition that a thread is the first of those on a row, where there are more
        # The run of columns in which a vector lies.
        self.run = names.exact("run") if self.start and self.start.run else ""
        self.own_row = ""  # which of its block's rows a thread's first one is, where blocks overlap
        self.team = ""  # of a block in a team
        # Of a block that goes from row to row: the row at hand, the head of the loop, the first row, and how far the next one is.
        self.row = self.row_loop = self.first_row = self.row_step = ""
        # Of a block that has a piece of the rows: its number among those of a sample, the sample's first row, one past the piece's last one,
        # and which of the block's rows at once a thread has.
        self.piece, self.sample, self.end_of_piece, self.group = "", "", "", "0"
        self.lane_of_rows = ""  # of a team's strip of rows, which vector of these a thread has
        self.iteration = ""  # with a circular buffer, the row at hand, or less than 0 before the first one
        self.output_tile: OutputTilePlace | None = None
        # Whether results of an output tile that two threads compute may differ in rounding, so that one stores them.
        self.apart = False
        # Of a block's part of a row, after what it keeps in shared memory: what it holds in registers, and what is left.
        self.held: Tile | None = None
        self.rest: Tile | None = None
        self.unroll = schedule.unroll  # steps at a time, in the stretch at hand
        self.head = ""  # how many elements of the row come before its first whole vector, where ends are apart
        self.end = ""  # which of the row's elements at its ends a thread has, if one is there
        self.again = False  # whether what is loaded now will be loaded again soon
        self.tile: Tile  # what a thread works on

    @property
    def image_plan(self) -> OutputTile:
        """The schedule of a kernel whose blocks have output tiles."""
        assert isinstance(self.schedule, OutputTile)
        return self.schedule

    @property
    def window_plan(self) -> WindowTile:
        """The same where windows have two axes."""
        assert isinstance(self.schedule, WindowTile)
        return self.schedule

    @property
    def vector_rows(self) -> bool:
        """Whether a thread has several rows, each with its own results."""
        return isinstance(self.schedule, Columns | Transposed) and self.schedule.width > 1

    def has_lanes(self, node: Expr) -> bool:
        """Whether the lanes of a vector have different values of `node`."""
        needs = self.dataflow.needs(node)
        if self.schedule.width == 1:
            return False
        return self.lane in needs or (
            self.vector_rows and any(isinstance(need, ReductionResult | Prefix) for need in needs)
        )

    def is_wide(self, buffer: str, index: Index) -> bool:
        """Whether the lanes of a vector are one aligned access."""
        axis = self.arranged.axis
        if self.schedule.width == 1 or axis is None or not self.is_aligned(buffer):
            return False
        if self.start is not None:
            start = start_of(self.first_lane(index), axis)
            return (
                start is not None
                and index.stride(self.lane) == 1
                and begins_with(start, self.start.index, self.schedule.width)
            )
        return not self.arranged.anywhere and is_vector(index, axis, self.lane)

    def picked(self, buffer: str, index: Index) -> Picked | None:
        """The access out of which the lanes of a vector of a pointwise kernel pick their elements, if there is one."""
        plan, axis, read = self.schedule, self.arranged.axis, self.program.buffer(buffer)
        if not isinstance(plan, Pointwise) or axis is None or not self.is_aligned(buffer):
            return None
        if plan.general or plan.ragged or self.arranged.anywhere:
            return None
        return picked(index, axis, self.lane, ACCESS // read.dtype.nbytes, read.extent)

    def first_lane(self, index: Index) -> Index:
        """The index of a vector's first element."""
        return index.substitute({self.lane: Index()})

    def left(self, scope: Scope) -> str:
        """How many elements there are from a vector's first one on, where the last vector may have fewer."""
        assert self.arranged.row is not None
        return scope.index(Index(self.kernel.row_count) - axis_index(self.arranged.row))

    def inside(self, scope: Scope) -> str:
        """Where a vector begins in its row, and how many elements that has, as arguments; rows begin anywhere."""
        return f"{self.column(scope)}, {self.length}"

    def column(self, scope: Scope) -> str:
        """Where a vector begins in its row, or in its run."""
        assert self.arranged.col is not None
        return scope.index(axis_index(self.arranged.col))

    @property
    def length(self) -> str:
        """How many elements a row has, or a run."""
        return free((self.start.run if self.start else 0) or self.kernel.col_count)

    def within(self, scope: Scope | None = None) -> str:
        """The condition, known where steps are unrolled, that all elements of the vectors of a step are their row's; else it is asked
        for the vector at hand in `scope`, if there is one."""
        if self.tile.loop or self.schedule.general:
            return "false" if scope is None else f"fp::is_whole<{self.schedule.width}>(false, {self.inside(scope)})"
        before = self.before_end()
        return f"{self.u} > 0 && {before}" if before else "false"

    def before_end(self) -> str:
        """The condition, known where steps are unrolled, that no vector of a step ends behind its row; empty where none is so."""
        plan = self.in_rows
        if plan is None or self.tile.loop or plan.general or plan.run or plan.team or plan.unroll == 1:
            return ""
        last = plan.vectors(self.kernel.col_count) - 2 - plan.lanes  # the last two may end behind the row
        return f"{self.u} * {plan.lanes} <= {free(last)}" if last >= 0 else ""

    def is_aligned(self, buffer: str) -> bool:
        """Whether `buffer` starts at a multiple of 16 bytes."""
        return self.schedule.memory.aligned or self.program.buffer(buffer).role is not Role.INPUT

    def _window_vector(self, load: Load, axis: Axis) -> str | None:
        """The call that loads all points along a window's axis, where they are aligned accesses of several elements."""
        size = access_along(load, axis) if self.is_aligned(load.buffer) else 1
        if size == 1:
            return None
        return f"fp::load_vector<{size}>" if size == axis.size else f"fp::load_run<{axis.size}, {size}>"

    def _lane_of(self, node: Gather) -> Axis | None:
        """The axis over a vector's elements, where what they look up is one aligned access."""
        same = all(
            place.stride % self.lane.size == 0 and self.lane not in self.dataflow.needs(place.value)
            for place in node.places
        )
        return self.lane if same and self.is_wide(node.buffer, node.index) else None

    @property
    def hastens(self) -> bool:
        """Whether a row waits so little for anything else that loads which the compiler puts off count, and their registers do not: rows of
        16-bit numbers, unless they begin anywhere and have several warps."""
        plan, own = self.schedule, (self.arranged.row, self.arranged.col)
        short = any(
            load.dtype.nbytes < 4 for load in self.kernel.loads() if all(axis in load.index.axes for axis in own)
        )
        return self.in_rows is not None and short and not (self.ends_apart and plan.lanes > 32)

    def unrolled(self, variable: str, count: int, lines: Sequence[str], *, down: bool = False) -> list[str]:
        """A loop that the compiler unrolls, from the last turn to the first if `down`; the plain lines where it has one iteration."""
        if count == 1:
            return list(lines)
        if not down:
            return loop(variable, count, lines)
        return [UNROLL, *block(f"for (int {variable} = {count - 1}; {variable} >= 0; --{variable})", lines)]

    def of_each_step(self, tile: Tile, number: str | Number, lines: Sequence[str]) -> list[str]:
        """`lines` for vector `number`, which counts by ``u``, of each step of a thread, if there is one."""
        return self.unrolled(self.u, self.unroll, where(lines, f"{number} < {tile.end}" if tile.tail else ""))

    def before_limit(self, tile: Tile, number: str | Number) -> str:
        """The condition that there is a vector of this number; where rows begin anywhere all but the last one are known to be there."""
        there = self._all_but(tile)
        return f"{number} < {tile.end}" if there < 0 else f"{self.u} * {tile.step} <= {there} || {number} < {tile.end}"

    def clamped(self, tile: Tile, number: str | Number) -> str:
        """This number, or that of the last vector where there is none."""
        there, last = self._all_but(tile), f"fp::least({number}, {tile.last})"
        return last if there < 0 else f"({self.u} * {tile.step} <= {there} ? {number} : {last})"

    def _all_but(self, tile: Tile) -> int:
        """The largest first number of a step, without a thread's own, of which all vectors are known to be there."""
        plan = self.in_rows
        if plan is None or not plan.ends_apart or tile.loop or self.unroll == 1:
            return -1
        return (self.kernel.col_count - plan.unit + 1) // plan.width - tile.step

    def may_leave(self, count: int, step: int) -> bool:
        """Whether steps of so many may go past the end of `count` points; for some sizes, where these come at run time."""
        return count % step != 0 or (self.schedule.general and step > 1)

    def leaves_rows(self, count: int, step: int) -> bool:
        """The same of `count` rows, by steps between which blocks may overlap."""
        return bool(self.overlap) or self.may_leave(count, step)

    def along(self, place: str) -> str:
        """A point of the block's tile along the vectors, of which `place` counts from the first."""
        return f"{self.first_along} + {place}" if self.first_along else place

    def constant(self, name: str, value: str) -> str:
        """The name of a constant of this value, which it defines in the outermost scope."""
        found = self.names.exact(name)
        self.top.lines.append(f"const {self.index_type} {found} = {value};")
        return found

    def read_constant(self, name: str, value: Callable[[], str] | str) -> Constant:
        """The same, which is defined if anything reads it."""
        return self.top.constant(self.index_type, self.names.exact(name), value)

    def define_step(self, scope: Scope) -> None:
        """Define the row of the image in `scope`, for step `u`; of other walks, nothing."""
        if self.output_tile is not None:
            y = self.arranged.image[0]
            row = self.names.numbered(y.name)
            here = f"{self.output_tile.top_row} + {self.u}" if self.schedule.unroll > 1 else self.output_tile.top_row
            scope.define_axis(y, scope.constant(self.index_type, row, here))

    @property
    def row_of_thread(self) -> str:
        """Which of a thread's rows of an output tile is at hand."""
        return self.u if self.schedule.unroll > 1 else "0"

    def own_in_tile(self) -> str:
        """The condition that the vector at hand is no other thread's, where output tiles overlap; else empty."""
        assert self.output_tile is not None
        rows, columns = self.output_tile.own
        asked = [f"{self.row_of_thread} >= {rows}"] if rows != "0" else []
        asked += [f"{columns} <= 0"] if columns != "0" else []
        return " && ".join(asked)

    # ---- positions on a tile

    def number(self, tile: Tile, start: str | Constant) -> Number:
        """The number of the vector or column that a thread works on in step `u`."""
        step = self.u if tile.step == 1 else f"{self.u} * {tile.step}"
        return Number(start, step if self.unroll > 1 else "")

    def define_position(self, scope: Scope, tile: Tile, place: str | Number) -> None:
        """Define the tile's axis in `scope`, for the vector or column whose number is `place`."""
        text: str | Callable[[], str]
        if isinstance(place, Number) and isinstance(place.start, Constant) and not self.start:
            # Where a thread's part begins is read if the position is.
            text = partial(self._position, scope, tile, place)
        else:
            text = self._position(scope, tile, place)
        if tile.axis is not None:
            plain = text if text in ("0", self.u) else None
            scope.define_axis(tile.axis, plain or scope.constant(self.index_type, tile.variable, text))

    def _position(self, scope: Scope, tile: Tile, place: str | Number) -> str:
        number = f"{tile.base} + {place}" if tile.base else str(place)
        if self.in_rows and self.in_rows.run:
            number = self._define_run(scope, self.in_rows, number)
        text = number
        if tile.scale > 1 and number != "0":
            sums = " + " in number and not number.startswith("fp::")
            text = f"({number}) * {tile.scale}" if sums else f"{number} * {tile.scale}"
        if self.ends_apart:
            return f"{text} + {self.head}" if text != "0" else self.head
        if self.in_rows and self.start:
            return f"{text} - {scope.operand(self.start.index % self.in_rows.begins_at)}"
        return text

    def _define_run(self, scope: Scope, plan: Rows, number: str) -> str:
        """Define the run of columns in which vector `number` of a row lies; the vector's number there."""
        run, each = self.kernel.cols[0], free(plan.vectors_of_run(self.kernel.col_count))
        scope.define_axis(run, scope.constant(self.index_type, self.run, f"fp::div({number}, {each})"))
        return f"fp::mod({number}, {each})"
