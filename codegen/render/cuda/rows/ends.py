"""Elements of rows that begin anywhere which lie before and after a row's whole vectors: a thread has one of them, or none."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusepass.codegen.ir.dataflow import Kept
from fusepass.codegen.ir.expr import Expr, Load
from fusepass.codegen.ir.program import Store
from fusepass.codegen.render.cuda.walk.accesses import needed
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.cuda.walk.states import State, pushed_one
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block


class Ends:
    """Writes what each phase does with them; what is kept of one is in a register."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._names: dict[int, str] = {}  # of registers, by the identity of what is kept there
        self._loaded: list[tuple[Load, str]] = []  # of the phase at hand, each with its register

    def load(self, roots: Sequence[Expr], known: Collection[Expr]) -> None:
        """Issue a phase's loads before those of its vectors: else a row would wait for memory twice. What is `known` needs none."""
        frame, top, col = self.frame, self.frame.top, self.frame.arranged.col
        inner = self._inside()
        self._loaded = []
        for load, guard in needed(frame, roots, known):
            if not guard and (frame.lane in load.index.axes or col in load.index.axes):
                name = frame.names.numbered(f"{frame.pointers[load.buffer]}_end")
                top.lines.append(f"{C_TYPES[load.dtype]} {name};")
                inner.lines.append(f"{name} = {frame.pointers[load.buffer]}[{inner.index(load.index)}];")
                self._loaded.append((load, name))
        if self._loaded:
            top.lines += block(f"if ({' && '.join(self._guards())})", inner.lines)

    def phase(
        self,
        roots: Sequence[Expr],
        states: Sequence[State],
        stores: Sequence[Store],
        kept: Sequence[tuple[Kept, str]],
        made: Collection[int],
    ) -> None:
        """Add a phase to the kernel; `kept`: values with the C names of their places, of which this phase has `made` some (by identity)."""
        frame, top, inner = self.frame, self.frame.top, self._inside()
        guards = self._guards() + ([frame.live] if stores and frame.live else [])
        frame.printer.expect(roots)
        for load, name in self._loaded:
            inner.bind(load, name)
        for value, place in kept:
            if id(value) in made:
                name = self._names[id(value)] = frame.names.exact(f"{place}_end")
                top.lines.append(f"{C_TYPES[value.node.dtype]} {name};")
                inner.lines.append(f"{name} = {bare(inner.value(value.node))};")
            inner.bind(value.node, self._names[id(value)])
        inner.lines += [pushed_one(inner, state) for state in states]
        inner.lines += [inner.stored(store, frame.program.buffer(store.buffer).dtype) for store in stores]
        top.lines += block(f"if ({' && '.join(guards)})", inner.lines)

    def _guards(self) -> list[str]:
        """What holds for threads that have an element."""
        return [f"{self.frame.end} < {free(self.frame.kernel.col_count)}"]

    def _inside(self) -> Scope:
        """A scope of such threads, the element's place known."""
        frame, inner = self.frame, self.frame.top.child(conditional=True)
        assert frame.arranged.col is not None
        inner.define_axis(frame.arranged.col, frame.end)
        inner.define_axis(frame.lane, "0")
        return inner
