"""Prints CPU kernels that take groups of neighbouring rows side by side, in panels of columns."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.expr import Expr, ReductionResult, largest
from fusepass.codegen.ir.index import Index
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cpu.loops import SIMD, Body, from_memory, memory_type
from fusepass.codegen.render.cpu.rows.writer import RowsWriter
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import block
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_cpu import CpuSchedule


class OuterWriter(RowsWriter):
    """Groups of neighbouring rows side by side, in panels of columns."""

    simd_columns = False

    def __init__(self, kernel: Kernel, schedule: CpuSchedule, place: Place) -> None:
        super().__init__(kernel, schedule, place)
        self.across = self.rows[-1]
        self.lanes = f"[{schedule.width}]"
        # States take all lanes, those past the last row too.
        self.initial = " = {}" if self.across.size % schedule.width or schedule.general else ""
        self.count: int | str = schedule.width
        self.row_values: dict[int, tuple[Expr, str]] = {}
        self.part_argument = self.names.exact("lane")
        self.lane = f"[{self.part_argument}]"

    def state_type(self, state: str) -> str:
        return f"fp::Lanes<{state}, {self.schedule.width}>"

    def scan_type(self, state: str) -> str:
        return f"fp::LanesScan<{state}, {self.schedule.width}>"

    def write(self, scope: Scope) -> None:
        self.shared(scope, self.rows[:-1], self._group, (self.across, self.schedule.width))

    def _group(self, scope: Scope) -> None:
        self.count = self.tile_count(scope, self.across, self.schedule.width, "lanes")
        self.per_row(scope)

    def element_loop(self, scope: Scope, body: Body) -> None:
        inner = scope.child({self.across: f"({self.variables[self.across]} + {self.part_argument})"})
        self.bind_stats(inner)
        for node, name in self.row_values.values():
            inner.bind(node, from_memory(f"{name}{self.lane}", node.dtype))
        body(inner)
        scope.lines += [SIMD, *block(self.head(self.part_argument, self.count), inner.lines)]

    def prepare(self, scope: Scope, roots: Sequence[Expr]) -> None:
        fresh = [node for node in largest(roots, self._row_only) if id(node) not in self.row_values]
        if not fresh:
            return
        named = {id(node): (node, self.names.numbered("row_value")) for node in fresh}
        for node, name in named.values():
            scope.lines.append(f"{memory_type(node.dtype)} {name}{self.lanes};")

        def compute(inner: Scope) -> None:
            for node, name in named.values():
                inner.lines.append(f"{name}{self.lane} = {inner.value(node)};")

        self.element_loop(scope, compute)
        self.row_values |= named

    def contiguous(self, index: Index) -> bool:
        return False

    def _row_only(self, node: Expr) -> bool:
        needs = self.printer.dataflow.needs(node)
        return not needs & frozenset(self.cols) and any(
            isinstance(n, ReductionResult) or n == self.across for n in needs
        )
