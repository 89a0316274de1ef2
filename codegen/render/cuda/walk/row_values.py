"""What depends on the row alone, where a thread of a CUDA kernel has several rows: once per row, not once per element."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusepass.codegen.ir.expr import Const, Expr, Masked, ReductionResult, Window, children
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.cuda.walk.states import State
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare


class RowValues:
    """Arrays with an element for each of a thread's rows.

    `states` are those of the reduction loops that are done, by reduction.
    """

    def __init__(self, frame: Frame, stats: Sequence[ReductionResult]) -> None:
        self.frame = frame
        self.states: dict[str, State] = {}
        self._stats = stats
        self._arrays: list[tuple[Expr, str]] = []

    def compute(self, roots: Iterable[Expr]) -> None:
        """Compute what depends on the row alone once per row, where a thread has several."""
        have = {id(node) for node, _ in self._arrays}
        nodes = [node for node in self._frontier(roots) if id(node) not in have]
        if not nodes:
            return
        lanes = self.frame.top.child()
        lanes.define_axis(self.frame.lane, self.frame.v)
        self.bind(lanes)
        made = []
        for node in nodes:
            name = self.frame.names.numbered("row_value")
            text = bare(lanes.value(node))
            self.frame.top.lines.append(f"{C_TYPES[node.dtype]} {name}[{self.frame.schedule.width}];")
            lanes.lines.append(f"{name}[{self.frame.v}] = {text};")
            made.append((node, f"{name}[{self.frame.v}]"))
        self.frame.top.lines += self.frame.unrolled(self.frame.v, self.frame.schedule.width, lanes.lines)
        self._arrays += made

    def _frontier(self, roots: Iterable[Expr]) -> list[Expr]:
        """The largest values below `roots` that differ from row to row only, outside masks and windows."""
        found: dict[int, Expr] = {}
        seen: set[int] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if self.frame.arranged.col not in self.frame.dataflow.needs(node):
                if self.frame.has_lanes(node) and not isinstance(node, ReductionResult | Const):
                    found[id(node)] = node
            elif isinstance(node, Masked):
                stack.append(node.other)
            elif not isinstance(node, Window):
                stack.extend(children(node))
        return list(found.values())

    def bind(self, lanes: Scope) -> None:
        """Make them and the results of reductions known where a lane's row is."""
        for stat in self._stats:
            if stat.reduction in self.states:
                lanes.bind(stat, f"{self.states[stat.reduction].element}.part<{stat.part}>()")
        for node, place in self._arrays:
            lanes.bind(node, place)
