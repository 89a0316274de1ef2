"""Windows computed for a whole patch of results: what they load is staged in shared memory, rows of the input as they lie.

A block copies the tile below its patch. Then a thread goes down the rows of the tile, reads what its results need of a
row once, and adds that to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from fusepass.codegen.ir.expr import Apply, Load, Op, ReduceOp, children
from fusepass.codegen.ir.index import Axis, Bound, axis_index
from fusepass.codegen.ir.patches import Below, PatchWindow, as_used, at_first, patch_windows
from fusepass.codegen.render.cuda_frame import Frame
from fusepass.codegen.render.cuda_patch_tiles import PatchTiles, StagedTile, loop
from fusepass.codegen.render.numbers import plain
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block
from fusepass.errors import RenderError

# Points of a window for which the code is there twice: conditions of fewer cost little, the code of more takes long to compile.
_TWICE = range(36, 129)


@dataclass(frozen=True)
class Target:
    """What rows of a tile are reduced to: a state for each of a thread's results, and where these are on the window's other axes."""

    state: str
    at: tuple[tuple[Axis, str], ...] = ()


class Patches:
    """The windows of a kernel whose schedule walks patches, each with tiles of its own."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self._tiles = frame, PatchTiles(frame)
        self._place, self._row = self._tiles.place, self._tiles.row
        self._states: list[tuple[PatchWindow, str]] = []

    def compute(self) -> None:
        """Print the copies and the windows, before all steps."""
        frame = self.frame
        y, x = frame.arranged.image
        windows = patch_windows(frame.kernel, frame.program, (y, x))
        frame.printer.expect([store.value for store in frame.kernel.stores])
        frame.top.lines.append(f"extern __shared__ __align__(16) unsigned char {self._tiles.pool}[];")
        tiles = [[self._staged(window, below) for below in window.below] for window in windows]
        if self._tiles.used > frame.schedule.shared_bytes:
            raise RenderError(f"{frame.kernel.name} stages {self._tiles.used} bytes, not {frame.schedule.shared_bytes}")
        frame.top.lines += ["fp::end_copies();", "fp::await_copies<0>();", "__syncthreads();"]
        for window, each in zip(windows, tiles, strict=True):
            self._compute(window, each)

    def close(self) -> None:
        """Print what comes behind all steps."""

    def bind(self, lanes: Scope) -> None:
        """Make the windows' results known to the lanes of a step."""
        for window, state in self._states:
            lanes.bind(window.window, f"{state}[{self._tiles.result()}].part<0>()")

    # ---- tiles

    def _staged(self, window: PatchWindow, below: Below) -> StagedTile:
        """Declare a tile, and begin to copy it. What is not there is filled with zeros, which nothing uses."""
        frame, plan, load = self.frame, self.frame.schedule, below.load
        tile = self._tiles.declare(window, below, plan.planes)
        thread, shape = frame.names.numbered("t"), tile.shape
        scope, start, condition = self._tiles.spot(window, tile, thread)
        nbytes, pointer = shape.vector * load.dtype.nbytes, frame.pointers[load.buffer]
        real = str(nbytes)
        if condition != "true":
            inside = frame.names.numbered("inside")
            scope.lines.append(f"const bool {inside} = {condition};")
            real = f"{inside} ? {self._real(tile, start)} : 0"
            start = f"({inside} ? {bare(start)} : 0)"
        place = f"{thread} * {shape.vector}" if shape.vector > 1 else thread
        scope.lines.append(f"fp::begin_copy_bytes<{nbytes}>(&{tile.name}[{place}], {pointer} + {start}, {real});")
        total = plan.planes * shape.vectors
        head = f"for (int {thread} = threadIdx.x; {thread} < {total}; {thread} += {plan.threads})"
        frame.top.lines += block(head, scope.lines)
        return tile

    def _real(self, tile: StagedTile, start: str) -> str:
        """How many bytes of a vector are there, some of which are: the last one of a buffer may have fewer."""
        load, vector = tile.below.load, tile.shape.vector
        nbytes, extent = load.dtype.nbytes, self.frame.program.buffer(load.buffer).extent
        if not tile.shape.run or extent % vector == 0:
            return str(vector * nbytes)
        return f"int(fp::least({extent} - {start}, {vector})) * {nbytes}"

    # ---- windows

    def _compute(self, window: PatchWindow, tiles: Sequence[StagedTile]) -> None:
        """The loop over the rows of the tiles that a thread's results need."""
        frame, state, constants = self.frame, self.declare_state(window), self.constants(window)
        self._states.append((window, state))
        if not _adds_zeros(window, tiles):
            frame.top.lines += self.rows(window, tiles, constants, [Target(state)])
            return
        frame.top.lines += self.rows(window, tiles, constants, [Target(state)], everywhere=True)
        frame.top.lines += self._once_more(window, tiles[0], constants, state)

    def _once_more(
        self, window: PatchWindow, tile: StagedTile, constants: Sequence[tuple[Load, str]], state: str
    ) -> list[str]:
        """The lines that reduce without what is not there, where a sum is not a number: maybe a weight was not finite that met a zero there."""
        frame, names = self.frame, self.frame.names
        again, k = (names.numbered(word) for word in ("again", "k"))
        count, here = frame.schedule.unroll * frame.schedule.width, names.numbered(f"{tile.name}_again")
        # blockIdx.y is 0, which the compiler does not know: it would keep all products from before, in local memory.
        lines = [f"auto* const {here} = {tile.name} + blockIdx.y;"]
        lines += loop(k, count, [f"{state}[{k}] = {kind_of_state(window)}();"])
        lines += self.rows(window, [replace(tile, name=here)], constants, [Target(state)])
        asked = loop(k, count, [f"{again} |= fp::isnan({state}[{k}].part<0>());"])
        return [f"bool {again} = false;", *asked, *block(f"if ({again})", lines)]

    def declare_state(self, window: PatchWindow) -> str:
        """The name of what is reduced for a thread's results."""
        frame, node, plan = self.frame, window.window, self.frame.schedule
        state = frame.names.numbered(node.op.value.lower())
        # Of one dimension: nvcc 13.0 sets but the first row of arrays of such structures to what they begin with, and the rest to zero.
        frame.top.lines.append(f"{kind_of_state(window)} {state}[{plan.unroll * plan.width}];")
        return state

    def rows(
        self,
        window: PatchWindow,
        tiles: Sequence[StagedTile],
        constants: Sequence[tuple[Load, str]],
        targets: Sequence[Target],
        *,
        everywhere: bool = False,
    ) -> list[str]:
        """The lines that reduce a tile's rows for `targets`; `constants` are loads with the names of what they gave.

        `everywhere`: what is not there is reduced, too.
        """
        if everywhere:
            window = replace(window, down=(), right=())
        frame, plan, (_, across) = self.frame, self.frame.schedule, window.taps
        taps = [frame.names.numbered(axis.name) for axis in window.taps]
        below = tiles[0].below
        count, _ = below.span(window.taps, (plan.unroll, 1))
        row = frame.top.child(conditional=True)
        for tile in tiles:
            row.lines += self._tiles.read(tile)
        pushes: list[str] = []
        for target in targets:
            inner = row.child(conditional=True)
            frame.define_step(inner)
            at_point = {**dict(zip(window.taps, taps, strict=True)), **dict(target.at)}
            for axis, text in at_point.items():
                inner.define_axis(axis, text)
            inner.define_axis(frame.lane, frame.v)
            for tile in tiles:
                at = axis_index(frame.lane) * tile.below.steps[1] + axis_index(across) * tile.below.dilation[1]
                inner.bind(tile.used, f"{tile.near}[{plain(inner.index(at + tile.shape.shift))}]")
            for load, name in constants:
                place = "".join(f"[{at_point[axis]}]" for axis in window.window.axes)
                inner.bind(as_used(window.value, load), f"{name}{place}")
            into = f"{target.state}[{self._tiles.result()}]"
            if window.separable:  # a row's points are reduced once, for all results
                of_row = frame.names.numbered("of_row")
                lane = f"{of_row}[{frame.v if plan.width > 1 else '0'}]"
                points = loop(taps[1], across.size, loop(frame.v, plan.width, self._push(window, inner, lane)))
                row.lines += [f"{kind_of_state(window)} {of_row}[{plan.width}];", *points]
                pushes += loop(frame.v, plan.width, [f"{into}.push({lane}.part<0>());"])
            else:
                pushes += loop(taps[1], across.size, loop(frame.v, plan.width, self._push(window, inner, into)))
        asked, condition = self._there(window, count)
        if condition == "true" or not window.separable:
            row.lines += self._tiles.of_row(window, below, taps[0], pushes)
            lines = row.lines if condition == "true" else block(f"if ({condition})", row.lines)
        else:  # what is not there may be read, but is not used: there are few pushes, and nothing is jumped over
            lines = [*row.lines, *self._tiles.of_row(window, below, taps[0], block(f"if ({condition})", pushes))]
        return loop(self._row, count, [*asked, *lines])

    def _push(self, window: PatchWindow, inner: Scope, into: str) -> list[str]:
        """Add a point to a state, if it is there."""
        condition = inner.condition(window.right)
        before = len(inner.lines)
        value = inner.value(window.value)
        lines = [*inner.lines[before:], f"{into}.push({bare(value)});"]
        return [*inner.lines[:before], *(lines if condition == "true" else block(f"if ({condition})", lines))]

    def _there(self, window: PatchWindow, count: int) -> tuple[list[str], str]:
        """The lines before, and the condition, that row `j` of the `count` that a thread needs is there."""
        frame, at = self.frame, Axis("row of the patch", count)
        scope = frame.top.child()
        scope.define_axis(window.image[0], self._place.top_row)
        scope.define_axis(at, self._row)
        first = (at_first(bound.index, *window.window.axes) + axis_index(at) for bound in window.down)
        guard = [Bound(index, bound.low, bound.high) for index, bound in zip(first, window.down, strict=True)]
        condition = scope.condition(guard)
        return scope.lines, condition

    def constants(self, window: PatchWindow) -> list[tuple[Load, str]]:
        """Load what is the same for all results of a patch, for each point of a window; with the names of what that gave."""
        return [(load, self._constant(window, load)) for load in window.constants]

    def _constant(self, window: PatchWindow, load: Load) -> str:
        frame, axes = self.frame, window.window.axes
        name = frame.names.numbered(f"{frame.pointers[load.buffer]}_in")
        taps = [frame.names.numbered(axis.name) for axis in axes]
        scope = frame.top.child()
        for axis, text in zip(axes, taps, strict=True):
            scope.define_axis(axis, text)
        index, used = scope.index(load.index), as_used(window.value, load)
        value, element = f"{frame.pointers[load.buffer]}[{index}]", C_TYPES[used.dtype]
        value = value if used is load else f"fp::cast<{element}>({value})"
        lines = [*scope.lines, f"{name}{''.join(f'[{text}]' for text in taps)} = {value};"]
        for axis, text in zip(reversed(axes), reversed(taps), strict=True):
            lines = loop(text, axis.size, lines)
        frame.top.lines.append(f"{element} {name}{''.join(f'[{axis.size}]' for axis in axes)};")
        frame.top.lines += lines
        return name


def _adds_zeros(window: PatchWindow, tiles: Sequence[StagedTile]) -> bool:
    """Whether what is not there, zeros in the tiles, adds zeros to a sum, unless it meets what is not finite: it need not be left out
    then, which is an instruction for each point of some lanes."""
    if not (window.down or window.right) or window.window.op is not ReduceOp.SUM or len(tiles) != 1:
        return False
    used = [tiles[0].used, *(as_used(window.value, load) for load in window.constants)]
    product = isinstance(window.value, Apply) and window.value.op is Op.MUL
    alone = product and {id(each) for each in children(window.value)} == {id(each) for each in used} and len(used) == 2
    points = prod(axis.size for axis in window.window.axes)
    return alone and not tiles[0].shape.run and points in _TWICE


def kind_of_state(window: PatchWindow) -> str:
    """The C type of what a window reduces to."""
    return f"fp::{window.window.op.value}<{C_TYPES[window.window.dtype]}>"
