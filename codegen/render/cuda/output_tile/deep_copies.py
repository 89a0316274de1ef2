"""The iterations in which a block takes the tiles of deep windows, and what it copies to shared memory to multiply them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

from fusepass.codegen.ir.expr import Load
from fusepass.codegen.ir.index import Index, axis_index
from fusepass.codegen.ir.output_tiles import TileWindow
from fusepass.codegen.render.cuda.output_tile.copies import Copies
from fusepass.codegen.render.cuda.output_tile.staged import StagedWindows, loop
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, Constant, block
from fusepass.codegen.schedule.deep import STAGES, weights_apart, weights_of_iteration, weights_of_tile
from fusepass.codegen.schedule.plan_output_tile import DeepTile


@dataclass(frozen=True)
class Iterations:
    """The iterations in which a block takes tiles: each of its parts has one at a time."""

    frame: Frame
    windows: tuple[TileWindow, ...]
    tiles: StagedWindows

    @property
    def plan(self) -> DeepTile:
        assert isinstance(self.frame.schedule, DeepTile)
        return self.frame.schedule

    @property
    def window(self) -> TileWindow:
        return self.windows[0]

    @property
    def parts(self) -> int:
        return self.plan.parts

    @property
    def places(self) -> int:
        return STAGES

    @property
    def together(self) -> int:
        return 1

    @property
    def apart(self) -> int:
        """Weights from one point to the next."""
        return weights_apart(self.windows)

    @property
    def weights(self) -> int:
        """Of one tile."""
        return weights_of_tile(self.windows)

    @property
    def element(self) -> str:
        """The type that is summed."""
        return C_TYPES[self.window.window.dtype]

    @property
    def steps(self) -> int:
        """How many turns there are."""
        return prod(axis.size for axis in self.window.deep) // self.plan.parts

    @property
    def room(self) -> int:
        """Numbers from what one iteration's tiles are multiplied by to the next one's."""
        return weights_of_iteration(self.windows, self.plan)

    def deep_axes(self, scope: Scope, step: str) -> None:
        """Define the axes that count tiles in `scope`, for the first part in turn `step`."""
        frame, deep = self.frame, self.window.deep
        number = scope.constant("int", frame.names.numbered("number"), step)
        for place, axis in enumerate(deep):
            rest = prod(other.size for other in deep[place + 1 :])
            within = f" / {rest}" if rest > 1 else ""
            if place:
                within += f" % {axis.size}"
            elif self.plan.parts > 1:
                within += f" * {self.plan.parts}"
            name, here = frame.names.numbered(axis.name), partial(_part, number, within)
            scope.define_axis(axis, scope.constant(frame.index_type, name, here))

    def moved(self, scope: Scope, step: str, load: Load) -> tuple[str, str]:
        self.deep_axes(scope, step)
        return self.offset(scope, load), scope.condition(self.window.around)

    def offset(self, scope: Scope, load: Load) -> str:
        """How far `load` reads from where it reads in the first iteration."""
        strides = [(axis, load.index.stride(axis) or 0) for axis in self.window.deep]
        name = self.frame.names.numbered("offset")
        index = sum((axis_index(axis) * stride for axis, stride in strides), Index())
        scope.lines.append(f"const {self.frame.index_type} {name} = {scope.index(index)};")
        return name


def _part(number: Constant, within: str) -> str:
    return f"{number}{within}"


class WeightCopies(Copies):
    """What the windows multiply by: that of all windows for a point side by side, 0 where a window has no such point."""

    def __init__(self, iterations: Iterations, name: str) -> None:
        self._name, self._constants = name, [*_constants(iterations.windows)]
        self.of = iterations
        super().__init__(iterations.frame, iterations.plan.parts * iterations.weights, ("weight", "waiting_weight"))

    def prepare(self) -> None:
        """Declare where weights come from."""
        frame, iterations, window = self.frame, self.of, self.of.window
        thread, which = frame.names.numbered("t"), frame.names.numbered("which")
        scope = Scope(frame.printer)
        scope.lines += [f"const int {thread} = {self.mine};", f"const int {which} = {thread} % {iterations.apart};"]
        for axis, apart in zip(window.taps, (window.taps[1].size * iterations.apart, iterations.apart), strict=True):
            name = frame.names.numbered(axis.name)
            scope.define_axis(axis, scope.constant("int", name, f"{thread} / {apart} % {axis.size}"))
        scope.lines.append(f"{self.origin}[{self.k}] = -1;")
        for number, (each, load) in enumerate(self._constants):
            index = load.index.substitute({axis: Index() for axis in window.deep})
            condition = scope.condition(each.taken)
            start = scope.index(index)
            if iterations.plan.parts > 1:
                start = f"{thread} / {iterations.weights} * {load.index.stride(window.deep[0])} + {start}"
            there = [f"{which} == {number}"] + ([] if condition == "true" else [f"({condition})"])
            there += [f"{thread} < {self.total}"] if self.total % self.threads else []
            scope.lines += block(f"if ({' && '.join(there)})", [f"{self.origin}[{self.k}] = {start};"])
        types = (frame.index_type, self.origin), (C_TYPES[self._load.dtype], self.waiting)
        frame.top.lines += [f"{kind} {name}[{self.count}];" for kind, name in types]
        frame.top.lines += loop(self.k, self.count, scope.lines)

    @property
    def _load(self) -> Load:
        return self._constants[0][1]

    def begin(self, step: str) -> list[str]:
        """Load what turn `step` needs."""
        scope = self.frame.top.child()
        self.of.deep_axes(scope, step)
        moved = self.of.offset(scope, self._load)
        value = f"{self.frame.pointers[self._load.buffer]}[{self.origin}[{self.k}] + {moved}]"
        zero = f"{C_TYPES[self._load.dtype]}(0.0f)"
        return [
            *scope.lines,
            *loop(self.k, self.count, [f"{self.waiting}[{self.k}] = {self.origin}[{self.k}] >= 0 ? {value} : {zero};"]),
        ]

    def end(self, step: str) -> list[str]:
        """Lay down what turn `step` needs."""
        iterations, value = self.of, f"{self.waiting}[{self.k}]"
        if iterations.window.window.dtype is not self._load.dtype:
            value = f"fp::cast<{iterations.element}>({value})"
        stage = f"({step}) % {STAGES} * {iterations.room}"
        return self.where_there([f"{self._name}[{stage} + {self.mine}] = {value};"])


def _constants(windows: tuple[TileWindow, ...]) -> Iterator[tuple[TileWindow, Load]]:
    return ((window, load) for window in windows for load in window.constants)
