"""Windows over what lies channels last: a thread reads the vectors of a line of the input, one after another, and pushes each to all of its results
that need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fusepass.codegen.ir.expr import Load, ReduceOp
from fusepass.codegen.ir.index import Axis, Bound, axis_index
from fusepass.codegen.ir.line_windows import LineWindow, line_windows
from fusepass.codegen.ir.sliding import Line
from fusepass.codegen.render.cuda.output_tile.results import ImageWindows
from fusepass.codegen.render.cuda.output_tile.sliding import line as line_of
from fusepass.codegen.render.cuda.output_tile.staged import times
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.printer import UNROLLED_WINDOW, Scope
from fusepass.codegen.render.spelling import C_TYPES, ROLLED, UNROLL, block, loop, where
from fusepass.errors import RenderError


@dataclass(frozen=True)
class _Fixed:
    """An array of what a window loads that is the same along the line: an element for each tap if there are `several`, and of a vector's
    elements the one that `lane` says."""

    load: Load
    name: str
    several: bool
    lane: str

    def at(self, tap: str) -> str:
        return f"{self.name}[{tap if self.several else '0'}]{self.lane}"


class LineWindows(ImageWindows):
    """The windows of a kernel whose schedule reads them directly."""

    def __init__(self, frame: Frame) -> None:
        assert frame.output_tile is not None
        super().__init__(frame)
        self.place = frame.output_tile
        self._states: list[tuple[LineWindow, str]] = []

    def compute(self) -> None:
        frame = self.frame
        frame.printer.expect(frame.kernel.roots)
        line, _ = frame.arranged.image
        windows = line_windows(frame.kernel, line, frame.lane)
        if not windows:
            raise RenderError(f"{frame.kernel.name} has no windows along {line}")
        for window in windows:
            state = frame.names.numbered(window.window.op.value.lower())
            count = frame.schedule.unroll * self._states_of(window)
            frame.top.lines.append(f"{self._type(window)} {state}[{count}];")
            self._states.append((window, state))
            frame.top.lines += self._window(window, state)

    def bind(self, lanes: Scope) -> None:
        frame = self.frame
        for window, state in self._states:
            step = f"{times(frame.u, self._states_of(window))} + " if frame.schedule.unroll > 1 else ""
            if window.paired:
                lanes.bind(window.window, f"{state}[{step}{frame.v} / 2].of({frame.v} % 2)")
            else:
                lanes.bind(window.window, f"{state}[{step}{frame.v}].part<0>()")

    def _type(self, window: LineWindow) -> str:
        if window.paired:
            return f"fp::MaxPair<{C_TYPES[window.moving[0].dtype]}>"
        return f"fp::{window.window.op.value}<{C_TYPES[window.window.dtype]}>"

    def _window(self, window: LineWindow, state: str) -> list[str]:
        """The loops over a window's other axes, and in them over the points of the line."""
        frame = self.frame
        scopes, variables = [frame.top], [frame.names.numbered(axis.name) for axis in window.others]
        for axis, variable in zip(window.others, variables, strict=True):
            scopes.append(scopes[-1].child())
            scopes[-1].define_axis(axis, self._number(variable))
        inner = scopes[-1].child(conditional=bool(window.around))
        asked = scopes[-1].child()
        condition = asked.condition(window.around)
        fixed = self._fixed(window, inner)
        inner.lines += self._points(window, inner, state, fixed)
        lines = [*asked.lines, *where(inner.lines, condition)]
        few = prod(axis.size for axis in window.window.axes) <= UNROLLED_WINDOW
        for axis, variable in zip(reversed(window.others), reversed(variables), strict=True):
            lines = loop(variable, axis.size, lines, UNROLL if few else ROLLED)
        return lines if window.others else block("", lines)

    def _fixed(self, window: LineWindow, scope: Scope) -> list[_Fixed]:
        """Load what is the same for all results of a line: for each point of the window, as vectors of channels where they are neighbours."""
        frame, found = self.frame, []
        for load in window.fixed:
            name = frame.names.numbered(f"{frame.pointers[load.buffer]}_in")
            taken = frame.names.numbered(window.tap.name)
            at = scope.child({window.tap: self._number(taken)})
            lanes, width = frame.lane in load.index.axes, frame.schedule.width
            element, pointer = C_TYPES[load.dtype], frame.pointers[load.buffer]
            if lanes and frame.is_wide(load.buffer, load.index):
                first = at.operand(frame.first_lane(load.index))
                lines = [*at.lines, f"{name}[{taken}] = fp::load_vector<{width}>({pointer} + {first});"]
            elif lanes:
                at.define_axis(frame.lane, frame.v)
                index = at.index(load.index)
                lines = loop(frame.v, width, [*at.lines, f"{name}[{taken}][{frame.v}] = {pointer}[{index}];"])
            else:
                index = at.index(load.index)
                lines = [*at.lines, f"{name}[{taken}] = {pointer}[{index}];"]
            count = window.tap.size if window.tap in load.index.axes else 1
            kind = f"fp::Vec<{element}, {width}>" if lanes else element
            scope.lines += [f"{kind} {name}[{count}];", *loop(taken, count, lines)]
            found.append(_Fixed(load, name, several=count > 1, lane=f"[{frame.v}]" if lanes else ""))
        return found

    def _points(self, window: LineWindow, scope: Scope, state: str, fixed: Sequence[_Fixed]) -> list[str]:
        """Go over the points of the line, and push each to the results that need it."""
        frame, plan = self.frame, self.frame.schedule
        point, shared = frame.names.numbered("point"), window.shared(plan.unroll)
        here, names, is_there = self._read(window, scope, point)
        if shared is not None:
            return self._shared(window, shared, here, point, state, names, is_there)
        tap, beyond = frame.names.numbered(window.tap.name), f"{point} - {times(frame.u, window.step)}"
        into = f"{state} + {times(frame.u, self._states_of(window))}" if plan.unroll > 1 else state
        pushed = self._push(window, here, into, names, fixed, tap)
        needed = f"{tap} >= 0 && {tap} < {window.tap.size}"
        needed += f" && {is_there}" if is_there else ""
        here.lines += loop(frame.u, plan.unroll, [f"const int {tap} = {beyond};", *block(f"if ({needed})", pushed)])
        return loop(point, window.span(plan.unroll), here.lines)

    def _shared(
        self, window: LineWindow, shared: Line, here: Scope, point: str, state: str, names: Sequence[str], is_there: str
    ) -> list[str]:
        """The same where results share what they need of the line, which is then added to what they are made of."""
        frame, each, kind = self.frame, self._states_of(window), self._type(window)
        frame.apart |= window.window.op is ReduceOp.SUM
        of_line, of_point, k = (frame.names.numbered(word) for word in ("of_line", "of_point", "k"))
        pushed = self._push(window, here, of_point, names, [], "0")
        here.lines += where(pushed, is_there)
        count = shared.count * each
        merged = loop(k, count, [f"{state}[{k}].merge({of_line}[{k}]);"])
        return [
            f"{kind} {of_line}[{count}];",
            *line_of(shared, each, of_line, (kind, point, of_point), here.lines),
            *merged,
        ]

    def _number(self, counted: str) -> str:
        """What is counted by a loop, as a part of an index."""
        return counted if self.frame.index_type == "int" else f"{self.frame.index_type}({counted})"

    def _states_of(self, window: LineWindow) -> int:
        """What the results of a vector are made of."""
        return self.frame.schedule.width // (2 if window.paired else 1)

    def _read(self, window: LineWindow, scope: Scope, point: str) -> tuple[Scope, list[str], str]:
        """A scope in which number `point` of the line is read, with the names of what was read, and of the condition that it is there."""
        frame, plan = self.frame, self.frame.schedule
        line, _ = frame.arranged.image
        first, at = Axis(line.name, line.size - plan.unroll + 1), Axis("point of the line", window.span(plan.unroll))
        here = scope.child({first: self.place.top_row, at: self._number(point)})
        moved = {line: axis_index(first), window.tap: axis_index(at)}
        there = [Bound(bound.index.substitute(moved), bound.low, bound.high) for bound in window.along]
        condition, is_there, names = here.condition(there), "", list[str]()
        if condition != "true":
            is_there = frame.names.numbered("is_there")
            here.lines.append(f"const bool {is_there} = {condition};")
        for load in window.moving:
            name = frame.names.numbered(f"{frame.pointers[load.buffer]}_in")
            inside = here.child(conditional=bool(is_there))
            start = inside.operand(frame.first_lane(load.index).substitute(moved))
            read = [*inside.lines, f"{name} = fp::load_vector<{plan.width}>({frame.pointers[load.buffer]} + {start});"]
            here.lines.append(f"fp::Vec<{C_TYPES[load.dtype]}, {plan.width}> {name};")
            here.lines += where(read, is_there)
            names.append(name)
        return here, names, is_there

    def _push(
        self,
        window: LineWindow,
        scope: Scope,
        into: str,
        names: Sequence[str],
        fixed: Sequence[_Fixed],
        tap: str,
    ) -> list[str]:
        """Add a point to the states from `into` on."""
        frame, plan = self.frame, self.frame.schedule
        if window.paired:
            return [f"fp::raise_pairs({into}, {names[0]});"]
        lanes = scope.child({window.tap: tap, frame.lane: frame.v}, conditional=True)
        for load, name in zip(window.moving, names, strict=True):
            lanes.bind(load, f"{name}[{frame.v}]")
        for each in fixed:
            lanes.bind(each.load, each.at(tap))
        value = lanes.pushed(window.value)
        return loop(frame.v, plan.width, [*lanes.lines, f"({into})[{frame.v}].{value};"])
