"""Deep windows computed for a patch of results: tiles of the input come to shared memory one after another, with what multiplies them.

While threads add what a tile has to their results, the next ones are on their way. A block's parts take tiles in turn, each for all
results of the patch, which the first part adds up and stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fusepass.codegen.ir.expr import Load
from fusepass.codegen.ir.index import Index, axis_index
from fusepass.codegen.ir.patches import PatchWindow, as_used
from fusepass.codegen.render.cuda_frame import Frame
from fusepass.codegen.render.cuda_patch_tiles import PatchTiles, StagedTile, loop, times
from fusepass.codegen.render.numbers import plain
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block
from fusepass.codegen.schedule.deep import STAGES, keeps_weights, weights_apart
from fusepass.errors import RenderError

_ASYNCHRONOUS = 4  # bytes of the smallest copy that goes on by itself


class DeepPatches:
    """The deep windows of a kernel whose schedule walks patches; all of them are over the same tiles."""

    def __init__(self, frame: Frame, windows: tuple[PatchWindow, ...]) -> None:
        self.frame, self.plan, self.windows = frame, frame.schedule, windows
        self.tiles = PatchTiles(frame)
        self._window = windows[0]
        self.apart = weights_apart(windows)
        self.points = prod(axis.size for axis in self._window.taps)
        self.element = C_TYPES[self._window.window.dtype]
        self._step = frame.names.exact("step")
        self._sums: list[str] = []

    def bind(self, lanes: Scope) -> None:
        """Make the windows' results known to the lanes of a step."""
        for window, total in zip(self.windows, self._sums, strict=True):
            lanes.bind(window.window, f"{total}[{self.tiles.result()}].part<0>()")

    def compute(self) -> None:
        """Print the copies and the windows, before all steps."""
        frame, plan, tiles = self.frame, self.plan, self.tiles
        frame.printer.expect([store.value for store in frame.kernel.stores])
        frame.top.lines.append(f"extern __shared__ __align__(16) unsigned char {tiles.pool}[];")
        (below,) = self._window.below
        tile = tiles.declare(self._window, below, STAGES * plan.parts * plan.planes)
        weights = frame.names.exact("weights")
        start = f"{tiles.pool} + {tiles.used}"
        frame.top.lines.append(f"{self.element}* const {weights} = reinterpret_cast<{self.element}*>({start});")
        tiles.used += STAGES * self.room * self._window.window.dtype.nbytes
        if max(tiles.used, self._exchanged) > plan.shared_bytes:
            raise RenderError(f"{frame.kernel.name} stages {tiles.used} bytes, not {plan.shared_bytes}")
        streams = _Input(self, tile), _Weights(self, weights)
        for stream in streams:
            stream.prepare()
        for window in self.windows:
            total = frame.names.numbered(window.window.op.value.lower())
            self._sums.append(total)
            # Of one dimension each: nvcc 13.0 sets but the first row of arrays of such structures to what they begin with.
            state = f"fp::{window.window.op.value}<{self.element}>"
            frame.top.lines.append(f"{state} {total}[{plan.unroll * plan.width}];")
        for stage in map(str, range(STAGES - 1)):
            if int(stage) < self.steps:
                frame.top.lines += block("", [line for each in streams for line in each.begin(stage)])
                frame.top.lines += [line for each in streams for line in each.end(stage)]
            frame.top.lines.append("fp::end_copies();")
        ahead = f"{self._step} + {STAGES - 1}"
        more = f"if ({ahead} < {self.steps})"
        lines = [f"fp::await_copies<{STAGES - 2}>();", "__syncthreads();"]
        lines += block(more, [line for each in streams for line in each.begin(ahead)])
        lines += ["fp::end_copies();", *self._added(tile, weights)]
        lines += block(more, [line for each in streams for line in each.end(ahead)])
        turns = f"for (int {self._step} = 0; {self._step} < {self.steps}; ++{self._step})"
        frame.top.lines += ["#pragma unroll 1", *block(turns, lines)]
        if plan.parts > 1:
            frame.top.lines += self._together()

    # ---- sizes

    @property
    def steps(self) -> int:
        """Turns of the loop over tiles, of which each part of the block has one at a time."""
        return prod(axis.size for axis in self._window.deep) // self.plan.parts

    @property
    def room(self) -> int:
        """Room for what the tiles of a turn are multiplied by, in numbers; whole vectors of 16 bytes."""
        return -(-self.plan.parts * self.points * self.apart // 4) * 4

    @property
    def _threads(self) -> int:
        """Of each part."""
        return self.plan.threads // self.plan.parts

    @property
    def _part(self) -> str:
        return f"threadIdx.x / {self._threads}"

    @property
    def _exchanged(self) -> int:
        """Bytes of what the other parts of a block hand to the first."""
        plan, nbytes = self.plan, self._window.window.dtype.nbytes
        return (plan.parts - 1) * self._threads * plan.unroll * plan.width * len(self.windows) * nbytes

    # ---- turns

    def deep_axes(self, scope: Scope, step: str) -> None:
        """Define the axes that count tiles in `scope`, for the first part in turn `step`."""
        frame, deep = self.frame, self._window.deep
        number = frame.names.numbered("number")
        scope.lines.append(f"const int {number} = {step};")
        for place, axis in enumerate(deep):
            rest = prod(other.size for other in deep[place + 1 :])
            here = f"{number} / {rest}" if rest > 1 else number
            if place:
                here += f" % {axis.size}"
            elif self.plan.parts > 1:
                here += f" * {self.plan.parts}"
            name = frame.names.numbered(axis.name)
            scope.lines.append(f"const {frame.index_type} {name} = {here};")
            scope.define_axis(axis, name)

    def offset(self, scope: Scope, load: Load) -> str:
        """How far `load` reads from where it reads in the first turn."""
        strides = [(axis, load.index.stride(axis) or 0) for axis in self._window.deep]
        name = self.frame.names.numbered("offset")
        index = sum((axis_index(axis) * stride for axis, stride in strides), Index())
        scope.lines.append(f"const {self.frame.index_type} {name} = {scope.index(index)};")
        return name

    # ---- windows

    def _added(self, tile: StagedTile, weights: str) -> list[str]:
        """What a tile adds to a thread's results."""
        frame, plan, tiles, window, shape = self.frame, self.plan, self.tiles, self._window, tile.shape
        below, (_, across) = tile.below, window.taps
        size = plan.planes * shape.rows * shape.cols
        here, factors = (frame.names.numbered(word) for word in (f"{tile.name}_here", f"{weights}_here"))
        stage = f"{self._step} % {STAGES}"
        part = (f" + {self._part} * {size}", f" + {self._part} * {self.points * self.apart}")
        first = [f"{stage} * {room}" for room in (plan.parts * size, self.room)]
        if plan.parts > 1:
            first = [text + each for text, each in zip(first, part, strict=True)]
        lines = [
            f"{C_TYPES[below.load.dtype]}* const {here} = {tile.name} + {first[0]};",
            f"{self.element}* const {factors} = {weights} + {first[1]};",
        ]
        taps = [frame.names.numbered(axis.name) for axis in window.taps]
        point = f"({taps[0]} * {across.size} + {taps[1]}) * {self.apart}"
        held = frame.names.numbered("factors")
        kept = keeps_weights(self.windows, plan)
        if kept:
            lines += self._fetched(held, factors, self.points * self.apart)
        count, _ = below.span(window.taps, (plan.unroll, 1))
        row = frame.top.child(conditional=True)
        row.lines += tiles.read(StagedTile(below, shape, here, tile.near, tile.used))
        inner = row.child(conditional=True)
        for axis, text in zip(window.taps, taps, strict=True):
            inner.define_axis(axis, text)
        inner.define_axis(frame.lane, frame.v)
        at = axis_index(frame.lane) * below.steps[1] + axis_index(across) * below.dilation[1]
        inner.bind(tile.used, f"{tile.near}[{plain(inner.index(at + shape.shift))}]")
        mine = [] if kept else self._fetched(held, f"{factors} + {point}", self.apart)
        pushes: list[str] = []
        number = 0
        for each, total in zip(self.windows, self._sums, strict=True):
            scope = inner.child(conditional=True)
            for constant in each.constants:
                scope.bind(as_used(each.value, constant), f"{held}[{f'{point} + ' if kept else ''}{number}]")
                number += 1
            value = scope.value(each.value)
            push = [*scope.lines, f"{total}[{tiles.result()}].push({bare(value)});"]
            condition = inner.condition(each.taken)
            pushes += push if condition == "true" else block(f"if ({condition})", push)
        body = loop(taps[1], across.size, [*mine, *inner.lines, *loop(frame.v, plan.width, pushes)])
        row.lines += tiles.of_row(window, below, taps[0], body)
        return [*lines, *loop(tiles.row, count, row.lines)]

    def _fetched(self, name: str, start: str, count: int) -> list[str]:
        """`count` weights, in registers."""
        width = next(width for width in (4, 2, 1) if self.apart % width == 0)
        k = self.frame.names.numbered("k")
        vector = (
            f"fp::as_vector<{width}>({name}[{times(k, width)}]) = fp::as_vector<{width}>(({start})[{times(k, width)}]);"
        )
        return [f"__align__({4 * width}) {self.element} {name}[{count}];", *loop(k, count // width, [vector])]

    def _together(self) -> list[str]:
        """The first part adds what the others have."""
        frame, plan = self.frame, self.plan
        results = plan.unroll * plan.width
        pool, part, k = (frame.names.numbered(word) for word in ("sums", "part", "k"))
        each = results * len(self.windows) * self._threads
        start = f"reinterpret_cast<{self.element}*>({self.tiles.pool})"
        lines = ["__syncthreads();", f"{self.element}* const {pool} = {start};"]

        def place(which: str, number: int) -> str:
            mine = f"threadIdx.x % {self._threads}"
            return f"{pool}[{which} * {each} + ({number * results} + {k}) * {self._threads} + {mine}]"

        given, first = f"({self._part} - 1)", f"if ({self._part} == 0)"
        hand = [f"{place(given, number)} = {total}[{k}].total;" for number, total in enumerate(self._sums)]
        take = [f"{total}[{k}].total += {place(part, number)};" for number, total in enumerate(self._sums)]
        lines += [*block(f"if ({self._part} > 0)", loop(k, results, hand)), "__syncthreads();"]
        return [*lines, *block(first, loop(part, plan.parts - 1, loop(k, results, take)))]


class _Stream:
    """What a block copies to shared memory for each turn; where it comes from is found once, before all turns: -1 for what is zero.

    What is too small to be copied asynchronously waits in registers while threads compute.
    """

    def __init__(self, owner: DeepPatches, total: int, names: tuple[str, ...]) -> None:
        self.owner, self.frame, self.total = owner, owner.frame, total
        self.threads = owner.plan.threads
        self.turns = -(-total // self.threads)
        self.k = owner.frame.names.numbered("k")
        self.origin, self.waiting = (owner.frame.names.numbered(name) for name in names)

    @property
    def mine(self) -> str:
        """The number of what a thread copies in turn `k`."""
        return f"threadIdx.x + {self.k} * {self.threads}" if self.turns > 1 else "threadIdx.x"

    def where_there(self, lines: list[str]) -> list[str]:
        """`lines` for each that a thread copies."""
        lines = block(f"if ({self.mine} < {self.total})", lines) if self.total % self.threads else lines
        return loop(self.k, self.turns, lines)


class _Input(_Stream):
    """The tiles of the input."""

    def __init__(self, owner: DeepPatches, tile: StagedTile) -> None:
        plan, shape = owner.plan, tile.shape
        self.tile, self._each = tile, plan.planes * shape.rows * (shape.cols // shape.vector)
        super().__init__(owner, plan.parts * self._each, ("origin", "waiting"))
        self._bytes = shape.vector * tile.below.load.dtype.nbytes

    def prepare(self) -> None:
        """Declare where vectors come from."""
        frame, tile, window = self.frame, self.tile, self.owner.windows[0]
        thread, vector, inside = (frame.names.numbered(word) for word in ("t", "vector", "inside"))
        scope, start, condition = self.owner.tiles.spot(window, tile, vector)
        there = [] if condition == "true" else [f"({condition})"]
        there += [f"{thread} < {self.total}"] if self.total % self.threads else []
        place = f"{thread} % {self._each}" if self.owner.plan.parts > 1 else thread
        if self.owner.plan.parts > 1:
            part = f"{frame.index_type}({thread} / {self._each})"
            start = f"{part} * {tile.below.load.index.stride(window.deep[0])} + {start}"
        lines = [f"const int {thread} = {self.mine};", f"const int {vector} = {place};", *scope.lines]
        lines.append(f"const bool {inside} = {' && '.join(there) or 'true'};")
        start = f"{bare(start)} + {self._before}" if self._before else bare(start)
        lines.append(f"{self.origin}[{self.k}] = {inside} ? {start} : -1;")
        frame.top.lines.append(f"{frame.index_type} {self.origin}[{self.turns}];")
        frame.top.lines += loop(self.k, self.turns, lines)
        if self._waits:
            frame.top.lines.append(f"{C_TYPES[tile.below.load.dtype]} {self.waiting}[{self.turns}];")

    @property
    def _before(self) -> int:
        """Elements before the input's first one where a tile that is not there may begin, which others of its turns are counted from."""
        return max(-self.tile.below.load.index.bounds[0], 0) if self.owner.windows[0].around else 0

    @property
    def _waits(self) -> bool:
        return self._bytes < _ASYNCHRONOUS

    def begin(self, step: str) -> list[str]:
        """Begin the copies for turn `step`."""
        frame, load = self.frame, self.tile.below.load
        scope = frame.top.child()
        self.owner.deep_axes(scope, step)
        moved, exists = self.owner.offset(scope, load), f"{self.origin}[{self.k}] >= 0"
        around = scope.condition(self.owner.windows[0].around)
        if around != "true":
            there = frame.names.numbered("there")
            scope.lines.append(f"const bool {there} = {around};")
            exists = f"{there} && {exists}"
        inside = frame.names.numbered("inside")
        moved = f"{moved} - {self._before}" if self._before else moved
        source = f"{frame.pointers[load.buffer]} + ({inside} ? {self.origin}[{self.k}] + {moved} : 0)"
        copy = f"fp::begin_copy_bytes<{self._bytes}>(&{self._place(step)}, {source}, {inside} ? {self._bytes} : 0);"
        if self._waits:
            copy = f"{self.waiting}[{self.k}] = {inside} ? *({source}) : {C_TYPES[load.dtype]}(0.0f);"
        return [*scope.lines, *self.where_there([f"const bool {inside} = {exists};", copy])]

    def end(self, step: str) -> list[str]:
        """Lay down what waits for turn `step`."""
        line = f"{self._place(step)} = {self.waiting}[{self.k}];"
        return self.where_there([line]) if self._waits else []

    def _place(self, step: str) -> str:
        vector = self.tile.shape.vector
        stage = f"({step}) % {STAGES} * {self.total * vector}"
        return f"{self.tile.name}[{stage} + ({self.mine}) * {vector}]"


class _Weights(_Stream):
    """What the windows multiply by: that of all windows for a point side by side, 0 where a window has no such point."""

    def __init__(self, owner: DeepPatches, name: str) -> None:
        self._name, self._constants = name, [*_constants(owner.windows)]
        super().__init__(owner, owner.plan.parts * owner.points * owner.apart, ("weight", "waiting_weight"))

    def prepare(self) -> None:
        """Declare where weights come from."""
        frame, owner, window = self.frame, self.owner, self.owner.windows[0]
        thread, which = frame.names.numbered("t"), frame.names.numbered("which")
        scope = Scope(frame.printer)
        scope.lines += [f"const int {thread} = {self.mine};", f"const int {which} = {thread} % {owner.apart};"]
        for axis, apart in zip(window.taps, (window.taps[1].size * owner.apart, owner.apart), strict=True):
            name = frame.names.numbered(axis.name)
            scope.lines.append(f"const int {name} = {thread} / {apart} % {axis.size};")
            scope.define_axis(axis, name)
        scope.lines.append(f"{self.origin}[{self.k}] = -1;")
        for number, (each, load) in enumerate(self._constants):
            index = load.index.substitute({axis: Index() for axis in window.deep})
            condition = scope.condition(each.taken)
            start = scope.index(index)
            if owner.plan.parts > 1:
                per_part = owner.points * owner.apart
                start = f"{thread} / {per_part} * {load.index.stride(window.deep[0])} + {start}"
            there = [f"{which} == {number}"] + ([] if condition == "true" else [f"({condition})"])
            there += [f"{thread} < {self.total}"] if self.total % self.threads else []
            scope.lines += block(f"if ({' && '.join(there)})", [f"{self.origin}[{self.k}] = {start};"])
        types = (frame.index_type, self.origin), (C_TYPES[self._load.dtype], self.waiting)
        frame.top.lines += [f"{kind} {name}[{self.turns}];" for kind, name in types]
        frame.top.lines += loop(self.k, self.turns, scope.lines)

    @property
    def _load(self) -> Load:
        return self._constants[0][1]

    def begin(self, step: str) -> list[str]:
        """Load what turn `step` needs."""
        scope = self.frame.top.child()
        self.owner.deep_axes(scope, step)
        moved = self.owner.offset(scope, self._load)
        value = f"{self.frame.pointers[self._load.buffer]}[{self.origin}[{self.k}] + {moved}]"
        zero = f"{C_TYPES[self._load.dtype]}(0.0f)"
        return [
            *scope.lines,
            *loop(self.k, self.turns, [f"{self.waiting}[{self.k}] = {self.origin}[{self.k}] >= 0 ? {value} : {zero};"]),
        ]

    def end(self, step: str) -> list[str]:
        """Lay down what turn `step` needs."""
        owner, value = self.owner, f"{self.waiting}[{self.k}]"
        if owner.windows[0].window.dtype is not self._load.dtype:
            value = f"fp::cast<{owner.element}>({value})"
        stage = f"({step}) % {STAGES} * {owner.room}"
        return self.where_there([f"{self._name}[{stage} + {self.mine}] = {value};"])


def _constants(windows: tuple[PatchWindow, ...]) -> Iterator[tuple[PatchWindow, Load]]:
    return ((window, load) for window in windows for load in window.constants)
