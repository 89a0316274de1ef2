"""Windows computed for a whole patch of results: what they load is staged in shared memory, rows of the input as they lie.

A block copies the tile below its patch. Then a thread goes down the rows of the tile, reads what its results need of a
row once, and adds that to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusepass.codegen.ir.expr import Apply, Expr, Load, Op, children, walk
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index
from fusepass.codegen.ir.patches import Below, PatchWindow, TileShape, at_first, patch_windows, tile_shape
from fusepass.codegen.render.cuda_frame import Frame
from fusepass.codegen.render.numbers import plain
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block
from fusepass.errors import RenderError


@dataclass(frozen=True)
class _Tile:
    """A tile in shared memory, and the C names of it and of what a thread has read of one of its rows."""

    below: Below
    shape: TileShape
    name: str
    near: str
    used: Expr  # the load, or what all that use it cast it to


class Patches:
    """The windows of a kernel whose schedule walks patches."""

    def __init__(self, frame: Frame) -> None:
        assert frame.patch is not None
        self.frame, self._place, self._used = frame, frame.patch, 0
        self._pool, self._row = frame.names.exact("pool"), frame.names.exact("j")
        self._states: list[tuple[PatchWindow, str]] = []

    def compute(self) -> None:
        """Print the copies and the windows, before all steps."""
        frame = self.frame
        y, x = frame.arranged.image
        windows = patch_windows(frame.kernel, frame.program, (y, x))
        frame.printer.expect([store.value for store in frame.kernel.stores])
        frame.top.lines.append(f"extern __shared__ __align__(16) unsigned char {self._pool}[];")
        tiles = [[self._staged(window, below) for below in window.below] for window in windows]
        if self._used > frame.schedule.shared_bytes:
            raise RenderError(f"{frame.kernel.name} stages {self._used} bytes, not {frame.schedule.shared_bytes}")
        frame.top.lines += ["fp::end_copies();", "fp::await_copies<0>();", "__syncthreads();"]
        for window, each in zip(windows, tiles, strict=True):
            self._compute(window, each)

    def bind(self, lanes: Scope) -> None:
        """Make the windows' results known to the lanes of a step."""
        for window, state in self._states:
            lanes.bind(window.window, f"{state}[{self._result()}].part<0>()")

    # ---- tiles

    def _staged(self, window: PatchWindow, below: Below) -> _Tile:
        """Declare a tile, and begin to copy it. What is not there is filled with zeros, which nothing uses."""
        frame, plan, load = self.frame, self.frame.schedule, below.load
        results = plan.band, plan.lanes * plan.width
        shape = tile_shape(frame.program, window, below, results, frame.lane, aligned=plan.aligned)
        pointer, element = frame.pointers[load.buffer], C_TYPES[load.dtype]
        name, near = (frame.names.numbered(f"{pointer}_{what}") for what in ("tile", "in"))
        tile = _Tile(below, shape, name, near, _as_used(window, load))
        start = f"{self._pool} + {self._used}" if self._used else self._pool
        frame.top.lines.append(f"{element}* const {tile.name} = reinterpret_cast<{element}*>({start});")
        self._used += plan.planes * shape.nbytes
        thread, vectors = frame.names.numbered("t"), shape.cols // shape.vector
        lines = self._copy(window, tile, thread, vectors)
        head = f"for (int {thread} = threadIdx.x; {thread} < {plan.planes * shape.rows * vectors}; {thread} += {plan.threads})"
        frame.top.lines += block(head, lines)
        return tile

    def _copy(self, window: PatchWindow, tile: _Tile, thread: str, vectors: int) -> list[str]:
        """Begin to copy vector number `thread` of all those of a block's tiles."""
        frame, shape, load = self.frame, tile.shape, tile.below.load
        scope = Scope(frame.printer)  # of its own: quotients of the image at hand are not those of another
        down, right = Axis("row of a tile", shape.rows), Axis("vector of a tile", vectors)
        scope.lines += self._image(scope, f"{thread} / {shape.rows * vectors}")
        y, x = window.image
        still = (frame.lane, *window.window.axes)
        for axis, first in ((y, self._place.first_row), (x, self._place.first_column)):
            if first == "0":
                still = (axis, *still)
            else:
                scope.define_axis(axis, first)
        for axis, text in ((down, f"{thread} / {vectors} % {shape.rows}"), (right, f"{thread} % {vectors}")):
            name = frame.names.numbered("down" if axis is down else "right")
            scope.lines.append(f"const int {name} = {text};")
            scope.define_axis(axis, name)
        col = axis_index(right) * shape.vector - shape.shift

        def moved(index: Index, by: Index) -> Index:
            return at_first(index, *still) + by

        guard = [Bound(moved(bound.index, axis_index(down)), bound.low, bound.high) for bound in window.down]
        guard += [Bound(moved(bound.index, col), bound.low, bound.high) for bound in window.right]
        guard.append(Bound(axis_index(right) * shape.vector, 0, shape.needed))
        start = scope.operand(moved(load.index, axis_index(down) * tile.below.pitch + col))
        nbytes, pointer = shape.vector * load.dtype.nbytes, frame.pointers[load.buffer]
        real, condition = str(nbytes), scope.condition(guard)
        if condition != "true":
            inside = frame.names.numbered("inside")
            scope.lines.append(f"const bool {inside} = {condition};")
            start, real = f"({inside} ? {bare(start)} : 0)", f"{inside} ? {nbytes} : 0"
        place = f"{thread} * {shape.vector}" if shape.vector > 1 else thread
        scope.lines.append(f"fp::begin_copy_bytes<{nbytes}>(&{tile.name}[{place}], {pointer} + {start}, {real});")
        return scope.lines

    def _image(self, scope: Scope, plane: str) -> list[str]:
        """Define the image that is copied; `plane` says which of the block's."""
        frame = self.frame
        if frame.arranged.row is None:
            return []
        image = frame.names.numbered("image")
        scope.define_axis(frame.arranged.row, image)
        which = f"{self._place.first_image} + {plane}" if frame.schedule.planes > 1 else self._place.first_image
        return [f"const {frame.index_type} {image} = {which};"]

    # ---- windows

    def _compute(self, window: PatchWindow, tiles: Sequence[_Tile]) -> None:
        """The loop over the rows of the tiles that a thread's results need."""
        frame, node, plan = self.frame, window.window, self.frame.schedule
        state = frame.names.numbered(node.op.value.lower())
        self._states.append((window, state))
        # Of one dimension: nvcc 13.0 sets but the first row of arrays of such structures to what they begin with, and the rest to zero.
        frame.top.lines.append(f"fp::{node.op.value}<{C_TYPES[node.dtype]}> {state}[{plan.unroll * plan.width}];")
        taps = [frame.names.numbered(axis.name) for axis in node.axes]
        constants = [(load, self._constant(window, load, taps)) for load in window.constants]
        below, (height, across) = tiles[0].below, node.axes
        count, _ = below.span(node.axes, (plan.unroll, 1))
        row = frame.top.child(conditional=True)
        for tile in tiles:
            row.lines += self._read(tile)
        inner = row.child(conditional=True)
        frame.define_step(inner)
        for axis, text in zip(node.axes, taps, strict=True):
            inner.define_axis(axis, text)
        inner.define_axis(frame.lane, frame.v)
        for tile in tiles:
            at = axis_index(frame.lane) * tile.below.steps[1] + axis_index(across) * tile.below.dilation[1]
            inner.bind(tile.used, f"{tile.near}[{plain(inner.index(at + tile.shape.shift))}]")
        for load, name in constants:
            inner.bind(_as_used(window, load), f"{name}[{taps[0]}][{taps[1]}]")
        push = self._push(window, inner, state)
        lines = _loop(taps[1], across.size, _loop(frame.v, plan.width, push))
        beyond, apart = f"{self._row} - {_times(frame.u, below.steps[0])}", below.dilation[0] or 1
        first = [f"const int {taps[0]} = {beyond if apart == 1 else f'({beyond}) / {apart}'};"]
        needed = f"{beyond} >= 0 && {taps[0]} < {height.size}" + (f" && ({beyond}) % {apart} == 0" if apart > 1 else "")
        row.lines += _loop(frame.u, plan.unroll, [*first, *block(f"if ({needed})", lines)])
        frame.top.lines += _loop(self._row, count, self._where_there(window, row.lines, count))

    def _result(self) -> str:
        """Which of a thread's results that of a step and a lane is."""
        plan = self.frame.schedule
        step = f"{_times(self.frame.u, plan.width)} + " if plan.unroll > 1 else ""
        return step + (self.frame.v if plan.width > 1 else "0")

    def _push(self, window: PatchWindow, inner: Scope, state: str) -> list[str]:
        """Add a point to a result, if it is there."""
        into = f"{state}[{self._result()}]"
        condition = inner.condition(window.right)
        before = len(inner.lines)
        value = inner.value(window.value)
        lines = [*inner.lines[before:], f"{into}.push({bare(value)});"]
        return [*inner.lines[:before], *(lines if condition == "true" else block(f"if ({condition})", lines))]

    def _where_there(self, window: PatchWindow, lines: list[str], count: int) -> list[str]:
        """`lines` for the rows that are there."""
        frame, at = self.frame, Axis("row of the patch", count)
        scope = frame.top.child()
        scope.define_axis(window.image[0], self._place.top_row)
        scope.define_axis(at, self._row)
        first = (at_first(bound.index, *window.window.axes) + axis_index(at) for bound in window.down)
        guard = [Bound(index, bound.low, bound.high) for index, bound in zip(first, window.down, strict=True)]
        condition = scope.condition(guard)
        return [*scope.lines, *(lines if condition == "true" else block(f"if ({condition})", lines))]

    def _read(self, tile: _Tile) -> list[str]:
        """Read from row `j` of a tile what a thread's results need of it."""
        frame, shape, plan = self.frame, tile.shape, self.frame.schedule
        element, k = C_TYPES[tile.used.dtype], frame.names.numbered("k")
        down = (
            [_times(self._place.row_in_patch, tile.below.steps[0]), self._row]
            if self._place.row_in_patch
            else [self._row]
        )
        if plan.planes > 1:
            down.insert(0, f"{self._place.plane} * {shape.rows}")
        place, here = _times(self._place.column_in_patch, tile.below.steps[1]), _times(k, shape.near)
        start = f"({' + '.join(down)}) * {shape.cols} + {place} + {here}"
        cast = "" if tile.used is tile.below.load else f"fp::cast<{element}>"
        part = frame.names.numbered("part")
        to = f"{tile.near}[{here} + {frame.v}]" if shape.near > 1 else f"{tile.near}[{k}]"
        lines = [f"const auto {part} = fp::as_vector<{shape.near}>({tile.name}[{start}]);"]
        lines += _loop(
            frame.v, shape.near, [f"{to} = {cast}({part}[{frame.v}]);" if cast else f"{to} = {part}[{frame.v}];"]
        )
        return [f"{element} {tile.near}[{shape.reach}];", *_loop(k, shape.reach // shape.near, lines)]

    def _constant(self, window: PatchWindow, load: Load, taps: Sequence[str]) -> str:
        """Load what is the same for all results of a patch, for each point of a window."""
        frame, sizes = self.frame, [axis.size for axis in window.window.axes]
        name = frame.names.numbered(f"{frame.pointers[load.buffer]}_in")
        scope = frame.top.child()
        for axis, text in zip(window.window.axes, taps, strict=True):
            scope.define_axis(axis, text)
        index, used = scope.index(load.index), _as_used(window, load)
        value, element = f"{frame.pointers[load.buffer]}[{index}]", C_TYPES[used.dtype]
        value = value if used is load else f"fp::cast<{element}>({value})"
        lines = [*scope.lines, f"{name}[{taps[0]}][{taps[1]}] = {value};"]
        frame.top.lines.append(f"{element} {name}[{sizes[0]}][{sizes[1]}];")
        frame.top.lines += _loop(taps[0], sizes[0], _loop(taps[1], sizes[1], lines))
        return name


def _as_used(window: PatchWindow, load: Load) -> Expr:
    """The load, or its cast where nothing else uses it: a cast for each point of a window would cost more than the point."""
    users = [node for node in walk(window.value) if any(child is load for child in children(node))]
    cast = len(users) == 1 and isinstance(users[0], Apply) and users[0].op is Op.CAST
    return users[0] if cast else load


def _times(text: str, factor: int) -> str:
    return text if factor == 1 else f"{factor} * {text}"


def _loop(variable: str, count: int, lines: Sequence[str]) -> list[str]:
    """A loop that the compiler unrolls, even where it has one turn."""
    return ["#pragma unroll", *block(f"for (int {variable} = 0; {variable} < {count}; ++{variable})", lines)]
