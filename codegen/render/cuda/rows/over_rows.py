"""What a CUDA kernel that goes over a piece of its rows finds of its columns: in registers row by row, then in shared memory, stored when the piece
ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fusepass.codegen.ir.dataflow import always_loaded
from fusepass.codegen.ir.index import axis_index
from fusepass.codegen.render.cuda.partials import state_type, store_partials
from fusepass.codegen.render.cuda.walk.accesses import Ahead, declare, fill_steps
from fusepass.codegen.render.cuda.walk.frame import Frame, Pool
from fusepass.codegen.render.cuda.walk.states import accumulated
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block
from fusepass.codegen.schedule.output_tile_results import room_of_states
from fusepass.codegen.schedule.row_pieces import TOGETHER


class OverRows:
    """The lines around the loop over rows, and in it, that have to do with the kernel's `Partials`.

    A thread has a state for each of its columns in registers for some rows, and one in shared memory for all of them, in a place of its own.
    While it has a row at hand, what it reads of its next one is under way.
    """

    def __init__(self, frame: Frame) -> None:
        partials = frame.kernel.partials
        assert partials is not None
        self.frame, self.partials = frame, partials
        names = frame.names
        self._kinds = [state_type(reduction) for reduction in partials.reductions]
        self._states = [names.exact(f"{reduction.name}_of_columns") for reduction in partials.reductions]
        self._places = [names.exact(f"{name}_so_far") for name in self._states]
        self._iteration, self._next = names.exact("turn"), names.exact("next_row")
        self._first: list[str] = []  # what brings what is read of the first row
        frame.top.lines += self._begun()

    def _begun(self) -> Iterator[str]:
        """The lines that make room in shared memory."""
        pool = Pool(self.frame.names.exact("pool"))
        yield pool.declaration
        for kind, place, reduction in zip(self._kinds, self._places, self.partials.reductions, strict=True):
            states = self.frame.schedule.groups * self.frame.kernel.col_count
            yield pool.array(kind, place, room_of_states(reduction, states))
        yield from self._for_each_of_own(lambda at: [f"{place}[{at}] = {{}};" for place in self._places])

    def begin_iteration(self) -> None:
        """Print what is the same for a row: where it is, where the next one is, and what is loaded of it."""
        frame, plan, row = self.frame, self.frame.schedule, self.frame.arranged.row
        kind, end, place = frame.index_type, frame.end_of_piece, self._iteration
        assert row is not None
        if plan.groups > 1:
            place, frame.live = frame.names.exact("place"), frame.names.exact("live")
            frame.top.lines += [
                f"const {kind} {place} = {self._iteration} + {frame.group};",
                f"const bool {frame.live} = {place} < {end};",
            ]
        here = frame.read_constant("row", f"fp::least({place}, {end} - 1)" if plan.groups > 1 else place)
        frame.top.define_axis(row, here)
        frame.top.lines.append(f"const {kind} {self._next} = fp::least({place} + {plan.groups}, {end} - 1);")
        always = {id(load): load for root in frame.kernel.roots for load in always_loaded(root)}
        for load in [each for each in always.values() if each.index.axes == {row}]:
            name, element = frame.names.numbered("of_row"), C_TYPES[load.dtype]
            following = frame.names.exact(f"{name}_next")
            frame.top.lines.append(f"const {element} {name} = {following};")
            for lines, place, target in (
                (self._first, self._first_row, f"{element} {following}"),
                (frame.top.lines, self._next, following),
            ):
                scope = self._below(place)
                scope.lines.append(f"{target} = {frame.pointers[load.buffer]}[{scope.index(load.index)}];")
                lines += scope.lines
            frame.top.bind(load, name)

    def brought(self, ahead: Sequence[Ahead], steps: Scope) -> list[Ahead]:
        """The loads of a row's first phase, of which those of the row alone were issued while the last one was at hand; adds to `steps` what
        takes them, and issues those of the next row."""
        frame, tile, row = self.frame, self.frame.tile, self.frame.arranged.row
        found = [each for each in ahead if row in each.load.index.axes and not each.guard and not each.late]
        following = [replace(each, name=frame.names.exact(f"{each.name}_next")) for each in found]
        taken = [f"{now.of_step(frame)} = {of.of_step(frame)};" for now, of in zip(found, following, strict=True)]
        steps.lines += [*(declare(frame, each) for each in found), *frame.unrolled(frame.u, frame.unroll, taken)]
        self._first += [declare(frame, each) for each in following]
        for lines, place in ((self._first, self._first_row), (steps.lines, self._next)):
            scope = self._below(place)
            fill_steps(frame, scope, tile, tile.start, following)
            lines += scope.lines
        return [replace(each, under_way=True) if each in found else each for each in ahead]

    def collect(self, lanes: Scope) -> None:
        """Add what pushes the values of the element at hand to the scope of its `lanes`."""
        for reduction, name in zip(self.partials.reductions, self._states, strict=True):
            value = bare(accumulated(lanes, reduction, reduction.values[0]))
            lanes.lines.append(f"{self._of_element(name)}.push({value});")

    def around(self, before: Sequence[str], iteration: Sequence[str]) -> list[str]:
        """The kernel's lines: those `before` all rows, the loops around those of one `turn`, and what stores what was found."""
        frame, plan = self.frame, self.frame.schedule
        steps = f"[{plan.unroll}]" if plan.unroll > 1 else ""
        states = [f"{kind} {name}{steps}[{plan.width}];" for kind, name in zip(self._kinds, self._states, strict=True)]
        pairs = list(zip(self._places, self._states, strict=True))
        kind, several, end = frame.index_type, frame.names.exact("several"), frame.names.exact("end_of_several")
        rows = TOGETHER * plan.groups
        inner = (
            f"for ({kind} {self._iteration} = {several}; {self._iteration} < {end}; {self._iteration} += {plan.groups})"
        )
        lines = [
            *states,
            f"const {kind} {end} = fp::least({several} + {rows}, {frame.end_of_piece});",
            *block(inner, iteration),
            *self._for_each_of_own(
                lambda at: [f"{place}[{at}].merge({self._of_element(name)});" for place, name in pairs]
            ),
        ]
        outer = f"for ({kind} {several} = {frame.first_row}; {several} < {frame.end_of_piece}; {several} += {rows})"
        return [*before, *self._first, *block(outer, lines), *self._left()]

    def _left(self) -> Iterator[str]:
        """The lines that merge what a block's groups of threads found of each column, in order, and store it."""
        frame, plan, cols = self.frame, self.frame.schedule, self.frame.kernel.col_count
        column = frame.names.exact("column")
        scope = Scope(frame.printer)
        for axis, text in (
            (self.partials.pieces, frame.piece),
            (frame.arranged.row, frame.sample),
            (frame.arranged.col, column),
        ):
            assert axis is not None
            scope.define_axis(axis, text)
        lines, found = list[str](), dict[str, str]()
        for reduction, kind, place in zip(self.partials.reductions, self._kinds, self._places, strict=True):
            name = found[reduction.name] = frame.names.exact(f"{reduction.name}_of_piece")
            lines.append(f"{kind} {name} = {place}[{column}];")
            if plan.groups > 1:
                other = frame.names.numbered("other")
                span = f"int {other} = 1; {other} < {plan.groups}; ++{other}"
                lines += block(f"for ({span})", [f"{name}.merge({place}[{other} * {cols} + {column}]);"])
        stores = (replace(each, index=frame.first_lane(each.index)) for each in self.partials.stores)
        store_partials(replace(self.partials, stores=tuple(stores)), scope, found)
        yield "__syncthreads();"
        span = f"int {column} = threadIdx.x; {column} < {cols}; {column} += {plan.threads}"
        yield from block(f"for ({span})", [*lines, *scope.lines])

    @property
    def _first_row(self) -> str:
        frame = self.frame
        place = f"{frame.first_row} + {frame.group}" if frame.schedule.groups > 1 else frame.first_row
        return f"fp::least({place}, {frame.end_of_piece} - 1)"

    def _below(self, row: str) -> Scope:
        """A scope that knows a thread's place, but is in another `row`."""
        frame, tile = self.frame, self.frame.tile
        scope = Scope(frame.printer)
        assert frame.arranged.row is not None
        scope.define_axis(frame.arranged.row, row)
        if tile.once and tile.axis is not None:
            scope.define_axis(tile.axis, frame.top.index(axis_index(tile.axis)))
        return scope

    def _of_element(self, name: str) -> str:
        """The state of the element at hand, in the loops over steps and lanes."""
        frame, plan = self.frame, self.frame.schedule
        step = f"[{frame.u}]" if plan.unroll > 1 else ""
        return f"{name}{step}[{frame.v if plan.width > 1 else 0}]"

    def _for_each_of_own(self, lines: Callable[[str], Sequence[str]]) -> list[str]:
        """`lines` for each of a thread's columns, of its place in shared memory: those of a group's columns lie together."""
        frame, plan, tile = self.frame, self.frame.schedule, self.frame.tile
        number = frame.number(tile, tile.start)
        column = f"({number}) * {plan.width} + {frame.v}" if plan.width > 1 else str(number)
        place = f"{frame.group} * {frame.kernel.col_count} + {column}" if plan.groups > 1 else column
        each = frame.unrolled(frame.v, plan.width, lines(place))
        return frame.of_each_step(tile, number, each)
