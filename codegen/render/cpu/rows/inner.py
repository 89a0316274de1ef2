"""Prints CPU kernels that go row by row, in blocks of columns."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.dataflow import Need
from fusepass.codegen.ir.expr import Expr, largest
from fusepass.codegen.ir.index import Index, contiguous_strides, flat_index
from fusepass.codegen.render.cpu.loops import Body
from fusepass.codegen.render.cpu.rows.columns import points
from fusepass.codegen.render.cpu.rows.writer import RowsWriter
from fusepass.codegen.render.printer import Scope

_MANY_ROWS = 8
_MOST_COL_VALUES = 16384


class InnerWriter(RowsWriter):
    """Row by row, in blocks of columns."""

    part_argument = ""
    lanes = ""
    lane = ""
    initial = ""
    simd_columns = True

    def state_type(self, state: str) -> str:
        return f"fp::Row<{state}>"

    def scan_type(self, state: str) -> str:
        return f"fp::RowScan<{state}>"

    def write(self, scope: Scope) -> None:
        if self.kernel.row_count >= _MANY_ROWS and self.kernel.col_count <= _MOST_COL_VALUES:
            self._compute_col_values(scope)
        self.shared(scope, self.rows, self.per_row)

    def element_loop(self, scope: Scope, body: Body) -> None:
        self.bind_stats(scope)
        body(scope)

    def _compute_col_values(self, scope: Scope) -> None:
        """What depends on columns only, such as a weight's conversion, once for all rows."""
        cols = frozenset[Need](self.cols)
        found = list(
            largest(self.kernel.roots, lambda node: bool(n := self.printer.dataflow.needs(node)) and n <= cols)
        )
        self.printer.expect(found)
        for node in found:
            axes = [axis for axis in self.cols if axis in self.printer.dataflow.needs(node)]
            name, place = self.names.numbered("col_value"), flat_index(axes)
            scope.lines.append(self.array(node.dtype, name, points(axes)))

            def compute(inner: Scope, node: Expr = node, name: str = name, place: Index = place) -> None:
                inner.lines.append(f"{name}[{inner.index(place)}] = {inner.value(node)};")

            self.nest(scope, axes, compute, simd=True)
            self.col_values.append((node, name, place))

    def prepare(self, scope: Scope, roots: Sequence[Expr]) -> None:
        self.bind_stats(scope)  # what depends on nothing else is then printed here, before the loops over columns

    def contiguous(self, index: Index) -> bool:
        axes = self.trailing if self.tiled is None else (self.tiled, *self.trailing)
        strides = contiguous_strides([axis.size for axis in axes])
        return all(index.stride(axis) == stride for axis, stride in zip(axes, strides, strict=True))
