"""Writes a kernel whose teams keep a circular buffer of vectors, and meet once for several rows: each iteration is so many of them, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.expr import Expr
from fusepass.codegen.render.cuda.rows.circular_buffer import CircularBufferWriter
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.cuda.walk.states import State, exchange_places, name_results
from fusepass.codegen.render.spelling import block


class TogetherWriter(CircularBufferWriter):
    """The row at hand is number ``k`` of those for which the team has met."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.k = frame.names.exact("k")
        self.exchange = exchange_places(frame)
        self.rows_from = 0  # where what each row has begins

    def _whole_iteration(self, begin: int) -> list[str]:
        lines = self.top.lines
        return [*lines[begin : self.rows_from], *self._over_rows(self.k, lines[self.rows_from :])]

    def _over_rows(self, variable: str, lines: Sequence[str]) -> list[str]:
        return self.frame.unrolled(variable, self.buffer.together, lines)

    def _row_at_hand(self) -> None:
        """Defined after the meeting."""

    def _at_hand(self) -> str:
        return f"{self.frame.iteration} >= 0 && {self.frame.iteration} < {self.rows_in_iteration}"

    # ---- the team's meeting

    def _left(self, states: Sequence[State], iteration: str) -> list[str]:
        plan, team = self.plan, self.frame.team
        here = f"({self.k} + ({self.q} + {self.buffer.ahead}) / {plan.iterations}) % {self.buffer.together}"
        # Each row of an iteration has slots of its own: no barrier parts those who read them from who leaves the next row's.
        lines = [f"fp::leave_warp({state.slots}[{here}], {state.name});" for state in states]
        first = [f"fp::gather_warps({state.slots}[{here}], {state.name});" for state in states]
        first += [f"{team}.leave<{self.exchange[state.reduction.name]}>({state.name}, {here});" for state in states]
        lines += ["__syncthreads();", *block("if (threadIdx.x < 32)", first)]
        return [*lines, *(f"{state.name} = {state.type}();" for state in states)]

    def _ask_step(self, states: Sequence[State]) -> list[str]:
        """In the last step of an iteration, look for what members have left of the next iteration's rows."""
        frame, plan = self.frame, self.plan
        row = frame.names.exact("asked_row")
        head = f"const {frame.index_type} {row} = {frame.iteration} + ({frame.team}.row_of_thread() + 1) * {frame.row_step};"
        lines = [head, *block(self._exists(row), self._asked(states, row))]
        return block(f"if ({self.k} == {self.buffer.together - 1} && {self.q} == {plan.iterations - 1})", lines)

    def _find(self, states: Sequence[State], roots: Sequence[Expr]) -> None:
        frame, plan, top, k = self.frame, self.schedule, self.top, self.k
        warps = plan.threads // 32
        each = warps // self.buffer.together  # warps that look for the states of a row
        kind = f"const {frame.index_type}"
        names = [frame.names.exact(f"{state.name}_of_row") for state in states]
        found = [frame.names.exact(f"{state.name}_found") for state in states]
        shared = [frame.names.exact(f"{state.name}_of_team") for state in states]
        there = f"{frame.first_iteration} + {frame.team}.row_of_thread() * {frame.row_step} < {self.rows_in_iteration}"
        # The barrier comes before threads look, as in `found`.
        finding, leaving, gathering, lines = list[str](), list[str](), list[str](), ["__syncthreads();"]
        for state, name, one, place, asked in zip(states, names, found, shared, self.asked, strict=True):
            top.lines.append(f"{state.type} {name}[{self.buffer.together}];")
            lines += [f"__shared__ fp::Slots<{state.type}, {warps}> {place};", f"{state.type} {one};"]
            finding.append(f"{one} = {frame.team}.find<{self.exchange[state.reduction.name]}, {state.type}>({asked});")
            leaving.append(f"fp::leave_warp({place}, {one});")
            gathering.append(f"fp::gather_warps({place}.part<{each}>({k} * {each}), {name}[{k}]);")
        lines += [*block(f"if ({there})", finding), *leaving, f"{frame.team}.next();", "__syncthreads();"]
        top.lines += block(f"if ({frame.first_iteration} >= 0)", [*lines, *self._over_rows(k, gathering)])
        self.rows_from = len(top.lines)
        top.lines += [
            f"{kind} {frame.iteration} = {frame.first_iteration} + {k} * {frame.row_step};",
            f"{kind} {frame.row} = {frame.iteration} < 0 ? 0 : {frame.iteration};",
        ]
        of_row = [replace(state, element=f"{name}[{k}]") for state, name in zip(states, names, strict=True)]
        name_results(frame, of_row, self.stats)
