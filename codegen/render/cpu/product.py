"""Prints a kernel with a matrix product as plain C++ loops: right for any operands, and no rival of a library."""

from __future__ import annotations

from fusepass.codegen.ir.expr import ReductionResult
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.ir.product import Product
from fusepass.codegen.render.cpu.loops import KernelWriter
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import block, where


class ProductWriter(KernelWriter):
    """Every element for itself: its sum, in double, then what the stores make of it."""

    def write(self, scope: Scope) -> None:
        self.printer.expect(store.value for store in self.kernel.stores)
        self.shared(scope, self.rows, self._element)

    def _element(self, scope: Scope) -> None:
        inside = scope.child(conditional=True)
        self._point(inside)
        condition = scope.condition(self.kernel.within)
        scope.lines += where(inside.lines, condition if self.kernel.within else "")

    def _point(self, scope: Scope) -> None:
        product = self.kernel.anchor
        assert isinstance(product, Product)
        piece, batch, row, column = self.kernel.rows
        term = Axis(self.names.numbered("term"), product.inner)
        inside = scope.child({term: term.name})
        factors = []
        for operand, across in ((product.left, row), (product.right, column)):
            place = [axis_index(axis) for axis in (batch, across, term)]
            index = inside.index(operand.place(*place))
            factors.append(f"double(fp::cast<float>({self.printer.pointers[operand.buffer]}[{index}]))")
        total, first = self.names.numbered("sum"), scope.index(axis_index(piece) * product.length)
        end, last = (
            self.names.numbered("end"),
            f"std::min<{self.index_type}>({product.inner}, {first} + {product.length})",
        )
        scope.lines.append(f"double {total} = 0.0;")
        head = f"for ({self.index_type} {term.name} = {first}, {end} = {last}; {term.name} < {end}; ++{term.name})"
        scope.lines += block(head, [*inside.lines, f"{total} = fp::fma({', '.join(factors)}, {total});"])
        for node in self.kernel.nodes:
            if isinstance(node, ReductionResult):
                scope.bind(node, f"float({total})")
        self.store(scope, self.kernel.stores)
