"""Writes the body of a CUDA kernel with a running reduction: piece by piece of its rows, values, what they add up to, and stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Position, Prefix
from fusepass.codegen.render.cuda.walk.accesses import Ahead, in_turns, load_steps, loads_ahead
from fusepass.codegen.render.cuda.walk.frame import Around, Frame
from fusepass.codegen.render.cuda.walk.kernel import KernelWriter, Phase
from fusepass.codegen.render.cuda.walk.states import accumulated
from fusepass.codegen.render.cuda.walk.tile import Tile
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block, written


class ScanWriter(KernelWriter):
    """The state at each step of a thread, and lane of its vector, lies in an array of registers: first of one element, then of all up to it."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        (self.reduction,) = frame.kernel.reduction_loops[-1]
        name, plan = self.reduction.name, self.schedule
        self.states, self.carry = frame.names.exact(f"{name}_states"), frame.names.exact(f"{name}_carry")
        self.slots, self.iteration = frame.names.exact(f"{name}_slots"), frame.names.exact(f"{name}_turn")
        near = ", int" if self._has_near_places() else ""
        self.state = f"fp::{self.reduction.op.value}<{C_TYPES[self.reduction.dtype]}{near}>"
        step = frame.u if plan.unroll > 1 else "0"
        self.element = f"{self.states}[{step}][{frame.v if plan.width > 1 else '0'}]"
        self.backward = frame.in_rows is not None and frame.in_rows.backward
        self.inner = frame.in_rows is not None

    def write(self) -> list[str]:
        frame, plan, top = self.frame, self.schedule, self.top
        *before, _ = frame.kernel.reduction_loops
        for number, reduction_loop in enumerate(before):
            self._reduction_loop(number, reduction_loop)
        if frame.kernel.row_stores:
            self.write_row_stores(frame.kernel.row_stores)
        if before:
            self._say(f"{self.reduction.name}: {self.reduction.op.value}, running")
        kept = [each for each in self.kept if each.first < len(before)]
        made = [each for each in self.kept if each.first == len(before)]
        for each in made:
            self.places.declare(each)
        values, stores = self.reduction.values, frame.kernel.stores
        roots = [store.value for store in stores]
        frame.printer.expect([*values, *roots])
        if frame.vector_rows:
            self.rows.compute([*values, *roots])
        advance = plan.unroll * (plan.lanes if self.inner else plan.groups)
        tile, piece = self._tile(advance)
        self._declare(several=tile.loop)
        steps = top.child()
        steps.lines.append(f"{self.state} {self.states}[{plan.unroll}][{plan.width}];")
        ahead = in_turns(frame, values, loads_ahead(frame, [*values, *roots], [each.node for each in kept]))
        again = ahead
        if plan.unroll == 1:
            again = in_turns(frame, roots, loads_ahead(frame, roots, [each.node for each in (*kept, *made)]))
        early = [each for each in ahead if not each.late]
        if plan.unroll > 1 and early:
            load_steps(frame, steps, tile, tile.start, early)
        self.all_steps(steps, Phase(values, (), (), tuple(kept), tuple(made)), tile, tile.start, ahead)
        steps.lines += self._run(several=tile.loop)
        self.all_steps(steps, Phase(tuple(roots), (), stores, (*kept, *made), ()), tile, tile.start, again)
        top.lines += block(self._loop(piece, tile, advance), steps.lines) if tile.loop else steps.lines
        return written(top.lines)

    def _tile(self, advance: int) -> tuple[Tile, str]:
        """The vectors or columns of a thread's piece, and the name of the first of the block's piece."""
        tile, plan = self.frame.tile, self.schedule
        start, step = tile.start, tile.step
        if not self.inner and plan.groups > 1:
            start, step = f"{start} * {plan.unroll}" if plan.unroll > 1 else start, 1
        loop = tile.loop or plan.general
        tail = self.frame.may_leave(tile.count, advance) or (loop and plan.unroll == 1)
        piece = self.frame.names.exact("piece") if loop else ""
        if piece:
            start = f"{piece} + {start}" if start != "0" else piece
        return replace(tile, start=start, step=step, loop=loop, tail=tail, once=tile.once and not tail), piece

    def _declare(self, *, several: bool) -> None:
        plan, lines = self.schedule, self.top.lines
        if self.inner:
            lines.append(f"{self.state} {self.carry};")
        else:
            lines.append(f"{self.state} {self.carry}[{plan.width}];")
        if room := self._room():
            lines.append(f"__shared__ fp::Slots<{self.state}, {room}> {self.slots}{'[2]' if several else ''};")
            lines += [f"int {self.iteration} = 0;"] if several else []

    def _room(self) -> int:
        """How many states the warps, or groups, of a block show each other."""
        plan = self.schedule
        if self.inner:
            return plan.unroll * plan.lanes // 32 if plan.lanes > 32 else 0
        together = max(32 // plan.lanes, 1)  # groups of a warp
        return plan.groups // together * plan.lanes * plan.width if plan.groups > 1 else 0

    def _run(self, *, several: bool) -> list[str]:
        plan = self.schedule
        backward = str(self.backward).lower()
        if not self._room():
            kind = f"warp<{plan.lanes}, {backward}>" if self.inner else "alone"
            return [f"fp::run_{kind}({self.states}, {self.carry});"]
        kind = f"block<{plan.lanes}, {backward}>" if self.inner else f"groups<{plan.lanes}, {plan.groups}>"
        slots = f"{self.slots}[{self.iteration}]" if several else self.slots
        turned = [f"{self.iteration} ^= 1;  // the slots at hand are read until the next barrier"] if several else []
        return [f"fp::run_{kind}({self.states}, {slots}, {self.carry});", *turned]

    def _loop(self, piece: str, tile: Tile, advance: int) -> str:
        """All threads take as many iterations."""
        kind, count = self.frame.index_type, free(tile.count)
        if self.backward:
            last = f"({count} - 1) / {advance} * {advance}"
            return f"for ({kind} {piece} = {last}; {piece} >= 0; {piece} -= {advance})"
        return f"for ({kind} {piece} = 0; {piece} < {count}; {piece} += {advance})"

    def _take(self, lanes: Scope, phase: Phase, tile: Tile, around: Around) -> None:
        if phase.states:
            super()._take(lanes, phase, tile, around)
        elif not phase.stores:
            values = ", ".join(bare(accumulated(lanes, self.reduction, value)) for value in phase.roots)
            state = f"{self.state}::of({values})"
            if self.frame.overhangs:
                inside = f"fp::is_inside({self.frame.v}, {self.frame.inside(lanes)})"
                state = f"fp::chosen({inside}, {state}, {self.state}())"
            lanes.lines.append(f"{self.element} = {state};")

    def _bind(self, lanes: Scope, step: Scope, phase: Phase, ahead: Sequence[Ahead]) -> None:
        super()._bind(lanes, step, phase, ahead)
        for node in self.frame.kernel.nodes:
            if isinstance(node, Prefix):
                part = f"{self.element}.part<{node.part}>()"
                lanes.bind(
                    node, f"{C_TYPES[DType.I64]}({part})" if self.reduction.op.gives_position(node.part) else part
                )

    def _has_near_places(self) -> bool:
        """Whether 32 bits are enough for the places that the reduction finds."""
        place = self.reduction.values[-1]
        if not self.reduction.op.finds_place or not isinstance(place, Position) or self.schedule.general:
            return False
        first, last = place.index.bounds
        return first >= 0 and last < 1 << 31
