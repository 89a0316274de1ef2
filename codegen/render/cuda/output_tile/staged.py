"""What windows over an output tile of results load, staged in shared memory: rows of the input as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusepass.codegen.ir.expr import Expr, Load
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index
from fusepass.codegen.ir.output_tiles import Below, TileWindow, as_used, at_first
from fusepass.codegen.ir.staged_windows import TileShape, tile_shape
from fusepass.codegen.render.cuda.walk.frame import Frame, Pool
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, Constant, block, loop
from fusepass.codegen.schedule.plan_output_tile import WindowTile
from fusepass.codegen.schedule.staged_tile import tile_under
from fusepass.errors import RenderError

_MOST_ASKED = 12  # conditions that a thread holds while it reduces
_MOST_ROWS = 3  # of a window, which may all be under way at once
_MOST_ROWS_ALONE = 5  # the same where a thread has its sums and nothing else


@dataclass(frozen=True)
class StagedTile:
    """A tile in shared memory, and the C names of it and of what a thread has read of one of its rows.

    Attributes:
        used: the load, or what all that use it cast it to.
        lead: where rows lie together: the place in the tile of the first element that is needed.
    """

    below: Below
    shape: TileShape
    name: str
    near: str
    used: Expr
    lead: str = ""


class StagedWindows:
    """The tiles of a kernel whose schedule walks output tiles."""

    def __init__(self, frame: Frame) -> None:
        assert frame.output_tile is not None
        self.frame, self.place = frame, frame.output_tile
        self.pool, self.row = Pool(frame.names.exact("pool")), frame.names.exact("j")
        # The arrays of `ask`, by window and axis of the image; empty where all are there.
        self._there: dict[tuple[int, int], str] = {}

    def declare(self, window: TileWindow, below: Below, copies: int) -> StagedTile:
        """Declare the place of so many tiles, each under a block's output tile of one image."""
        frame, load = self.frame, below.load
        shape = self._shape(window, below)
        copies = copies // shape.images
        pointer, element = frame.pointers[load.buffer], C_TYPES[load.dtype]
        name, near = (frame.names.numbered(f"{pointer}_{what}") for what in ("tile", "in"))
        self.reserve(name, element, copies * shape.nbytes)
        lead = self._lead(window, load, shape) if shape.run and window.planes is None else ""
        return StagedTile(below, shape, name, near, as_used(window.value, load), lead)

    def _shape(self, window: TileWindow, below: Below) -> TileShape:
        frame, plan = self.frame, self.frame.image_plan
        if not isinstance(plan, WindowTile):
            results = plan.tile_height, plan.lanes * plan.width
            return tile_shape(frame.program, window, below, results, frame.lane, aligned=plan.memory.aligned)
        shape = tile_under(frame.program, window, below, frame.kernel.rows, plan, frame.lane)
        if shape is None:
            raise RenderError(f"{frame.kernel.name} has no tile whose rows are reduced in a turn of their own")
        return shape

    def reserve(self, name: str, element: str, nbytes: int) -> None:
        """Declare `name` as the place of the next `nbytes`, a multiple of 16, of shared memory."""
        self.frame.top.lines.append(self.pool.array(element, name, nbytes))

    def spot(self, window: TileWindow, tile: StagedTile, thread: str) -> tuple[Scope, str, str]:
        """Where vector number `thread` of a block's tiles comes from, and the condition that it is there, in a scope that has both.

        What is not there is to be filled with zeros.
        """
        shape, load = tile.shape, tile.below.load
        if not shape.run:
            vectors = shape.cols // shape.vector
            place = f"{thread} / {vectors} % {shape.rows}", f"{thread} % {vectors}"
            return self.spot_in_row(window, tile, f"{thread} / {shape.vectors}", *place)
        scope = Scope(self.frame.printer)  # of its own: quotients of the image at hand are not those of another
        alone = not shape.image
        scope.lines += self.image(scope, f"{thread} / {shape.vectors}" if alone else "")
        still = self._first(scope, window)
        number = f"{thread} % {shape.vectors}" if alone else thread
        vector = self._counted(scope, "vector", shape.vectors, number)
        covers = _first_of_run(load.index, shape, *still) // shape.vector * shape.vector + vector * shape.vector
        there = Bound(covers, 0, self.frame.program.buffer(load.buffer).extent)
        return scope, scope.operand(covers), scope.condition([there])

    def spot_in_row(
        self, window: TileWindow, tile: StagedTile, plane: str, row: str, vector: str
    ) -> tuple[Scope, str, str]:
        """The same of vector number `vector` of a row of the tile of an image, where rows are copied each by itself."""
        frame, shape, load = self.frame, tile.shape, tile.below.load
        scope = Scope(frame.printer)
        scope.lines += self.image(scope, plane)
        still = self._first(scope, window)
        down = self._counted(scope, "down", shape.rows, row)
        right = self._counted(scope, "right", shape.cols // shape.vector, vector)
        col = right * shape.vector - shape.shift

        def moved(index: Index, by: Index) -> Index:
            return at_first(index, *still) + by

        guard = [Bound(moved(bound.index, down), bound.low, bound.high) for bound in window.down]
        guard += [Bound(moved(bound.index, col), bound.low, bound.high) for bound in window.right]
        guard.append(Bound(right * shape.vector, 0, shape.needed))
        start = scope.operand(moved(load.index, down * tile.below.pitch + col))
        return scope, start, scope.condition(guard)

    def spot_in_run(self, window: TileWindow, tile: StagedTile, thread: str) -> tuple[Scope, str]:
        """Where the first element that is needed for a tile comes from, of which thread number `thread` copies a vector, in a scope that has
        that; of a window with planes, in the first one."""
        scope = Scope(self.frame.printer)
        scope.lines += self.image(scope, f"{thread} / {tile.shape.vectors}")
        still = self._first(scope, window)
        return scope, scope.operand(at_first(tile.below.load.index, *still) - tile.shape.shift)

    def lead_of_plane(self, window: TileWindow, tile: StagedTile, plane: str) -> tuple[str, list[str]]:
        """The place in the tile of the first element that a thread's image needs of plane number `plane`, and the lines that find it."""
        shape, load = tile.shape, tile.below.load
        scope, name = self.frame.top.child(), self.frame.names.numbered("lead")
        still = self._first(scope, window)
        first = scope.index(at_first(load.index, *still) - shape.shift + self.before(window, tile))
        return name, [
            *scope.lines,
            f"const int {name} = fp::mod({first} + {plane} * {tile.below.plane}, {shape.vector});",
        ]

    def before(self, window: TileWindow, tile: StagedTile) -> int:
        """Elements before the input's first one where a tile of a window may begin that is not there: a multiple of its vector."""
        if not window.around and not tile.shape.run:
            return 0
        vector, shift = tile.shape.vector, tile.shape.shift if tile.shape.run else 0
        return -(min(tile.below.load.index.bounds[0] - shift, 0) // vector) * vector

    def _first(self, scope: Scope, window: TileWindow) -> tuple[Axis, ...]:
        """Define where the block's output tile begins, and return the axes that are 0 at the first element that is needed for it."""
        still: tuple[Axis, ...] = (self.frame.lane, *window.window.axes)
        for axis, first in zip(window.image, (self.place.first_row, self.place.first_column), strict=True):
            if first == "0":
                still = (axis, *still)
            else:
                scope.define_axis(axis, first)
        return (*still, *self.first_plane(scope, window)) if window.planes is not None else still

    def first_plane(self, scope: Scope, window: TileWindow) -> tuple[Axis, ...]:
        """Define the first of the block's planes, and return the axes that are 0 where the first one is that is needed for it."""
        assert window.planes is not None
        axis, tap = window.planes.axis, window.planes.tap
        if self.place.first_plane == "0":
            return axis, tap
        scope.define_axis(axis, self.place.first_plane)
        return (tap,)

    def _counted(self, scope: Scope, what: str, size: int, text: str) -> Index:
        """The index `text`, which has `size` values, as that of a new axis."""
        axis, name = Axis(f"{what} of a tile", size), self.frame.names.numbered(what)
        scope.define_axis(axis, scope.constant("int", name, text))
        return axis_index(axis)

    def _lead(self, window: TileWindow, load: Load, shape: TileShape) -> str:
        """Define the place of the first element that a thread's image needs: vectors begin before it."""
        frame, row = self.frame, self.frame.arranged.row
        scope, name = Scope(frame.printer), frame.names.numbered("lead")
        if row is not None:
            scope.define_axis(row, self.place.first_image if shape.image else self.place.image)
        value = scope.index(_first_of_run(load.index, shape, *self._first(scope, window)) % shape.vector)
        frame.top.lines += [*scope.lines, f"const int {name} = {value};"]
        return name

    def image(self, scope: Scope, plane: str) -> list[str]:
        """Define the image at hand; `plane` says which of the block's, the first one if it says nothing."""
        frame, planes = self.frame, self.frame.image_plan.planes
        if frame.arranged.row is None:
            return []
        image = frame.names.numbered("image")
        first, later = self.place.first_image, planes > 1 and plane
        defined = Constant(frame.index_type, image, lambda: f"{first} + {plane}" if later else str(first))
        scope.define_axis(frame.arranged.row, defined)
        return [defined.line]

    def read(self, tile: StagedTile, *, stored: bool = False) -> list[str]:
        """Read from row `j` of a tile what a thread's results need of it; as it is `stored`, or as it is used."""
        shape, plan = tile.shape, self.frame.image_plan
        down = [times(self.place.row_in_tile, tile.below.steps[0]), self.row] if self.place.row_in_tile else [self.row]
        row = " + ".join(down) + (f" - {shape.top}" if shape.top else "")
        start = f"({row}) * {shape.pitch} + {times(self.place.column_in_tile, tile.below.steps[1])}"
        if plan.planes > 1:
            start = f"{self.place.plane} * {shape.elements(tile.below.load.dtype.nbytes)} + {start}"
        return self.read_from(tile, start, stored=stored)

    def read_from(self, tile: StagedTile, start: str, *, stored: bool) -> list[str]:
        """The same from place `start` on, counted from the first element that is needed."""
        frame, shape = self.frame, tile.shape
        dtype = tile.below.load.dtype if stored else tile.used.dtype
        element, k = C_TYPES[dtype], frame.names.numbered("k")
        here = times(k, shape.near)
        start = f"{tile.lead} + {start} + {here}" if tile.lead else f"{start} + {here}"
        cast = "" if dtype is tile.below.load.dtype else f"fp::cast<{element}>"
        part = frame.names.numbered("part")
        to = f"{tile.near}[{here} + {frame.v}]" if shape.near > 1 else f"{tile.near}[{k}]"
        lines = [f"const auto {part} = fp::as_vector<{shape.near}>({tile.name}[{start}]);"]
        lines += loop(
            frame.v, shape.near, [f"{to} = {cast}({part}[{frame.v}]);" if cast else f"{to} = {part}[{frame.v}];"]
        )
        return [f"{element} {tile.near}[{shape.reach}];", *loop(k, shape.reach // shape.near, lines)]

    def ask(self, window: TileWindow) -> None:
        """Declare which of the elements of a row, and where windows have few rows which of these, that a thread needs are there, if few may not
        be: it asks once, and the compiler knows of the others. With more rows at once, sums would leave the registers."""
        frame, plan, (y, x) = self.frame, self.frame.image_plan, window.image
        rows, _ = window.below[0].span(window.taps, (plan.unroll, 1))
        _, elements = window.below[0].span(window.taps, (1, plan.width))
        last = max(x.size, plan.lanes * plan.width) - plan.width  # that begins a thread's results
        column = frame.top.operand(axis_index(x))
        of_windows = plan if isinstance(plan, WindowTile) else None
        alone = not window.separable and not (of_windows and of_windows.exchanges)
        if window.taps[0].size <= (_MOST_ROWS_ALONE if alone else _MOST_ROWS):
            self._ask(window, 0, window.down, Axis(y.name, y.size - plan.unroll + 1), self.place.top_row, rows)
        if of_windows and of_windows.along:
            return  # other threads read these
        self._ask(window, 1, window.right, Axis(x.name, last + 1), column, elements)

    def _ask(
        self, window: TileWindow, along: int, bounds: Sequence[Bound], first: Axis, place: str, count: int
    ) -> None:
        """The same along one axis: of `count` from the `first` one on, which is at `place`."""
        frame, scope = self.frame, self.frame.top.child()
        scope.define_axis(first, place)
        still = {
            frame.lane: Index(),
            **dict.fromkeys(window.window.axes, Index()),
            window.image[along]: axis_index(first),
        }
        firsts = [(bound.index.substitute(still), bound.low, bound.high) for bound in bounds]
        asked = [
            scope.condition([Bound(index + number, low, high) for index, low, high in firsts])
            for number in range(count)
        ]
        if count - asked.count("true") > _MOST_ASKED:
            return
        name = frame.names.numbered(("row_is_there", "is_there")[along]) if set(asked) != {"true"} else ""
        self._there[id(window.window), along] = name
        if name:
            frame.top.lines += [*scope.lines, f"const bool {name}[{count}] = {{{', '.join(asked)}}};"]

    def element_is_there(self, window: TileWindow, number: str) -> str | None:
        """The condition that element `number` of a row is there, if that was asked."""
        name = self._there.get((id(window.window), 1))
        return f"{name}[{number}]" if name else "true" if name is not None else None

    def row_is_there(self, window: TileWindow, count: int) -> tuple[list[str], str]:
        """The lines before, and the condition, that row `j` of the `count` that a thread needs is there."""
        name = self._there.get((id(window.window), 0)) if window.down else ""
        if name is not None:
            return [], f"{name}[{self.row}]" if name else "true"
        frame, at = self.frame, Axis("row of the patch", count)
        scope = frame.top.child({window.image[0]: self.place.top_row, at: self.row})
        first = (at_first(bound.index, *window.window.axes) + axis_index(at) for bound in window.down)
        guard = [Bound(index, bound.low, bound.high) for index, bound in zip(first, window.down, strict=True)]
        condition = scope.condition(guard)
        return scope.lines, condition

    def of_row(self, window: TileWindow, below: Below, tap: str, lines: Sequence[str]) -> list[str]:
        """`lines` for each row of a thread's results that needs row `j` of a tile, as `tap` of the window's rows."""
        u, apart = self.frame.u, below.dilation[0] or 1
        beyond = f"{self.row} - {times(u, below.steps[0])}"
        which = f"const int {tap} = {beyond if apart == 1 else f'({beyond}) / {apart}'};"
        needed = f"{beyond} >= 0 && {tap} < {window.taps[0].size}" + (
            f" && ({beyond}) % {apart} == 0" if apart > 1 else ""
        )
        return loop(u, self.frame.schedule.unroll, [which, *block(f"if ({needed})", lines)])

    def result(self) -> str:
        """Which of a thread's results that of a step and a lane is."""
        plan = self.frame.schedule
        step = f"{times(self.frame.u, plan.width)} + " if plan.unroll > 1 else ""
        return step + (self.frame.v if plan.width > 1 else "0")


def _first_of_run(index: Index, shape: TileShape, *still: Axis) -> Index:
    """Where the first element lies that is needed of rows which are copied as they lie."""
    return at_first(index, *still) + shape.top * shape.run - shape.shift


def begin_copy(tile: StagedTile, to: str, source: str, inside: str, real: str, other: str) -> str:
    """The call that begins to copy a vector of a tile, of which `real` bytes are there; where `inside` fails it lays down `other`, or zeros."""
    if other and inside != "true":
        return f"fp::begin_copy_or<{tile.shape.vector}>({to}, {source}, {inside}, {other});"
    nbytes = tile.shape.vector * tile.below.load.dtype.nbytes
    return f"fp::begin_copy_bytes<{nbytes}>({to}, {source}, {real});"


def times(text: str, factor: int) -> str:
    return text if factor == 1 else f"{factor} * {text}"
