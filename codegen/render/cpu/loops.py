"""Loops, stores and reduction results as all CPU kernels print them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, ReductionResult
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Store
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, block
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_cpu import LEAST_PARALLEL, CpuSchedule

SIMD = "#pragma omp simd"

FAULT = "fault"
"""The name of what receives the report of a place outside its buffer, or of a division by zero, in kernels that check for them."""

Body = Callable[[Scope], None]


def memory_type(dtype: DType) -> str:
    """How elements lie in memory: bool as a byte, because GCC does not vectorise loops over bool."""
    return "uint8_t" if dtype is DType.BOOL else C_TYPES[dtype]


def from_memory(text: str, dtype: DType) -> str:
    """`text`, an element as it lies in memory, as a value."""
    return f"bool({text})" if dtype is DType.BOOL else text


class KernelWriter:
    """Prints the body of one kernel's function; the subclasses are the walks."""

    def __init__(self, kernel: Kernel, schedule: CpuSchedule, place: Place) -> None:
        self.kernel, self.schedule = kernel, schedule
        self.program, self.names = place.program, place.names
        self.index_type = "int64_t" if schedule.wide else "int"
        self.printer = Printer(place.names, place.pointers, self.index_type, general=schedule.general)
        self.printer.unknown_zero = "fp::zero"
        self.printer.fault = FAULT
        self.rows = tuple(axis for axis in kernel.rows if axis.size != 1)
        self.cols = tuple(axis for axis in kernel.cols if axis.size != 1)
        self.variables = {axis: self.names.exact(axis.name) for axis in (*self.rows, *self.cols)}
        self.stats: dict[tuple[str, int], str] = {}

    def lines(self) -> list[str]:
        """The statements of the function."""
        scope = Scope(self.printer)
        self.write(scope)
        return scope.lines

    def write(self, scope: Scope) -> None:
        """Append the statements of the function to `scope`."""
        raise NotImplementedError

    def head(self, variable: str, limit: int | str, step: int = 1) -> str:
        """The head of a loop from 0."""
        advance = f"++{variable}" if step == 1 else f"{variable} += {step}"
        end = free(limit) if isinstance(limit, int) else limit
        return f"for ({self.index_type} {variable} = 0; {variable} < {end}; {advance})"

    def nest(self, scope: Scope, axes: Sequence[Axis], body: Body, *, simd: bool) -> None:
        """Loops over all of `axes`, one inside the other, the innermost with `simd`, around `body`."""
        if not axes:
            body(scope)
            return
        axis, inner = axes[0], scope.child()
        inner.define_axis(axis, self.variables[axis])
        self.nest(inner, axes[1:], body, simd=simd)
        scope.lines += [SIMD] if simd and len(axes) == 1 else []
        scope.lines += block(self.head(self.variables[axis], axis.size), inner.lines)

    def shared(self, scope: Scope, axes: Sequence[Axis], body: Body, tile: tuple[Axis, int] | None = None) -> None:
        """The loops over `axes`, then over `tile` in steps, as one loop that threads share, around `body`.

        Inside, the variable of the tiled axis says where the tile starts; the axis itself is not defined.
        """
        inner = scope.child()
        heads = []
        for axis in axes:
            inner.define_axis(axis, self.variables[axis])
            heads.append(self.head(self.variables[axis], axis.size))
        if tile:
            heads.append(self.head(self.variables[tile[0]], tile[0].size, tile[1]))
        body(inner)
        lines = inner.lines
        for head in reversed(heads):
            lines = block(head, lines)
        if heads and (self.schedule.parallel or self.schedule.general):
            collapse = f" collapse({len(heads)})" if len(heads) > 1 else ""
            scope.lines.append(f"#pragma omp parallel for{collapse}{self.if_worthwhile} schedule(static)")
        scope.lines += lines

    @property
    def if_worthwhile(self) -> str:
        """The condition under which threads share a loop, where that depends on sizes."""
        return f" if ({free(self.schedule.work)} > {LEAST_PARALLEL})" if self.schedule.general else ""

    def tile_count(self, scope: Scope, axis: Axis, step: int, hint: str) -> int | str:
        """How many points the tile of `axis` has that starts at its variable."""
        if not self.schedule.general and (axis.size <= step or axis.size % step == 0):
            return min(axis.size, step)
        name = self.names.numbered(hint)
        left = f"{free(axis.size)} - {self.variables[axis]}"
        scope.lines.append(f"const {self.index_type} {name} = std::min<{self.index_type}>({step}, {left});")
        return name

    def value(self, scope: Scope, node: Expr, dtype: DType) -> str:
        """The text of `node` converted to `dtype`."""
        text = scope.value(node)
        return text if node.dtype is dtype else f"fp::cast<{C_TYPES[dtype]}>({text})"

    def store(self, scope: Scope, stores: Sequence[Store]) -> None:
        """`stores` at the point that `scope` defines."""
        for store in stores:
            value = self.value(scope, store.value, self.program.buffer(store.buffer).dtype)
            scope.lines.append(f"{self.printer.pointers[store.buffer]}[{scope.index(store.index)}] = {value};")

    def bind_stats(self, scope: Scope) -> None:
        """Make the reductions' results known in `scope`."""
        for node in self.kernel.nodes:
            if isinstance(node, ReductionResult) and (node.reduction, node.part) in self.stats:
                scope.bind(node, self.stats[node.reduction, node.part])
