"""Windows of which a row's points come to the same for all results that need the row: reduced along rows, then down, by what neighbours share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index
from fusepass.codegen.ir.output_tiles import TileWindow, at_first
from fusepass.codegen.ir.sliding import Line, Reduced, reduced
from fusepass.codegen.render.cuda.output_tile.staged import StagedTile, StagedWindows, times
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.numbers import plain
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block, loop, where
from fusepass.codegen.schedule.plan_output_tile import OutputTile, WindowTile
from fusepass.codegen.schedule.two_stage_windows import first_iteration


@dataclass(frozen=True)
class Form:
    """What a thread reduces a window to.

    Attributes:
        state: the C type of what points become.
        none: an element that changes nothing, in the type that tiles have, as C text.
        way: along which lines, and how many results at once.
    """

    state: str
    none: str
    way: Reduced

    @property
    def other(self) -> str:
        """What tiles have in the place of what is not there; empty for zeros."""
        return self.none if self.way.everywhere and self.way.window.window.op is not ReduceOp.SUM else ""


def form_of(window: TileWindow, tiles: Sequence[StagedTile], plan: OutputTile) -> Form:
    """The form of a window whose input is in `tiles`."""
    op, stored = window.window.op, C_TYPES[tiles[0].below.load.dtype]
    along = plan.along if isinstance(plan, WindowTile) else 0
    way = reduced(window, [tile.shape for tile in tiles], plan.unroll, plan.width, along)
    state = f"fp::{op.value}<{C_TYPES[window.window.dtype]}>"
    return Form(f"fp::MaxPair<{stored}>" if way.lanes > 1 else state, f"fp::cast<{stored}>({state}::none())", way)


@dataclass(frozen=True)
class Strip:
    """What a thread has read of a row for some neighbouring results.

    Attributes:
        scope: where what all of these elements share is found.
        elements: how many there are.
        is_there: gives the condition that one is there by its number, if it was asked before.
    """

    scope: Scope
    elements: int
    is_there: Callable[[str], str | None]


class Sliding:
    """Writes the reductions of separable windows from tiles."""

    def __init__(self, frame: Frame, tiles: StagedWindows) -> None:
        self.frame, self._tiles = frame, tiles

    def result(self, window: TileWindow, form: Form, states: str) -> str:
        """What a step's lane gets of a window, from a thread's states."""
        frame, plan, op = self.frame, self.frame.schedule, window.window.op
        if form.way.lanes > 1:
            step = f"{frame.u} * {plan.width // form.way.lanes} + " if plan.unroll > 1 else ""
            return f"{states}[{step}{frame.v} / {form.way.lanes}].of({frame.v} % {form.way.lanes})"
        value = f"{states}[{self._tiles.result()}].part<0>()"
        # A sum begins with 0, so it is never -0.
        return f"({C_TYPES[window.window.dtype]}(0) + {value})" if op is ReduceOp.SUM else value

    def reduce(self, window: TileWindow, form: Form, tiles: Sequence[StagedTile], into: str) -> list[str]:
        """The lines that reduce the rows of tiles into a thread's states."""
        frame, plan, way = self.frame, self.frame.schedule, form.way
        j, of_row, lines = self._tiles.row, frame.names.numbered("of_row"), list[str]()
        for tile in tiles:
            lines += self._tiles.read(tile, stored=way.lanes > 1)
        _, elements = tiles[0].below.span(window.taps, (1, plan.width))
        strip = Strip(frame.top, elements, partial(self._tiles.element_is_there, window))
        lines += self.row(form, tiles, strip, of_row)
        count, _ = tiles[0].below.span(window.taps, (plan.unroll, 1))
        asked, there = ([], "true") if way.everywhere else self._tiles.row_is_there(window, count)
        width = plan.width // way.lanes
        if there != "true":
            w = frame.names.numbered("w")
            lines += [*asked, *block(f"if (!({there}))", loop(w, width, [f"{of_row}[{w}] = {form.state}();"]))]
        return line(way.rows, width, into, (form.state, j, of_row), lines)

    def row(self, form: Form, tiles: Sequence[StagedTile], strip: Strip, into: str) -> list[str]:
        """The lines that reduce what a thread has read of a row into states."""
        frame, points = self.frame, form.way.points
        i, of_point = frame.names.numbered("i"), frame.names.numbered("of_point")
        if form.way.lanes > 1:
            made = self._pair(form, tiles[0], strip, i)
            return line(points, 1, into, (form.state, i, of_point), [*made[:-1], f"*{of_point} = {made[-1]};"])
        before, condition, value = self._element(form, tiles, strip, i)
        if condition != "true" and points.count == 1:
            # Nothing is shared, and a push that may not happen is one instruction.
            pushed = [*before, *block(f"if ({condition})", [*value[:-1], f"{into}->push({value[-1]});"])]
            all_points = f"for (int {i} = 0; {i} < {points.apart * points.size}; {i} += {points.apart})"
            return ["#pragma unroll", *block(all_points, pushed)]
        made = [*value[:-1], f"*{of_point} = {form.state}::of({value[-1]});"]
        return line(points, 1, into, (form.state, i, of_point), [*before, *where(made, condition)])

    def _pair(self, form: Form, tile: StagedTile, strip: Strip, number: str) -> list[str]:
        """The lines before the state of the windows' elements from `number` on, with the state."""
        lines, elements = list[str](), list[str]()
        for lane in range(form.way.lanes):
            at = f"{number} + {lane * tile.below.steps[1]}" if lane else number
            before, condition, _ = self._element(form, [tile], strip, at)
            element = f"{tile.near}[{at} + {tile.shape.shift}]"
            lines += before
            elements.append(element if condition == "true" else f"{condition} ? {element} : {form.none}")
        return [*lines, f"{form.state}({', '.join(elements)})"]

    def _element(
        self, form: Form, tiles: Sequence[StagedTile], strip: Strip, number: str
    ) -> tuple[list[str], str, list[str]]:
        """The lines before, and the condition, that a row's element `number` is there; and the lines before its value, with the value."""
        window = form.way.window
        element, still = Axis("element of a row", strip.elements), (self.frame.lane, *window.window.axes)
        scope = strip.scope.child({element: number}, conditional=True)
        for each in tiles:
            place = plain(scope.index(axis_index(element) + each.shape.shift))
            scope.bind(each.used, f"{each.near}[{place}]")
        bounds = () if form.way.everywhere else window.right
        condition = strip.is_there(plain(scope.index(axis_index(element)))) if bounds else "true"
        if condition is None:
            first = (at_first(bound.index, *still) + axis_index(element) for bound in bounds)
            right = [Bound(index, bound.low, bound.high) for index, bound in zip(first, bounds, strict=True)]
            condition = scope.condition(right)
        before = len(scope.lines)
        value = bare(scope.value(window.value))
        return scope.lines[:before], condition, [*scope.lines[before:], value]


def line(along: Line, width: int, into: str, part: tuple[str, str, str], lines: Sequence[str]) -> list[str]:
    """The call that reduces windows along a line; `part`: the states' type, and the names of a part's number and states, for which `lines` are."""
    state, number, name = part
    of = f"fp::Line<{along.count}, {along.step}, {along.apart}, {along.size}, {along.together}>::reduce<{width}>"
    return block(f"{of}({into}, [&](int {number}, {state}* {name})", lines, "});")


class RowTurn:
    """A window reduced in two stages: strips of all rows of a block's tiles along the rows, then what these come to down the rows.

    What a strip of a row comes to is the same for all results above and below each other that need it. Between the stages it is in shared memory.
    """

    def __init__(
        self, frame: Frame, sliding: Sliding, tiles: StagedWindows, form: Form, staged: Sequence[StagedTile]
    ) -> None:
        """Declares the place of what rows come to."""
        self.frame, self._sliding, self._tiles, self.form, self.staged = frame, sliding, tiles, form, staged
        self.window, (tile, *_) = form.way.window, staged
        self.shape, self.below = tile.shape, tile.below
        self.iteration = first_iteration(frame.window_plan, form.way, tile.shape, tile.below.load.dtype.nbytes)
        self.name = frame.names.numbered(f"{tile.name}_rows")
        tiles.reserve(self.name, form.state, self.iteration.nbytes)

    def lay_down(self) -> list[str]:
        """The lines in which threads reduce strips of rows."""
        frame, iteration, names = self.frame, self.iteration, self.frame.names
        item, row, strip = (names.numbered(word) for word in ("t", "line", "strip"))
        along, count = frame.window_plan.along, iteration.lines if iteration.down else iteration.strips
        slow, fast = f"{item} / {count}", f"{item} % {count}"
        scope = Scope(frame.printer)
        scope.lines.append(f"const int {row} = {fast if iteration.down else slow};")
        first = "0"
        if iteration.strips > 1:
            first = names.numbered("first")
            scope.lines.append(f"const int {strip} = {slow if iteration.down else fast};")
            scope.lines.append(f"const int {first} = {strip} * {along};")
        plane = f"{row} / {self.shape.rows}" if self.shape.rows > 1 else row
        scope.lines += self._tiles.image(scope, plane)
        for staged in self.staged:
            start = f"{self._place(staged, row)} + {times(first, staged.below.steps[1])}"
            scope.lines += self._tiles.read_from(staged, start, stored=self.form.way.lanes > 1)
        states, of_row, k = along // self.form.way.lanes, names.numbered("of_row"), names.numbered("k")
        scope.lines.append(f"{self.form.state} {of_row}[{states}];")
        scope.lines += self._sliding.row(self.form, self.staged, self._strip(scope, first), of_row)
        here = f"{self.name}[{row} * {iteration.pitch} + {f'{strip} * {states} + ' if iteration.strips > 1 else ''}{times(k, iteration.wide)}]"
        put = [
            f"fp::as_vector<{iteration.wide}>({here})[{frame.v}] = {of_row}[{times(k, iteration.wide)} + {frame.v}];"
        ]
        scope.lines += loop(k, states // iteration.wide, loop(frame.v, iteration.wide, put))
        head = f"for (int {item} = threadIdx.x; {item} < {iteration.items}; {item} += {frame.schedule.threads})"
        return ["#pragma unroll 1", *block(head, scope.lines)]

    def take(self, into: str) -> list[str]:
        """The lines in which a thread reduces what the rows that its results need come to."""
        frame, form, plan = self.frame, self.form, self.frame.schedule
        place, j, of_row = self._tiles.place, self._tiles.row, frame.names.numbered("of_row")
        rows, _ = self.below.span(self.window.taps, (plan.unroll, 1))
        width = plan.width // form.way.lanes
        down = [times(place.row_in_tile, self.below.steps[0])] if place.row_in_tile else []
        down += [times(place.plane, self.shape.rows)] if place.plane else []
        first = " + ".join([*down, j]) + (f" - {self.shape.top}" if self.shape.top else "")
        column = place.column_in_tile if form.way.lanes == 1 else f"({place.column_in_tile}) / {form.way.lanes}"
        part, w = frame.names.numbered("part"), frame.names.numbered("w")
        taken = [
            f"const auto {part} = fp::as_vector<{width}>({self.name}[({first}) * {self.iteration.pitch} + {column}]);",
            *loop(w, width, [f"{of_row}[{w}] = {part}[{w}];"]),
        ]
        asked, there = ([], "true") if form.way.everywhere else self._tiles.row_is_there(self.window, rows)
        if there != "true":
            nothing = loop(w, width, [f"{of_row}[{w}] = {form.state}();"])
            taken = [*asked, *block(f"if ({there})", taken), *block("else", nothing)]
        return line(form.way.rows, width, into, (form.state, j, of_row), taken)

    def _place(self, staged: StagedTile, row: str) -> str:
        """Where row number `row` of all images begins in a tile."""
        shape = staged.shape
        image = shape.elements(staged.below.load.dtype.nbytes)
        if self.frame.image_plan.planes == 1 or image == shape.rows * shape.pitch:
            return f"{row} * {shape.pitch}"
        if shape.rows == 1:
            return f"{row} * {image}"
        return f"{row} / {shape.rows} * {image} + {row} % {shape.rows} * {shape.pitch}"

    def _strip(self, scope: Scope, first: str) -> Strip:
        """What is known of the strip whose first result is number `first` of the patch's columns."""
        frame, (_, x), place = self.frame, self.window.image, self._tiles.place
        _, elements = self.below.span(self.window.taps, (1, frame.window_plan.along))
        if not self.window.right or self.form.way.everywhere:
            return Strip(scope, elements, lambda _: "true")
        starts = [text for text in (place.first_column, first) if text != "0"]
        still = {frame.lane: Index(), **dict.fromkeys(self.window.window.axes, Index()), x: Index()}
        if starts:
            scope.define_axis(x, starts[0] if len(starts) == 1 else f"({' + '.join(starts)})")
            still[x] = axis_index(x)
        firsts = [(bound.index.substitute(still), bound) for bound in self.window.right]
        asked = [
            " && ".join(_holds(scope, Bound(index + number, bound.low, bound.high)) for index, bound in firsts)
            for number in range(elements)
        ]
        name = frame.names.numbered("is_there")
        scope.lines.append(f"const bool {name}[{elements}] = {{{', '.join(asked)}}};")
        return Strip(scope, elements, lambda number: f"{name}[{number}]")


def _holds(scope: Scope, bound: Bound) -> str:
    if bound.always:
        return "true"
    low, high = bound.index.bounds
    return "false" if high < bound.low or low >= bound.high else scope.condition([bound])
