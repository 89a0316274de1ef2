"""Elements of rows that begin anywhere which lie before and after a row's whole vectors: a thread has one of them, or none."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusepass.codegen.ir.dataflow import Kept
from fusepass.codegen.ir.expr import Expr
from fusepass.codegen.ir.program import Store
from fusepass.codegen.render.cuda_frame import Frame
from fusepass.codegen.render.cuda_states import State, pushed_one
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block


class Ends:
    """Writes what each phase does with them; what is kept of one is in a register."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._names: dict[int, str] = {}  # of registers, by the identity of what is kept there

    def phase(
        self,
        roots: Sequence[Expr],
        states: Sequence[State],
        stores: Sequence[Store],
        kept: Sequence[tuple[Kept, str]],
        made: Collection[int],
    ) -> None:
        """Add a phase to the kernel; `kept`: values with the C names of their places, of which this phase has `made` some (by identity)."""
        frame, top, col = self.frame, self.frame.top, self.frame.arranged.col
        assert col is not None
        guards = [f"{frame.end} < {free(frame.kernel.col_count)}"]
        guards += [f"{frame.member} == 0"] if frame.member else []
        guards += [frame.live] if stores and frame.live else []
        inner = top.child(conditional=True)
        inner.define_axis(col, frame.end)
        inner.define_axis(frame.lane, "0")
        frame.printer.expect(roots)
        for value, place in kept:
            if id(value) in made:
                name = self._names[id(value)] = frame.names.exact(f"{place}_end")
                top.lines.append(f"{C_TYPES[value.node.dtype]} {name};")
                inner.lines.append(f"{name} = {bare(inner.value(value.node))};")
            inner.bind(value.node, self._names[id(value)])
        inner.lines += [pushed_one(inner, state) for state in states]
        inner.lines += [self._stored(store, inner) for store in stores]
        top.lines += block(f"if ({' && '.join(guards)})", inner.lines)

    def _stored(self, store: Store, scope: Scope) -> str:
        buffer = self.frame.program.buffer(store.buffer)
        value = bare(scope.value(store.value))
        if store.value.dtype is not buffer.dtype:
            value = f"fp::cast<{C_TYPES[buffer.dtype]}>({value})"
        return f"{self.frame.pointers[store.buffer]}[{scope.index(store.index)}] = {value};"
