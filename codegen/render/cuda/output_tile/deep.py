"""Deep windows computed for an output tile of results: tiles of the input come to shared memory one after another, with what multiplies them.

While threads add what a tile has to their results, the next ones are on their way. A block's parts take tiles in turn, each for all
results of the output tile, which the first part adds up and stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

from fusepass.codegen.ir.expr import Load
from fusepass.codegen.ir.index import Index, axis_index
from fusepass.codegen.ir.output_tiles import TileWindow, as_used
from fusepass.codegen.render.cuda.output_tile.copies import Copies, TileCopies, TileSequence
from fusepass.codegen.render.cuda.output_tile.results import ImageWindows
from fusepass.codegen.render.cuda.output_tile.staged import StagedTile, StagedWindows, times
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.numbers import plain
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, ROLLED, Constant, block, loop, where
from fusepass.codegen.schedule.deep import (
    STAGES,
    exchanged_bytes,
    keeps_weights,
    weights_apart,
    weights_of_iteration,
    weights_of_tile,
)
from fusepass.codegen.schedule.plan_output_tile import DeepTile


@dataclass(frozen=True, kw_only=True)
class Iterations(TileSequence):
    """The iterations in which a block takes tiles, for all `windows`: each of its parts has one at a time."""

    windows: tuple[TileWindow, ...]

    @property
    def plan(self) -> DeepTile:
        assert isinstance(self.frame.schedule, DeepTile)
        return self.frame.schedule

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


class DeepTiles(ImageWindows):
    """The deep windows of a kernel whose schedule walks output tiles; all of them are over the same tiles."""

    def __init__(self, frame: Frame, windows: tuple[TileWindow, ...]) -> None:
        assert isinstance(frame.schedule, DeepTile)
        super().__init__(frame)
        self.plan, self.windows = frame.schedule, windows
        self.tiles = StagedWindows(frame)
        self.iterations = Iterations(
            frame, self.tiles, windows[0], places=STAGES, parts=self.plan.parts, windows=windows
        )
        self._step = frame.names.exact("step")
        self._sums: list[str] = []

    def bind(self, lanes: Scope) -> None:
        for window, total in zip(self.windows, self._sums, strict=True):
            lanes.bind(window.window, f"{total}[{self.tiles.result()}].part<0>()")

    def compute(self) -> None:
        """Print the copies and the windows, before all steps."""
        frame, plan, tiles, iterations = self.frame, self.plan, self.tiles, self.iterations
        window, element = iterations.window, iterations.element
        frame.printer.expect([store.value for store in frame.kernel.stores])
        frame.top.lines.append(tiles.pool.declaration)
        (below,) = window.below
        tile = tiles.declare(window, below, STAGES * plan.parts * plan.planes)
        weights = frame.names.exact("weights")
        tiles.reserve(weights, element, STAGES * iterations.room * window.window.dtype.nbytes)
        tiles.pool.check(frame.kernel.name, plan.shared_bytes, exchanged_bytes(self.windows, plan))
        streams = TileCopies(iterations, tile), WeightCopies(iterations, weights)
        for stream in streams:
            stream.prepare()
        for each in self.windows:
            total = frame.names.numbered(each.window.op.value.lower())
            self._sums.append(total)
            # Of one dimension each: nvcc 13.0 sets but the first row of arrays of such structures to what they begin with.
            state = f"fp::{each.window.op.value}<{element}>"
            frame.top.lines.append(f"{state} {total}[{plan.unroll * plan.width}];")
        for stage in map(str, range(STAGES - 1)):
            if int(stage) < iterations.steps:
                frame.top.lines += block("", [line for each in streams for line in each.begin(stage)])
                frame.top.lines += [line for each in streams for line in each.end(stage)]
            frame.top.lines.append("fp::end_copies();")
        ahead = f"{self._step} + {STAGES - 1}"
        more = f"if ({ahead} < {iterations.steps})"
        lines = [f"fp::await_copies<{STAGES - 2}>();", "__syncthreads();"]
        lines += block(more, [line for each in streams for line in each.begin(ahead)])
        lines += ["fp::end_copies();", *self._added(tile, weights)]
        lines += block(more, [line for each in streams for line in each.end(ahead)])
        frame.top.lines += loop(self._step, iterations.steps, lines, ROLLED)
        if plan.parts > 1:
            frame.top.lines += self._together()

    @property
    def _threads(self) -> int:
        """Of each part."""
        return self.plan.threads // self.plan.parts

    @property
    def _part(self) -> str:
        return f"threadIdx.x / {self._threads}"

    def _added(self, tile: StagedTile, weights: str) -> list[str]:
        """What a tile adds to a thread's results."""
        frame, plan, tiles, iterations, shape = self.frame, self.plan, self.tiles, self.iterations, tile.shape
        window, below, (_, across) = iterations.window, tile.below, iterations.window.taps
        size = plan.planes * shape.rows * shape.cols
        here, factors = (frame.names.numbered(word) for word in (f"{tile.name}_here", f"{weights}_here"))
        stage = f"{self._step} % {STAGES}"
        part = (f" + {self._part} * {size}", f" + {self._part} * {iterations.weights}")
        first = [f"{stage} * {room}" for room in (plan.parts * size, iterations.room)]
        if plan.parts > 1:
            first = [text + each for text, each in zip(first, part, strict=True)]
        lines = [
            f"{C_TYPES[below.load.dtype]}* const {here} = {tile.name} + {first[0]};",
            f"{iterations.element}* const {factors} = {weights} + {first[1]};",
        ]
        taps = [frame.names.numbered(axis.name) for axis in window.taps]
        point = f"({taps[0]} * {across.size} + {taps[1]}) * {iterations.apart}"
        held = frame.names.numbered("factors")
        kept = keeps_weights(self.windows, plan)
        if kept:
            lines += self._fetched(held, factors, iterations.weights)
        count, _ = below.span(window.taps, (plan.unroll, 1))
        row = frame.top.child(conditional=True)
        row.lines += tiles.read(StagedTile(below, shape, here, tile.near, tile.used))
        inner = row.child({**dict(zip(window.taps, taps, strict=True)), frame.lane: frame.v}, conditional=True)
        at = axis_index(frame.lane) * below.steps[1] + axis_index(across) * below.dilation[1]
        inner.bind(tile.used, f"{tile.near}[{plain(inner.index(at + shape.shift))}]")
        mine = [] if kept else self._fetched(held, f"{factors} + {point}", iterations.apart)
        pushes: list[str] = []
        number = 0
        for each, total in zip(self.windows, self._sums, strict=True):
            scope = inner.child(conditional=True)
            for constant in each.constants:
                scope.bind(as_used(each.value, constant), f"{held}[{f'{point} + ' if kept else ''}{number}]")
                number += 1
            value = scope.pushed(each.value)
            push = [*scope.lines, f"{total}[{tiles.result()}].{value};"]
            pushes += where(push, inner.condition(each.taken))
        body = loop(taps[1], across.size, [*mine, *inner.lines, *loop(frame.v, plan.width, pushes)])
        row.lines += tiles.of_row(window, below, taps[0], body)
        return [*lines, *loop(tiles.row, count, row.lines)]

    def _fetched(self, name: str, start: str, count: int) -> list[str]:
        """`count` weights, in registers."""
        width = next(width for width in (4, 2, 1) if self.iterations.apart % width == 0)
        k = self.frame.names.numbered("k")
        vector = (
            f"fp::as_vector<{width}>({name}[{times(k, width)}]) = fp::as_vector<{width}>(({start})[{times(k, width)}]);"
        )
        return [
            f"__align__({4 * width}) {self.iterations.element} {name}[{count}];",
            *loop(k, count // width, [vector]),
        ]

    def _together(self) -> list[str]:
        """The first part adds what the others have."""
        frame, plan = self.frame, self.plan
        results = plan.unroll * plan.width
        pool, part, k = (frame.names.numbered(word) for word in ("sums", "part", "k"))
        each = results * len(self.windows) * self._threads
        start = f"reinterpret_cast<{self.iterations.element}*>({self.tiles.pool.name})"
        lines = ["__syncthreads();", f"{self.iterations.element}* const {pool} = {start};"]

        def place(which: str, number: int) -> str:
            mine = f"threadIdx.x % {self._threads}"
            return f"{pool}[{which} * {each} + ({number * results} + {k}) * {self._threads} + {mine}]"

        given, first = f"({self._part} - 1)", f"if ({self._part} == 0)"
        hand = [f"{place(given, number)} = {total}[{k}].total;" for number, total in enumerate(self._sums)]
        take = [f"{total}[{k}].total += {place(part, number)};" for number, total in enumerate(self._sums)]
        lines += [*block(f"if ({self._part} > 0)", loop(k, results, hand)), "__syncthreads();"]
        return [*lines, *block(first, loop(part, plan.parts - 1, loop(k, results, take)))]
