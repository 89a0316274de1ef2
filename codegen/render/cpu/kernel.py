"""Prints one kernel as C++ whose innermost loops vectorise; `schedule_cpu` says what the walks mean."""

from __future__ import annotations

import functools

from fusepass.codegen.ir.conversions import narrowed, widened_along
from fusepass.codegen.ir.expr import Builder, Load
from fusepass.codegen.ir.pieces import cut
from fusepass.codegen.ir.program import Kernel, Store
from fusepass.codegen.ir.unroll import unroll_windows
from fusepass.codegen.render.cpu.loops import SIMD, KernelWriter
from fusepass.codegen.render.cpu.rows.inner import InnerWriter
from fusepass.codegen.render.cpu.rows.outer import OuterWriter
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import block
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_cpu import CpuSchedule, Walk

_UNROLLED_WINDOW = 32  # points
_PIECE = 16  # elements: a vector
_PIECES = 64  # loops


def kernel_body(kernel: Kernel, schedule: CpuSchedule, place: Place) -> list[str]:
    """The statements that run `kernel`."""
    kernel = unroll_windows(kernel, Builder(), _UNROLLED_WINDOW)
    return _WRITERS[schedule.walk](kernel, schedule, place).lines()


class PointwiseWriter(KernelWriter):
    """Every element for itself, along the last row axis."""

    def write(self, scope: Scope) -> None:
        self.printer.expect(store.value for store in self.kernel.stores)
        outer, last = self.rows[:-1], self.rows[-1:]
        if self.schedule.chunk:
            self.shared(scope, outer, self.piece, (self.rows[-1], self.schedule.chunk))
        elif outer or not last:
            self.shared(scope, outer, self._along_last)
        else:
            self.nest(scope, last, self._element, simd=True)
            if self.schedule.parallel or self.schedule.general:
                at = scope.lines.index(SIMD)
                scope.lines[at] = f"#pragma omp parallel for simd{self.if_worthwhile} schedule(static)"

    def _along_last(self, scope: Scope) -> None:
        """The loop along the last axis; one for each piece of what is concatenated there."""
        last = self.rows[-1:]
        pieces = [] if not last or self.schedule.general else cut(self.kernel, *last, least=_PIECE, most=_PIECES)
        if not pieces:
            self.nest(scope, last, self._element, simd=True)
        for axis, kernel in pieces:
            self.variables[axis] = self.variables[last[0]]
            self.printer.expect(store.value for store in kernel.stores)
            self.nest(scope, [axis], functools.partial(self.store, stores=kernel.stores), simd=True)

    def piece(self, scope: Scope) -> None:
        """The loop over the chunk of the last axis that begins at its variable."""
        last, chunk = self.rows[-1], self.schedule.chunk
        count = self.tile_count(scope, last, chunk, "count")
        start, inner, step = scope.child(), scope.child(), self.names.numbered("step")
        start.define_axis(last, self.variables[last])
        inner.define_axis(last, f"({self.variables[last]} + {step})")
        behind = []
        for node, load in widened_along(last, [store.value for store in self.kernel.stores]):
            name = self._array(start, "widened")
            start.lines.append(f"fp::widen({count}, {self._address(start, load)}, {name});")
            inner.bind(node, f"{name}[{step}]")
        for store in self.kernel.stores:
            value = narrowed(store, self.program) if store.index.stride(last) == 1 else None
            if value is None:
                self.store(inner, [store])
                continue
            name = self._array(start, "wide")
            inner.lines.append(f"{name}[{step}] = {inner.value(value)};")
            behind.append(f"fp::narrow({count}, {name}, {self._address(start, store)});")
        scope.lines += [*start.lines, SIMD, *block(self.head(step, count), inner.lines), *behind]

    def _array(self, scope: Scope, hint: str) -> str:
        """A name for an array of floats, one for each element of a piece."""
        name = self.names.numbered(hint)
        scope.lines.append(f"float {name}[{self.schedule.chunk}];")
        return name

    def _address(self, scope: Scope, access: Load | Store) -> str:
        return f"{self.printer.pointers[access.buffer]} + {scope.index(access.index)}"

    def _element(self, scope: Scope) -> None:
        self.store(scope, self.kernel.stores)


_WRITERS: dict[Walk, type[KernelWriter]] = {
    Walk.POINTWISE: PointwiseWriter,
    Walk.INNER: InnerWriter,
    Walk.OUTER: OuterWriter,
}
