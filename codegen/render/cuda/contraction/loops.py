"""Loops of contractions: over what a thread has several of, and the reduction loops over a kernel's columns where it has all values of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, ReductionResult, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program, Reduction, Store
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, UNROLL, bare, loop


@dataclass(frozen=True)
class Loop:
    """A loop with a pragma over a number of points. Its text is the point at hand: the variable, or 0 where there is no other point."""

    variable: str
    count: int

    def __str__(self) -> str:
        return self.variable if self.count > 1 else "0"

    def over(self, lines: Sequence[str], pragma: str = UNROLL) -> list[str]:
        """`lines`, which name the point by the loop, for each point."""
        if self.count == 1:
            return list(lines)
        return loop(self.variable, self.count, lines, pragma)


class ReductionLoops:
    """The lines of a kernel's phases; the anchor's result at hand is ``sum``.

    `rows` is the loop over a thread's rows, where it may have several.
    """

    def __init__(self, kernel: Kernel, program: Program, printer: Printer, rows: Loop | None = None) -> None:
        assert kernel.anchor is not None
        self.kernel, self.program, self.printer, self.names = kernel, program, printer, printer.names
        self.anchor, self._rows, self.c = kernel.anchor.name, rows, printer.names.locals
        self._suffix = f"[{rows}]" if rows is not None else ""
        self._states: dict[str, str] = {}

    def declared(self, reduction: Reduction, several: str = "") -> str:
        """The declaration of a reduction's state."""
        name = self._states[reduction.name] = self.names.numbered(f"{reduction.name}_state")
        return f"fp::{reduction.op.value}<{C_TYPES[reduction.dtype]}> {name}{several};"

    def state(self, reduction: Reduction) -> str:
        """The name of a state that was declared."""
        return self._states[reduction.name]

    def row_scope(self, roots: Sequence[Expr], axes: dict[Axis, str], row: str = "") -> Scope:
        """What is the same for all columns of a row, at `axes`: of the thread's row at hand, or of that number."""
        suffix, spare = self._suffix, 0
        if self._rows is not None:
            at = row or str(self._rows)
            suffix, spare = f"[{at}]", 1 + len(self._rows.variable) - len(at)
        scope = Scope(self.printer, at=axes)
        for node in walk(*roots):
            if isinstance(node, ReductionResult) and node.reduction in self._states:
                scope.bind(node, f"{self._states[node.reduction]}{suffix}.part<{node.part}>()", spare=spare)
        self.printer.expect(roots)
        return scope

    def column(
        self,
        outer: Scope,
        column: str,
        ready: Expr,
        reduction_loop: Sequence[Reduction],
        stores: Sequence[Store],
        kept: Expr | None = None,
        place: str = "",
    ) -> list[str]:
        """What is done at a `column` inside of the scope of its row; ``sum`` is what `ready` gives there.

        What is `kept` is left at its `place`.
        """
        inner = outer.child({self.kernel.cols[0]: column})
        inner.bind(ready, self.c.sum, spare=1)
        for reduction in reduction_loop:
            values = ", ".join(self._operand(inner, reduction, value) for value in reduction.values)
            inner.lines.append(f"{self._states[reduction.name]}{self._suffix}.push({values});")
        inner.lines += [self.stored(inner, store) for store in stores]
        inner.lines += [f"{place} = {bare(inner.value(kept))};"] if kept is not None else []
        return inner.lines

    def stored(self, scope: Scope, store: Store) -> str:
        """The line that stores a value of `scope`."""
        return scope.stored(store, self.program.buffer(store.buffer).dtype)

    def _operand(self, scope: Scope, reduction: Reduction, value: Expr) -> str:
        positional = reduction.op.finds_place and value is reduction.values[1]
        return scope.converted(value, DType.I64 if positional else reduction.dtype)
