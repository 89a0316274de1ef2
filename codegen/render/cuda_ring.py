"""Writes a kernel whose teams keep a ring of vectors in shared memory: memory always has something to do.

A thread goes over its vectors of one row after another, a few in each step. What it sweeps is ahead of what it stores, and what it
copies is ahead of what it sweeps: the place that a vector leaves is where a later one comes to. So while blocks wait for what the
others found of a row, its successor is under way, and what they wait for was left some steps before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.expr import Expr, Load
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda_ahead import Fetches
from fusepass.codegen.render.cuda_frame import Frame, without_unused
from fusepass.codegen.render.cuda_kernel import KernelWriter, Phase
from fusepass.codegen.render.cuda_loads import Ahead, declare, declare_one, fill_steps, loads_ahead
from fusepass.codegen.render.cuda_states import State, declare_state, found, left, name_results
from fusepass.codegen.render.cuda_tile import arrange
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import Identifiers, block
from fusepass.codegen.schedule.plan import Schedule


def ring_body(
    kernel: Kernel, program: Program, schedule: Schedule, pointers: dict[str, str], names: Identifiers
) -> list[str]:
    """The statements of `kernel`; see `kernel_body`."""
    return _RingWriter(Frame(arrange(kernel, program, schedule), program, schedule, pointers, names)).write()


@dataclass(frozen=True)
class _Coming(Ahead):
    """A load for the next step; of the first steps of a row, what `waiting` has for all rows.

    Attributes:
        waiting: the C name of an array of vectors, where there is one.
        within: the C condition that the step is one of those.
        place: the C text of the step's first vector there.
    """

    waiting: str = ""
    within: str = ""
    place: str = ""

    def of_step(self, frame: Frame) -> str:
        loaded = super().of_step(frame)
        place = f"{self.place} + {frame.u}" if frame.unroll > 1 else self.place
        return f"({self.within} ? {self.waiting}[{place}] : {loaded})" if self.waiting else loaded


class _RingWriter(KernelWriter):
    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.q, self.place = frame.names.exact("q"), frame.names.exact("place")
        self.kept = tuple(replace(kept, first=-1) for kept in self.kept)
        for kept in self.kept:
            self.places.declare(kept)
        loads = [(kept.node, self.places.name(kept)) for kept in self.kept if isinstance(kept.node, Load)]
        self.ring = Fetches(frame, loads)

    def write(self) -> list[str]:
        frame, top = self.frame, self.top
        (sweep,) = frame.kernel.sweeps
        swept = [value for reduction in sweep for value in reduction.values]
        results = [store.value for store in frame.kernel.stores]
        states = tuple(declare_state(frame, reduction) for reduction in sweep)
        coming = self._coming(results)
        top.lines.append(f"int {self.place} = 0;")
        before = len(top.lines)
        top.lines.append(f"const {frame.index_type} {frame.row} = {frame.turn} < 0 ? 0 : {frame.turn};")
        narrow = (each for each in coming if each.waiting and each.load.dtype.compute is not each.load.dtype)
        top.lines += [f"fp::stay({each.waiting});" for each in narrow]
        self._say("what the team found of the row")
        self._find(states)
        if frame.kernel.row_stores:
            self.write_row_stores(frame.kernel.row_stores)
        steps = [
            f"fp::await_copies<{self.schedule.ring - 1 - self.schedule.ahead}>();",
            *self._sweep_step(swept, states),
            *self._result_step(results, coming),
            *self._load_step(coming),
            *self._copy_step(),
            f"{self.place} = {self.place} + 1 < {self.schedule.ring} ? {self.place} + 1 : 0;",
        ]
        self._say("a later row's reduction, results, and copies to the place that they leave")
        span = f"int {self.q} = 0; {self.q} < {self.schedule.turns}; ++{self.q}"
        top.lines += ["#pragma unroll", *block(f"for ({span})", steps)]
        self.places.check()
        lines = [*top.lines[:before], *block(frame.row_loop, top.lines[before:])]
        return without_unused(lines)

    # ---- rows

    def _find(self, states: Sequence[State]) -> None:
        """The merged states of the row at hand, and their results."""
        frame = self.frame
        names = [frame.names.exact(f"{state.name}_of_row") for state in states]
        self.top.lines += [f"{state.type} {name};" for state, name in zip(states, names, strict=True)]
        self.top.lines += block(f"if ({frame.turn} >= 0)", found(frame, states, names))
        of_row = [replace(state, element=name) for state, name in zip(states, names, strict=True)]
        name_results(frame, of_row, self.stats)

    def _row_of(self, scope: Scope, name: str, steps: int) -> str:
        """Define the row, by a new `name` like this one, that comes so many steps later; its name."""
        frame, plan = self.frame, self.schedule
        assert frame.arranged.row is not None
        row = frame.names.exact(name)
        later = f"({self.q} + {steps}) / {plan.turns} * {frame.row_step}"
        scope.lines.append(f"const {frame.index_type} {row} = {frame.turn} + {later};")
        scope.define_axis(frame.arranged.row, row)
        return row

    def _start(self, scope: Scope, steps: int) -> str:
        """Define the first vector of the step that comes so many steps later; its name."""
        frame, plan = self.frame, self.schedule
        start = frame.names.numbered("start")
        within = f"({self.q} + {steps}) % {plan.turns}" if steps else self.q
        scope.lines.append(
            f"const {frame.index_type} {start} = {frame.tile.start} + {within} * {plan.unroll * plan.lanes};"
        )
        return start

    def _exists(self, row: str) -> str:
        return f"if ({row} >= 0 && {row} < {self.frame.kernel.row_count})"

    # ---- steps

    def _sweep_step(self, roots: Sequence[Expr], states: tuple[State, ...]) -> list[str]:
        frame, plan = self.frame, self.schedule
        # Of its own: what depends on the row at hand is not what depends on that one.
        outer = Scope(frame.printer)
        row = self._row_of(outer, "swept_row", plan.ahead)
        scope = Scope(frame.printer)
        assert frame.arranged.row is not None
        scope.define_axis(frame.arranged.row, row)
        start, stays = self._start(scope, plan.ahead), plan.ring - plan.ahead
        later = f"({self.place} < {stays} ? {self.place} + {plan.ahead} : {self.place} - {stays})"
        self._stand(scope, later)
        frame.printer.expect(roots)
        ahead = loads_ahead(frame, roots, [kept.node for kept in self.kept])
        scope.lines += [declare(frame, each) for each in ahead if frame.unroll > 1]
        if ahead and frame.unroll > 1:
            fill_steps(frame, scope, frame.tile, start, ahead)
        self.all_steps(scope, Phase(tuple(roots), states, (), self.kept, ()), frame.tile, start, ahead)
        last = f"if (({self.q} + {plan.ahead}) % {plan.turns} == {plan.turns - 1})"
        end = [*left(frame, states), *(f"{state.name} = {state.type}();" for state in states)]
        return [*outer.lines, *block(self._exists(row), [*scope.lines, *block(last, end)])]

    def _result_step(self, roots: Sequence[Expr], coming: Sequence[Ahead]) -> list[str]:
        frame = self.frame
        scope = self.top.child()
        start = self._start(scope, 0)
        self._stand(scope, self.place)
        frame.printer.expect(roots)
        phase = Phase(tuple(roots), (), frame.kernel.stores, self.kept, ())
        self.all_steps(scope, phase, frame.tile, start, coming)
        return block(f"if ({frame.turn} >= 0)", scope.lines)

    def _copy_step(self) -> list[str]:
        frame, plan = self.frame, self.schedule
        outer, scope = Scope(frame.printer), Scope(frame.printer)
        row = self._row_of(outer, "next_row", plan.ring)
        start = self._start(scope, plan.ring)
        self._stand(scope, self.place)
        number = frame.number(frame.tile, start)
        lines = self.ring.vector(row, number, self.places.place)
        lines = block(f"if ({number} < {frame.tile.end})", lines) if frame.tile.tail else lines
        copies = [*scope.lines, *frame.unrolled(frame.u, frame.unroll, lines)]
        return [*outer.lines, *block(self._exists(row), copies), "fp::end_copies();"]

    def _stand(self, scope: Scope, place: str) -> None:
        """Let `place` of the ring be where the vectors at hand are."""
        frame, plan = self.frame, self.schedule
        first = frame.names.numbered("stand")
        scope.lines.append(f"const int {first} = {place} * {plan.unroll * plan.lanes} + {frame.tile.start};")
        self.places.place = f"{first} + {frame.u} * {plan.lanes}" if plan.unroll > 1 else first

    # ---- loads for results, a step before these

    def _coming(self, roots: Sequence[Expr]) -> list[_Coming]:
        """Declare what receives them, and load what waits for all rows."""
        frame, plan, made = self.frame, self.schedule, list[_Coming]()
        frame.printer.expect(roots)
        rows = frozenset(frame.kernel.rows)
        for each in loads_ahead(frame, roots, [kept.node for kept in self.kept]):
            waits = plan.waiting > 0 and not each.load.index.axes & rows and not each.guard
            waiting = frame.names.exact(f"{each.name}_waiting") if waits else ""
            within, place = f"{self.q} < {plan.waiting // plan.unroll}", f"{self.q} * {plan.unroll}"
            made.append(
                _Coming(
                    each.load,
                    each.guard,
                    each.wide,
                    each.lanes,
                    each.name,
                    False,
                    True,
                    waits,
                    False,
                    waiting,
                    within,
                    place,
                )
            )
            self.top.lines.append(declare(frame, each))
            if waits:
                held = replace(each, name=waiting if plan.waiting > 1 else f"{waiting}[0]")
                self.top.lines.append(declare_one(frame, replace(each, name=waiting), f"[{plan.waiting}]"))
                frame.unroll = plan.waiting
                fill_steps(frame, self.top, frame.tile, frame.tile.start, [held])
                frame.unroll = plan.unroll
        return made

    def _load_step(self, coming: Sequence[_Coming]) -> list[str]:
        frame, plan = self.frame, self.schedule
        if not coming:
            return []
        outer, scope = Scope(frame.printer), Scope(frame.printer)
        row = self._row_of(outer, "coming_row", 1)
        assert frame.arranged.row is not None
        scope.define_axis(frame.arranged.row, row)
        start = self._start(scope, 1)
        lines, later = scope.lines, f"({self.q} + 1) % {plan.turns} >= {plan.waiting // plan.unroll}"
        for waits in (False, True):
            some = [Ahead(e.load, e.guard, e.wide, e.lanes, e.name, stays=waits) for e in coming if e.stays is waits]
            if some:
                inner = scope.child()
                fill_steps(frame, inner, frame.tile, start, some)
                lines += block(f"if ({later})", inner.lines) if waits else inner.lines
        return [*outer.lines, *block(self._exists(row), lines)]
