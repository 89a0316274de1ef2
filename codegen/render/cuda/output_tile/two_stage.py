"""Windows reduced in two stages: strips of all rows of a block's tiles along the rows, then what these come to down the rows.

What a strip of a row comes to is the same for all results above and below each other that need it. Between the turns it stands in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.index import Bound, Index, axis_index
from fusepass.codegen.render.cuda.output_tile.sliding import Form, Sliding, Strip, line
from fusepass.codegen.render.cuda.output_tile.staged import StagedTile, StagedWindows, loop, times
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import block
from fusepass.codegen.schedule.two_stage_windows import first_iteration


class RowTurn:
    """The two iterations of one window."""

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
