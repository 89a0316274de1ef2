"""Windows computed for a whole output tile of results: what they load is staged in shared memory, rows of the input as they lie.

A block copies the tile below its output tile. Then a thread goes through the rows of the tile, reads what its results need of a
row once, and adds that to all of them; where a row's points come to the same for all results, `cuda.output_tile.sliding` has fewer additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from fusepass.codegen.ir.expr import Apply, Load, Op, ReduceOp, children
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.ir.output_tiles import TileWindow, as_used, output_tile_windows
from fusepass.codegen.render.cuda.output_tile.results import ImageWindows, OutputTilePartials, OutputTileResults
from fusepass.codegen.render.cuda.output_tile.sliding import Form, RowTurn, Sliding, form_of
from fusepass.codegen.render.cuda.output_tile.staged import StagedTile, StagedWindows, begin_copy
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.numbers import plain
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block, loop, where
from fusepass.codegen.schedule.plan_output_tile import WindowTile

# Points of a window for which the code is there twice: conditions of fewer cost little, the code of more takes long to compile.
_TWICE = range(36, 129)
_MANY = 36  # points of a window of floats from which instructions are what a kernel waits for


@dataclass(frozen=True)
class Target:
    """What rows of a tile are reduced to: a state for each of a thread's results, and where these are on the window's other axes."""

    state: str
    at: tuple[tuple[Axis, str], ...] = ()


class OutputTiles(ImageWindows):
    """The windows of a kernel whose schedule walks output tiles, each with tiles of its own."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self._tiles = StagedWindows(frame)
        self.sliding = Sliding(frame, self._tiles)
        self._row = self._tiles.row
        self._states: list[tuple[TileWindow, Form, str]] = []
        if isinstance(frame.schedule, WindowTile) and frame.schedule.exchanges:
            self.results = OutputTileResults(frame, self._tiles.pool)
        if frame.kernel.partials is not None:
            self.found = OutputTilePartials(frame, self._tiles, frame.kernel.partials)

    def compute(self) -> None:
        """Print the copies and the windows, before all steps."""
        frame = self.frame
        y, x = frame.arranged.image
        windows = output_tile_windows(frame.kernel, frame.program, (y, x))
        frame.printer.expect(frame.kernel.roots)
        frame.top.lines.append(self._tiles.pool.declaration)
        staged = [self._staged(window) for window in windows]
        along = frame.window_plan.along
        iterations = [RowTurn(frame, self.sliding, self._tiles, form, tiles) for form, tiles in staged] if along else []
        self._tiles.pool.check(frame.kernel.name, frame.schedule.shared_bytes)
        frame.top.lines += ["fp::end_copies();", "fp::await_copies<0>();", "__syncthreads();"]
        for iteration in iterations:
            frame.top.lines += iteration.lay_down()
        frame.top.lines += ["__syncthreads();"] if iterations else []
        for number, (form, tiles) in enumerate(staged):
            self._compute(form, tiles, iterations[number] if iterations else None)
        for each in (self.results, self.found):
            if each is not None:
                each.begin()

    def bind(self, lanes: Scope) -> None:
        for window, form, states in self._states:
            lanes.bind(window.window, self.sliding.result(window, form, states))

    # ---- tiles

    def _staged(self, window: TileWindow) -> tuple[Form, list[StagedTile]]:
        """Declare the tiles of a window, and begin to copy them; with what the window is reduced to."""
        tiles = [self._tiles.declare(window, below, self.frame.image_plan.planes) for below in window.below]
        form = form_of(window, tiles, self.frame.image_plan)
        for tile in tiles:
            self._copy(window, tile, form.other)
        return form, tiles

    def _copy(self, window: TileWindow, tile: StagedTile, other: str) -> None:
        """Begin to copy a tile. What is not there becomes `other`, or a zero, which nothing uses."""
        frame, load, shape = self.frame, tile.below.load, tile.shape
        head, place, (scope, start, condition) = self._by_rows(window, tile) or self._by_vectors(window, tile)
        pointer, real, inside = frame.pointers[load.buffer], self._real(tile, start), "true"
        if condition != "true":
            inside = frame.names.numbered("inside")
            scope.lines.append(f"const bool {inside} = {condition};")
            real = f"{inside} ? {real} : 0"
            start = f"({inside} ? {bare(start)} : 0)"
        place = f"({place}) * {shape.vector}" if shape.vector > 1 else place
        to, source = f"&{tile.name}[{place}]", f"{pointer} + {start}"
        scope.lines.append(begin_copy(tile, to, source, inside, real, other))
        frame.top.lines += block(head, scope.lines)

    def _by_vectors(self, window: TileWindow, tile: StagedTile) -> tuple[str, str, tuple[Scope, str, str]]:
        """The head of a loop in which a block's threads copy one vector after another, which that is, and where it comes from."""
        plan, thread = self.frame.image_plan, self.frame.names.numbered("t")
        total = plan.planes // tile.shape.images * tile.shape.vectors
        head = f"for (int {thread} = threadIdx.x; {thread} < {total}; {thread} += {plan.threads})"
        return head, thread, self._tiles.spot(window, tile, thread)

    def _by_rows(self, window: TileWindow, tile: StagedTile) -> tuple[str, str, tuple[Scope, str, str]] | None:
        """The same where each thread copies the same place of several rows, for which it counts less. None where that leaves many threads out, and
        where memory is what the kernel waits for: it is 2 % slower then."""
        plan, shape, line = self.frame.image_plan, tile.shape, self.frame.names.numbered("line")
        few = tile.below.load.dtype.nbytes == 4 and prod(axis.size for axis in window.window.axes) < _MANY
        if shape.run or plan.planes > 1 or (few and self.frame.kernel.stores):
            return None
        vectors = shape.cols // shape.vector
        together = plan.threads // vectors
        if 4 * together * vectors < 3 * plan.threads:
            return None
        there = f"{line} < {shape.rows}"
        there += f" && threadIdx.x < {together * vectors}" if together * vectors < plan.threads else ""
        head = f"for (int {line} = threadIdx.x / {vectors}; {there}; {line} += {together})"
        right = f"threadIdx.x % {vectors}"
        return head, f"{line} * {vectors} + {right}", self._tiles.spot_in_row(window, tile, "0", line, right)

    def _real(self, tile: StagedTile, start: str) -> str:
        """How many bytes of a vector are there, some of which are: the last one of a buffer may have fewer."""
        load, vector = tile.below.load, tile.shape.vector
        nbytes, extent = load.dtype.nbytes, self.frame.program.buffer(load.buffer).extent
        if not tile.shape.run or extent % vector == 0:
            return str(vector * nbytes)
        return f"int(fp::least({extent} - {start}, {vector})) * {nbytes}"

    # ---- windows

    def _compute(self, form: Form, tiles: Sequence[StagedTile], iteration: RowTurn | None) -> None:
        """Reduce the rows of the tiles that a thread's results need."""
        frame, window, states = self.frame, form.way.window, self.declare_states(form)
        constants = self.constants(window)
        self._tiles.ask(window)
        self._states.append((window, form, states))
        if iteration is not None:
            frame.top.lines += iteration.take(states)
        elif window.separable:
            frame.top.lines += self.sliding.reduce(window, form, tiles, states)
        elif _adds_zeros(window, tiles):
            frame.top.lines += self.rows(window, tiles, constants, [Target(states)], everywhere=True)
            frame.top.lines += self._once_more(window, tiles[0], constants, form, states)
        else:
            frame.top.lines += self.rows(window, tiles, constants, [Target(states)])

    def _once_more(
        self, window: TileWindow, tile: StagedTile, constants: Sequence[tuple[Load, str]], form: Form, states: str
    ) -> list[str]:
        """The lines that reduce without what is not there, where a sum is not a number: maybe a weight was not finite that met a zero there."""
        names = self.frame.names
        again, k = (names.numbered(word) for word in ("again", "k"))
        count, here = form.way.states, names.numbered(f"{tile.name}_again")
        # blockIdx.y is 0, which the compiler does not know: it would keep all products from before, in local memory.
        lines = [f"auto* const {here} = {tile.name} + blockIdx.y;"]
        lines += loop(k, count, [f"{states}[{k}] = {form.state}();"])
        lines += self.rows(window, [replace(tile, name=here)], constants, [Target(states)])
        asked = loop(k, count, [f"{again} |= fp::isnan({states}[{k}].part<0>());"])
        return [f"bool {again} = false;", *asked, *block(f"if ({again})", lines)]

    def declare_states(self, form: Form) -> str:
        """The name of what a window is reduced to for a thread's results."""
        states = self.frame.names.numbered(form.way.window.window.op.value.lower())
        self.frame.apart |= form.way.shares_sums
        # Of one dimension: nvcc 13.0 sets but the first row of arrays of such structures to what they begin with, and the rest to zero.
        self.frame.top.lines.append(f"{form.state} {states}[{form.way.states}];")
        return states

    def rows(
        self,
        window: TileWindow,
        tiles: Sequence[StagedTile],
        constants: Sequence[tuple[Load, str]],
        targets: Sequence[Target],
        *,
        everywhere: bool = False,
    ) -> list[str]:
        """The lines that add a tile's rows, point by point, to `targets`; `constants` are loads with the names of what they gave.

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
            pushes += loop(taps[1], across.size, loop(frame.v, plan.width, self._push(window, inner, into)))
        asked, condition = self._tiles.row_is_there(window, count)
        lines = [*row.lines, *self._tiles.of_row(window, below, taps[0], pushes)]
        return loop(self._row, count, [*asked, *where(lines, condition)])

    def _push(self, window: TileWindow, inner: Scope, into: str) -> list[str]:
        """Add a point to a state, if it is there."""
        (_, step), (_, dilation), (_, across) = window.below[0].steps, window.below[0].dilation, window.taps
        number = axis_index(self.frame.lane) * step + axis_index(across) * dilation
        asked = self._tiles.element_is_there(window, plain(inner.index(number))) if window.right else "true"
        condition = inner.condition(window.right) if asked is None else asked
        before = len(inner.lines)
        value = inner.pushed(window.value)
        lines = [*inner.lines[before:], f"{into}.{value};"]
        return [*inner.lines[:before], *where(lines, condition)]

    def constants(self, window: TileWindow) -> list[tuple[Load, str]]:
        """Load what is the same for all results of an output tile, for each point of a window that is not separable; with the names of what that gave."""
        if window.separable:
            for load in window.constants:
                self.frame.top.value(load)
            return []
        return [(load, self._constant(window, load)) for load in window.constants]

    def _constant(self, window: TileWindow, load: Load) -> str:
        frame, axes = self.frame, window.window.axes
        name = frame.names.numbered(f"{frame.pointers[load.buffer]}_in")
        taps = [frame.names.numbered(axis.name) for axis in axes]
        scope = frame.top.child(dict(zip(axes, taps, strict=True)))
        index, used = scope.index(load.index), as_used(window.value, load)
        value, element = f"{frame.pointers[load.buffer]}[{index}]", C_TYPES[used.dtype]
        value = value if used is load else f"fp::cast<{element}>({value})"
        lines = [*scope.lines, f"{name}{''.join(f'[{text}]' for text in taps)} = {value};"]
        for axis, text in zip(reversed(axes), reversed(taps), strict=True):
            lines = loop(text, axis.size, lines)
        frame.top.lines.append(f"{element} {name}{''.join(f'[{axis.size}]' for axis in axes)};")
        frame.top.lines += lines
        return name


def _adds_zeros(window: TileWindow, tiles: Sequence[StagedTile]) -> bool:
    """Whether what is not there, zeros in the tiles, adds zeros to a sum, unless it meets what is not finite: it need not be left out
    then, which is an instruction for each point of some lanes."""
    if not (window.down or window.right) or window.window.op is not ReduceOp.SUM or len(tiles) != 1:
        return False
    used = [tiles[0].used, *(as_used(window.value, load) for load in window.constants)]
    product = isinstance(window.value, Apply) and window.value.op is Op.TERM
    alone = product and {id(each) for each in children(window.value)} == {id(each) for each in used} and len(used) == 2
    points = prod(axis.size for axis in window.window.axes)
    return alone and not tiles[0].shape.run and points in _TWICE
