"""Prints one kernel as C++ whose innermost loops vectorise; `schedule_cpu` says what the walks mean."""

from __future__ import annotations

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.unroll import unroll_windows
from fusepass.codegen.render.cpu_inner import InnerWriter
from fusepass.codegen.render.cpu_loops import SIMD, KernelWriter
from fusepass.codegen.render.cpu_outer import OuterWriter
from fusepass.codegen.render.cpu_product import ProductWriter
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import Identifiers, block
from fusepass.codegen.schedule.plan import Walk
from fusepass.codegen.schedule_cpu import CpuSchedule

_UNROLLED_WINDOW = 32  # points


def kernel_body(
    kernel: Kernel, program: Program, schedule: CpuSchedule, pointers: dict[str, str], names: Identifiers
) -> list[str]:
    """The statements that run `kernel`; `pointers` are the buffers' names, and `names` has what is taken."""
    if isinstance(kernel.anchor, Product):
        return ProductWriter(kernel, program, schedule, names, pointers).lines()
    kernel = unroll_windows(kernel, Builder(), _UNROLLED_WINDOW)
    return _WRITERS[schedule.walk](kernel, program, schedule, names, pointers).lines()


class PointwiseWriter(KernelWriter):
    """Every element for itself, along the last row axis."""

    def write(self, scope: Scope) -> None:
        self.printer.expect(store.value for store in self.kernel.stores)
        outer, last = self.rows[:-1], self.rows[-1:]
        if self.schedule.chunk:
            self.shared(scope, outer, self._piece, (self.rows[-1], self.schedule.chunk))
        elif outer or not last:
            self.shared(scope, outer, lambda inner: self.nest(inner, last, self._element, simd=True))
        else:
            self.nest(scope, last, self._element, simd=True)
            if self.schedule.parallel or self.schedule.general:
                at = scope.lines.index(SIMD)
                scope.lines[at] = f"#pragma omp parallel for simd{self.if_worthwhile} schedule(static)"

    def _piece(self, scope: Scope) -> None:
        last = self.rows[-1]
        count = self.tile_count(scope, last, self.schedule.chunk, "count")
        inner, step = scope.child(), self.names.numbered("step")
        inner.define_axis(last, f"({self.variables[last]} + {step})")
        self._element(inner)
        scope.lines += [SIMD, *block(self.head(step, count), inner.lines)]

    def _element(self, scope: Scope) -> None:
        self.store(scope, self.kernel.stores)


_WRITERS: dict[Walk, type[KernelWriter]] = {
    Walk.POINTWISE: PointwiseWriter,
    Walk.INNER: InnerWriter,
    Walk.OUTER: OuterWriter,
}
