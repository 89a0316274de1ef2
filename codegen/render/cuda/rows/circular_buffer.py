"""Writes a kernel whose teams keep a circular buffer of vectors in shared memory: memory always has something to do.

A thread goes over its vectors of one row after another, a few in each step. What it reduction loops is ahead of what it stores, and what it
copies is ahead of what it reduction loops: the place that a vector leaves is where a later one comes to. So while blocks wait for what the
others found of a row, its successor is under way, and what they wait for was left some steps before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.expr import Expr
from fusepass.codegen.render.cuda.walk.accesses import Ahead, declare, declare_one, fill_steps, loads_ahead
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.cuda.walk.kernel import KernelWriter, Phase
from fusepass.codegen.render.cuda.walk.states import State, asked, declare_state, found, left, name_results
from fusepass.codegen.render.cuda.walk.tile import Tile
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import Constant, block, loop, written
from fusepass.codegen.schedule.plan_rows import Columns, Rows


@dataclass(frozen=True)
class Waiting(Ahead):
    """What stays in an array of vectors from before the first row on.

    Attributes:
        place: the C text of the step's first vector there.
    """

    place: str = ""

    def of_step(self, frame: Frame) -> str:
        return f"{self.name}[{self.place} + {frame.u}]" if frame.unroll > 1 else f"{self.name}[{self.place}]"


@dataclass(frozen=True)
class Coming(Ahead):
    """A load for a later step; of some steps of a row, what `waiting` has for all rows.

    Attributes:
        waiting: that, where there is any.
        held: the C condition that the step is one of those.
    """

    waiting: Waiting | None = None
    held: str = ""

    def of_step(self, frame: Frame) -> str:
        loaded = super().of_step(frame)
        return f"({self.held} ? {self.waiting.of_step(frame)} : {loaded})" if self.waiting else loaded


class CircularBufferWriter(KernelWriter):
    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.q, self.place = frame.names.exact("q"), frame.names.exact("place")
        plan = frame.schedule
        assert isinstance(plan, Rows | Columns)
        assert plan.buffer is not None
        self.plan, self.buffer = plan, plan.buffer
        self.held_steps = self.buffer.waiting // plan.unroll
        self.spread = f"fp::Spread<{self.held_steps}, {plan.iterations}>"  # of these over those of a row
        self.circular_buffer = self.copies_of_kept()
        self.asked: list[str] = []  # what members have left of the next row, where it was looked for
        self.rows_in_iteration = frame.kernel.row_count  # rows, or strips of them, that teams take one after another
        self.thread = frame.tile.start

    def write(self) -> list[str]:
        frame, top = self.frame, self.top
        (reduction_loop,) = frame.kernel.reduction_loops
        swept = [value for reduction in reduction_loop for value in reduction.values]
        results = [store.value for store in frame.kernel.stores]
        states = tuple(declare_state(frame, reduction) for reduction in reduction_loop)
        coming = self._coming(results)
        for state in states:
            self.asked.append(frame.names.exact(f"{state.name}_asked"))
            top.lines.append(self._declare_asked(state, self.asked[-1]))
        top.lines.append(f"int {self.place} = 0;")
        before = len(top.lines)
        self._row_at_hand()
        waiting = [each.waiting for each in coming if each.waiting]
        narrow = (each for each in waiting if each.load.dtype.compute is not each.load.dtype)
        top.lines += [f"fp::stay({each.name});" for each in narrow]
        self._say("what the team found of the row")
        self._find(states, results)
        if frame.kernel.row_stores:
            self.write_row_stores(frame.kernel.row_stores)
        steps = [
            f"fp::await_copies<{self.buffer.places - 1 - self.buffer.ahead}>();",
            *self._loop_step(swept, states),
            *self._ask_step(states),
            *self._result_step(results, coming),
            *self._load_step(coming),
            *self._copy_step(),
            f"{self.place} = {self.place} + 1 < {self.buffer.places} ? {self.place} + 1 : 0;",
        ]
        self._say("a later row's reduction, results, and copies to the place that they leave")
        top.lines += self._over_steps(steps)
        self.places.check()
        return written([*top.lines[:before], *block(frame.row_loop, top.lines[before:])])

    def _over_steps(self, lines: Sequence[str]) -> list[str]:
        """`lines` for each step of a row."""
        return loop(self.q, self.plan.iterations, lines)

    # ---- rows

    def _row_at_hand(self) -> None:
        frame = self.frame
        self.top.lines.append(f"const {frame.index_type} {frame.row} = {frame.iteration} < 0 ? 0 : {frame.iteration};")

    def _find(self, states: Sequence[State], roots: Sequence[Expr]) -> None:
        """The merged states of the row at hand, and their results, of which `roots` are made."""
        frame = self.frame
        names = [frame.names.exact(f"{state.name}_of_row") for state in states]
        self.top.lines += [f"{state.type} {name};" for state, name in zip(states, names, strict=True)]
        self.top.lines += block(f"if ({frame.iteration} >= 0)", found(frame, states, names, self.asked))
        of_row = [replace(state, element=name) for state, name in zip(states, names, strict=True)]
        name_results(frame, of_row, self.stats)

    def _iteration_of(self, scope: Scope, name: str, steps: int | str) -> str:
        """Define whose turn it is so many steps later, by a new `name` like this one; its name."""
        frame, plan = self.frame, self.plan
        iteration = frame.names.exact(name)
        later = f"({self.q} + {steps}) / {plan.iterations} * {frame.row_step}"
        scope.lines.append(f"const {frame.index_type} {iteration} = {frame.iteration} + {later};")
        return iteration

    def _row_in(self, scope: Scope, iteration: str) -> str | Constant:
        """The thread's row of that turn, which `scope` may define; its name."""
        return iteration

    def _define_row(self, scope: Scope, iteration: str) -> None:
        assert self.frame.arranged.row is not None
        scope.define_axis(self.frame.arranged.row, self._row_in(scope, iteration))

    def _start(self, scope: Scope, steps: int | str) -> Constant:
        """Define the first vector of the step that comes so many steps later; its name."""
        frame, plan = self.frame, self.plan
        start = frame.names.numbered("start")
        within = f"({self.q} + {steps}) % {plan.iterations}" if steps else self.q
        value = f"{frame.tile.start} + {within} * {plan.unroll * frame.tile.step}"
        return scope.constant(frame.index_type, start, value)

    def _exists(self, row: str) -> str:
        return f"if ({row} >= 0 && {row} < {self.rows_in_iteration})"

    # ---- steps

    def _loop_step(self, roots: Sequence[Expr], states: tuple[State, ...]) -> list[str]:
        frame, plan = self.frame, self.plan
        # Of its own: what depends on the row at hand is not what depends on that one.
        outer = Scope(frame.printer)
        iteration = self._iteration_of(outer, "swept_row", self.buffer.ahead)
        scope = Scope(frame.printer)
        self._define_row(scope, iteration)
        start, stays = self._start(scope, self.buffer.ahead), self.buffer.places - self.buffer.ahead
        later = f"({self.place} < {stays} ? {self.place} + {self.buffer.ahead} : {self.place} - {stays})"
        self._stand(scope, later)
        frame.printer.expect(roots)
        ahead = loads_ahead(frame, roots, [kept.node for kept in self.kept])
        scope.lines += [declare(frame, each) for each in ahead if frame.unroll > 1]
        if ahead and frame.unroll > 1:
            fill_steps(frame, scope, frame.tile, start, ahead)
        self.all_steps(scope, Phase(tuple(roots), states, (), self.kept, ()), frame.tile, start, ahead)
        last = f"if (({self.q} + {self.buffer.ahead}) % {plan.iterations} == {plan.iterations - 1})"
        return [
            *outer.lines,
            *block(self._exists(iteration), [*scope.lines, *block(last, self._left(states, iteration))]),
        ]

    def _left(self, states: Sequence[State], iteration: str) -> list[str]:
        """Leave the `states` of that turn for the team, and begin new ones."""
        return [*left(self.frame, states), *(f"{state.name} = {state.type}();" for state in states)]

    def _ask_step(self, states: Sequence[State]) -> list[str]:
        """In the last step of a row, look for what members have left of the next one: it comes while results are stored."""
        scope = Scope(self.frame.printer)
        iteration = self._iteration_of(scope, "asked_row", 1)
        lines = block(self._exists(iteration), self._asked(states, iteration))
        return block(f"if ({self.q} == {self.plan.iterations - 1})", [*scope.lines, *lines])

    def _declare_asked(self, state: State, name: str) -> str:
        return f"fp::Left<{state.type}> {name};"

    def _asked(self, states: Sequence[State], iteration: str) -> list[str]:
        return asked(self.frame, states, self.asked)

    def _result_step(self, roots: Sequence[Expr], coming: Sequence[Ahead]) -> list[str]:
        frame = self.frame
        scope = self.top.child()
        start = self._start(scope, 0)
        self._stand(scope, self.place)
        frame.printer.expect(roots)
        phase = Phase(tuple(roots), (), frame.kernel.stores, self.kept, ())
        self.all_steps(scope, phase, frame.tile, start, coming)
        return block(f"if ({frame.iteration} >= 0)", scope.lines)

    def _copy_step(self) -> list[str]:
        frame = self.frame
        outer, scope = Scope(frame.printer), Scope(frame.printer)
        iteration = self._iteration_of(outer, "next_row", self.buffer.places)
        row = self._row_in(scope, iteration)
        start = self._start(scope, self.buffer.places)
        self._stand(scope, self.place)
        number = frame.number(frame.tile, start)
        lines = self.circular_buffer.vector(row, number, self.places.place)
        copies = [*scope.lines, *frame.of_each_step(frame.tile, number, lines)]
        lines = [*outer.lines, *block(self._exists(iteration), copies), "fp::end_copies();"]
        return [*lines, *self._prefetch_step()] if self.buffer.nearer else lines

    def _prefetch_step(self) -> list[str]:
        """Bring to the L2 cache what is copied some steps later: it waits there, not in the circular buffer, while memory is busy."""
        frame, steps = self.frame, self.buffer.places + self.buffer.nearer
        outer, scope = Scope(frame.printer), Scope(frame.printer)
        iteration = self._iteration_of(outer, "row_of_prefetched", steps)
        row = self._row_in(scope, iteration)
        start, tile = self._start(scope, steps), self._placed_anew(scope)
        number = frame.number(tile, start)
        lines = self.circular_buffer.prefetch(row, number, tile)
        lines = [*scope.lines, *frame.of_each_step(tile, number, lines)]
        return [*outer.lines, *block(self._exists(iteration), lines)]

    def _stand(self, scope: Scope, place: str) -> None:
        """Let `place` of the circular buffer be where the vectors at hand are."""
        frame, plan = self.frame, self.plan
        first = frame.names.numbered("stand")
        scope.lines.append(f"const int {first} = {place} * {plan.unroll * plan.threads} + {self.thread};")
        self.places.place = f"{first} + {frame.u} * {plan.threads}" if plan.unroll > 1 else first

    # ---- loads for results, some steps before these

    def _coming(self, roots: Sequence[Expr]) -> list[Coming]:
        """Declare what receives them, and load what waits for all rows."""
        frame, made = self.frame, list[Coming]()
        frame.printer.expect(roots)
        rows = frozenset(frame.kernel.rows)
        for each in loads_ahead(frame, roots, [kept.node for kept in self.kept]):
            stays = self.held_steps > 0 and not each.load.index.axes & rows and not each.guard
            waiting = self._waiting(each) if stays else None
            held = f"{self.spread}::holds({self.q})" if stays else ""
            what = each.load, each.guard, each.wide, each.lanes, each.name
            made.append(Coming(*what, under_way=True, stays=stays, waiting=waiting, held=held))
            self.top.lines.append(declare(frame, made[-1]))
        fill = [each.waiting for each in made if each.waiting]
        if fill:
            self.top.lines += [declare_one(frame, each, f"[{self.buffer.waiting}]") for each in fill]
            scope = self.top.child()
            fill_steps(frame, scope, frame.tile, self._start(scope, 0), fill)
            self.top.lines += self._over_steps(block(f"if ({self.spread}::holds({self.q}))", scope.lines))
        return made

    def _waiting(self, each: Ahead) -> Waiting:
        """What has this load for the steps that hold it."""
        place = f"{self.spread}::before({self.q})"
        place = f"{place} * {self.frame.unroll}" if self.frame.unroll > 1 else place
        name = self.frame.names.exact(f"{each.name}_waiting")
        return Waiting(each.load, each.guard, each.wide, each.lanes, name, place=place)

    def _load_step(self, coming: Sequence[Coming]) -> list[str]:
        """Loads for the next step; of what all rows share, where this step has used it up, for the next step that does not hold it."""
        own = self._load([each for each in coming if not each.stays], 1, "coming_row")
        if self.held_steps == self.plan.iterations:
            return own
        step = self.frame.names.exact("until_next")
        shared = self._load([each for each in coming if each.stays], step, "row_of_next")
        if shared:
            until = f"const int {step} = {self.spread}::until_next({self.q});"
            shared = block(f"if (!{self.spread}::holds({self.q}))", [until, *shared])
        return [*own, *shared]

    def _load(self, coming: Sequence[Coming], steps: int | str, row: str) -> list[str]:
        """What is loaded now for so many steps later, on a row of this name."""
        if not coming:
            return []
        frame = self.frame
        outer, scope = Scope(frame.printer), Scope(frame.printer)
        iteration = self._iteration_of(outer, row, steps)
        self._define_row(scope, iteration)
        some = [Ahead(e.load, e.guard, e.wide, e.lanes, e.name, stays=e.stays) for e in coming]
        fill_steps(frame, scope, self._counted_anew(scope), self._start(scope, steps), some)
        return [*outer.lines, *block(self._exists(iteration), scope.lines)]

    def _placed_anew(self, scope: Scope) -> Tile:
        """The tile, beginning where the compiler does not know: or it would keep the addresses of all steps in registers."""
        first = self.frame.names.numbered("first")
        scope.lines += [f"{self.frame.index_type} {first} = {self.frame.tile.base};", f"fp::stay({first});"]
        return replace(self.frame.tile, base=first)

    def _counted_anew(self, scope: Scope) -> Tile:
        """The same with the count, which decides what a thread past the end loads."""
        tile = self.frame.tile
        if not tile.limit:
            return tile
        count = self.frame.names.numbered("count")
        scope.lines += [f"{self.frame.index_type} {count} = {tile.limit};", f"fp::stay({count});"]
        return replace(tile, limit=count)
