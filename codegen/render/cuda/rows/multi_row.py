"""Writes a kernel whose teams keep a circular buffer of columns in shared memory: of a strip of rows that lie together, a thread has the same few all
the time.

It goes as that of a circular buffer of vectors does, but a block finds and leaves a state of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.expr import Expr
from fusepass.codegen.render.cuda.rows.circular_buffer import CircularBufferWriter
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.cuda.walk.kept import RowValues
from fusepass.codegen.render.cuda.walk.states import State, exchange_places, name_results
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import Constant, block
from fusepass.codegen.schedule.plan_rows import Columns


class MultiRowWriter(CircularBufferWriter):
    """A turn is a strip's."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        plan, rows = frame.schedule, frame.kernel.row_count
        assert isinstance(plan, Columns)
        assert plan.team is not None
        self.strips, self.of_block = plan, plan.team
        self.rows_in_iteration = -(-rows // (plan.lanes * plan.width))
        self.thread = "int(threadIdx.x)"
        self.partial = rows % (plan.lanes * plan.width) != 0  # the last strip
        self.exchange = exchange_places(frame)

    # ---- rows

    def _place_of_row(self, iteration: str) -> str:
        plan, lane = self.schedule, self.frame.lane_of_rows
        place = f"{iteration} * {plan.lanes} + {lane}"
        return place if plan.width == 1 else f"({place}) * {plan.width}"

    def _row_at_hand(self) -> None:
        frame = self.frame
        strip = frame.names.exact("strip")
        kind = f"const {frame.index_type}"
        self.top.lines.append(f"{kind} {strip} = {frame.iteration} < 0 ? 0 : {frame.iteration};")
        row = self._place_of_row(strip)
        if self.partial:
            frame.live = frame.names.exact("live")
            self.top.lines.append(f"const bool {frame.live} = {row} < {frame.kernel.row_count};")
            row = f"fp::least({row}, {frame.kernel.row_count - self.schedule.width})"
        self.top.lines.append(f"{kind} {frame.row} = {row};")

    def _row_in(self, scope: Scope, iteration: str) -> Constant:
        frame = self.frame
        name, row = frame.names.numbered("row_of_turn"), self._place_of_row(iteration)
        if self.partial:
            row = f"fp::least({row}, {frame.kernel.row_count - self.schedule.width})"
        return scope.constant(frame.index_type, name, row)

    def _loop_step(self, roots: Sequence[Expr], states: tuple[State, ...]) -> list[str]:
        # Values of the rows at hand are not those of a later strip's.
        at_hand, self.rows = self.rows, RowValues(self.frame, ())
        lines = super()._loop_step(roots, states)
        self.rows = at_hand
        return lines

    # ---- the team's meeting

    def _shown(self, state: State) -> str:
        return f"fp::Merging<{state.type}>::Shown"

    def _declare_asked(self, state: State, name: str) -> str:
        looks = -(-self.of_block.members // (self.strips.threads // self.strips.strip))
        return f"fp::Left<{self._shown(state)}> {name}[{looks}];"

    def _left(self, states: Sequence[State], iteration: str) -> list[str]:
        plan, team = self.strips, self.frame.team
        lines = [f"fp::leave_side<{plan.lanes}, {plan.groups}>({state.slots}, {state.name});" for state in states]
        lines.append("__syncthreads();")
        for state in states:
            merging = f"fp::Merging<{state.type}>"
            count = f"{self.frame.tile.limit} * {plan.span}" if plan.span > 1 else self.frame.tile.limit
            shown = f"{merging}::shown(sum, {count})"
            leave = f"{team}.leave<{self.exchange[state.reduction.name]}>({iteration}, row, {shown});"
            lines += [
                f"fp::gather_side<{plan.threads}, {plan.span}, {state.type}>(",
                f"    {state.slots}, [](const {merging}::Kept& kept) {{ return {merging}::sum(kept); }},",
                f"    [&](int row, const {merging}::Sum& sum) {{ {leave} }});",
            ]
            empty = f"{state.name}[{self.v if plan.width > 1 else 0}] = {state.type}();"
            lines += self.frame.unrolled(self.v, plan.width, [empty])
        return lines

    def _asked(self, states: Sequence[State], iteration: str) -> list[str]:
        return [
            f"{self.frame.team}.ask<{self.exchange[state.reduction.name]}>({iteration}, {name});"
            for state, name in zip(states, self.asked, strict=True)
        ]

    def _find(self, states: Sequence[State], roots: Sequence[Expr]) -> None:
        frame, plan, top = self.frame, self.strips, self.top
        there, side = f"if ({frame.iteration} >= 0)", plan.threads // plan.strip
        names = [frame.names.exact(f"{state.name}_of_row") for state in states]
        finding, gathering, taking = list[str](), list[str](), list[str]()
        for state, name, asked in zip(states, names, self.asked, strict=True):
            merging = f"fp::Merging<{state.type}>"
            shared, of_team = frame.names.exact(f"{state.name}_of_strip"), frame.names.exact(f"{state.name}_of_team")
            top.lines += [
                f"__shared__ fp::Side<{merging}::Sum, {side}, {plan.strip}> {of_team};",
                f"__shared__ fp::Slots<{merging}::Result, {plan.strip}> {shared};",
                f"{merging}::Result {name}[{plan.width}];",
            ]
            find = f"{frame.team}.find<{self.exchange[state.reduction.name]}, {state.type}>"
            finding.append(
                f"{find}({frame.iteration}, {asked}, {self.of_block.part}, {frame.kernel.col_count}, {plan.span}, {of_team});"
            )
            whole, sum_type = frame.kernel.col_count * plan.span, f"const {merging}::Sum& sum"
            gathering += [
                f"fp::gather_side<{plan.threads}, 1, {state.type}>(",
                f"    {of_team}, []({sum_type}) {{ return sum; }},",
                f"    [&](int row, {sum_type}) {{ {shared}[row] = {merging}::result(sum, {whole}); }});",
            ]
            position = f"{frame.lane_of_rows} * {plan.width} + {self.v}" if plan.width > 1 else frame.lane_of_rows
            position = f"({position}) / {plan.span}" if plan.span > 1 else position
            element = f"{name}[{self.v if plan.width > 1 else 0}]"
            taking += frame.unrolled(self.v, plan.width, [f"{element} = {shared}[{position}];"])
        # The barriers are every iteration's: between them there is room for the states of the next strip that is reduced, too.
        top.lines += [*block(there, finding), "__syncthreads();", *block(there, gathering), "__syncthreads();"]
        top.lines += block(there, taking)
        of_row = [
            replace(state, name=name, element=f"{name}[{self.v if plan.width > 1 else 0}]")
            for state, name in zip(states, names, strict=True)
        ]
        self.rows.states |= {state.reduction.name: state for state in of_row}
        name_results(frame, of_row, self.stats)
        if frame.vector_rows:
            frame.printer.expect(roots)
            self.rows.compute(roots)
