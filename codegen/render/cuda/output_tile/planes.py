"""Windows over three axes computed for output tiles of results, plane after plane: a block goes through the planes of its input.

While threads reduce what they need of a plane, tiles of later ones are on their way. In each iteration a result begins and another one is
finished; what a plane has for a result of pooling is found once, for all results that need the plane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusepass.codegen.ir.expr import Load
from fusepass.codegen.ir.index import Axis, Bound, axis_index
from fusepass.codegen.ir.output_tiles import TileWindow, at_first, output_tile_windows
from fusepass.codegen.ir.planes import Planes
from fusepass.codegen.render.cuda.output_tile.copies import TileCopies, TileSequence
from fusepass.codegen.render.cuda.output_tile.sliding import Form, form_of
from fusepass.codegen.render.cuda.output_tile.staged import StagedTile, times
from fusepass.codegen.render.cuda.output_tile.windows import OutputTiles, Target
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import ROLLED, block, loop, where
from fusepass.codegen.schedule.plan_output_tile import PlaneTile
from fusepass.codegen.schedule.planes import STAGES, places


@dataclass(frozen=True)
class _PlaneTiles(TileSequence):
    """The tiles of a window's input, plane after plane; an iteration has `planes.turn` of them."""

    @property
    def planes(self) -> Planes:
        assert self.window.planes is not None
        return self.window.planes

    def number(self, step: str) -> str:
        """The plane of tile `step`, counted from the block's first one; some that no result needs are left out."""
        iteration = self.planes.iteration
        if iteration == self.planes.step:
            return step
        return f"({step}) / {iteration} * {self.planes.step} + ({step}) % {iteration}"

    def there(self, scope: Scope, plane: str) -> str:
        """The condition that the block's plane number `plane` is there, and a result needs it."""
        plan = self.frame.schedule
        assert isinstance(plan, PlaneTile)
        needed = (plan.depth - 1) * self.planes.step + self.planes.span
        last = (self.planes.iterations(plan.depth) - 1) * self.planes.step + self.planes.iteration
        at, still = Axis("plane of the patch", last), self.tiles.first_plane(scope, self.window)
        scope.define_axis(at, plane)
        first = ((at_first(bound.index, *still) + axis_index(at), bound) for bound in self.window.around)
        guard = [Bound(index, bound.low, bound.high) for index, bound in first]
        return scope.condition([*guard, Bound(axis_index(at), 0, needed)])

    def moved(self, scope: Scope, step: str, load: Load) -> tuple[str, str]:
        plane = self.frame.names.numbered("plane")
        scope.lines.append(f"const {self.frame.index_type} {plane} = {self.number(step)};")
        pitch = next(below.plane for below in self.window.below if below.load is load)
        return times(plane, pitch), self.there(scope, plane)


class PlaneTiles(OutputTiles):
    """The windows of a kernel whose schedule goes through planes, each with tiles of its own."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        (y, x), through = frame.arranged.image, frame.arranged.through
        assert through is not None
        assert isinstance(frame.schedule, PlaneTile)
        self.plan = frame.schedule
        self.windows = output_tile_windows(frame.kernel, frame.program, (through, y, x))
        planes = self.windows[0].planes
        assert planes is not None
        self.planes, self.through, self._iteration = planes, through, frame.names.exact("turn")
        self._open: list[tuple[TileWindow, Form, list[str]]] = []  # states of results, the newest one first
        self._loop = self._results = 0  # lines before the loop over iterations, and before what it does with results

    @property
    def _iterations(self) -> int:
        return self.planes.iterations(self.plan.depth)

    def bind(self, lanes: Scope) -> None:
        for window, form, states in self._open:
            lanes.bind(window.window, self.sliding.result(window, form, states[-1]))

    def compute(self) -> None:
        """Print the copies and the windows, before all steps, up to where the results of an iteration are known."""
        frame, plan, top = self.frame, self.plan, self.frame.top
        frame.printer.expect([store.value for store in frame.kernel.stores])
        top.lines.append(self._tiles.pool.declaration)
        together = self.planes.iteration
        each = [_PlaneTiles(frame, self._tiles, window, places(window), together=together) for window in self.windows]
        tiles = [
            [self._tiles.declare(of.window, below, plan.planes * of.places) for below in of.window.below] for of in each
        ]
        self._tiles.pool.check(frame.kernel.name, plan.shared_bytes)
        for window, staged in zip(self.windows, tiles, strict=True):
            form = form_of(window, staged, plan)
            self._open.append((window, form, [self.declare_states(form) for _ in range(self.planes.open)]))
        copies = [
            TileCopies(of, tile, form.other)
            for of, staged, (_, form, _) in zip(each, tiles, self._open, strict=True)
            for tile in staged
        ]
        for stream in copies:
            stream.prepare()
        constants = [self.constants(window) for window in self.windows]
        for window in self.windows:
            self._tiles.ask(window)
        for iteration in range(STAGES - 1):
            if iteration < self._iterations:
                top.lines += [*self._begun(copies, str(iteration)), *self._ended(copies, str(iteration))]
            top.lines.append("fp::end_copies();")
        self._loop = len(top.lines)
        later = f"({self._iteration} + {STAGES - 1})"
        more = f"if ({self._iteration} + {STAGES - 1} < {self._iterations})"
        top.lines += [f"fp::await_copies<{STAGES - 2}>();", "__syncthreads();"]
        top.lines += [*block(more, self._begun(copies, later)), "fp::end_copies();"]
        for plane in range(self.planes.iteration):
            for of, staged, known, (_, form, states) in zip(each, tiles, constants, self._open, strict=True):
                top.lines += self._plane(of, staged, known, form, states, plane)
        ended = self._ended(copies, later)
        top.lines += block(more, ended) if ended else []
        self._results = len(top.lines)
        finished = self.planes.open - 1
        place, first = frame.names.numbered(self.through.name), self._tiles.place.first_plane
        here = self._iteration if first == "0" else f"{first} + {self._iteration}"
        here = f"{here} - {finished}" if finished else here
        top.define_axis(self.through, top.constant(frame.index_type, place, here))

    def close(self) -> None:
        """Results become older by an iteration; what was printed since `compute` began with iterations is their loop."""
        top, finished = self.frame.top, self.planes.open - 1
        results = top.lines[self._results :]
        if finished:
            results = block(f"if ({self._iteration} >= {finished})", results)
        k = self.frame.names.numbered("k")
        for _, form, states in self._open:
            older = [f"{old}[{k}] = {new}[{k}];" for old, new in zip(states[:0:-1], states[-2::-1], strict=True)]
            results += loop(k, form.way.states, [*older, f"{states[0]}[{k}] = {form.state}();"])
        body = [*top.lines[self._loop : self._results], *results]
        top.lines[self._loop :] = loop(self._iteration, self._iterations, body, ROLLED)

    def _begun(self, copies: list[TileCopies], iteration: str) -> list[str]:
        """Begin the copies of all planes of an iteration."""
        planes = [(plane, self._tile_of(iteration, plane)) for plane in range(self.planes.iteration)]
        return [line for plane, tile in planes for each in copies for line in block("", each.begin(tile, plane))]

    def _ended(self, copies: list[TileCopies], iteration: str) -> list[str]:
        planes = [(plane, self._tile_of(iteration, plane)) for plane in range(self.planes.iteration)]
        return [line for plane, tile in planes for each in copies for line in each.end(tile, plane)]

    def _tile_of(self, iteration: str, plane: int) -> str:
        """The number of the tile of plane number `plane` of an iteration."""
        text = times(iteration, self.planes.iteration)
        return f"{text} + {plane}" if plane else text

    def _plane(
        self,
        of: _PlaneTiles,
        tiles: list[StagedTile],
        constants: list[tuple[Load, str]],
        form: Form,
        states: list[str],
        plane: int,
    ) -> list[str]:
        """What plane number `plane` of an iteration has for the results that are begun."""
        frame, plan, window = self.frame, self.plan, of.window
        scope, number = frame.top.child(conditional=True), frame.names.numbered("plane")
        tile_number = self._tile_of(self._iteration, plane)
        at = times(self._iteration, self.planes.step) + (f" + {plane}" if plane else "")
        scope.lines.append(f"const {frame.index_type} {number} = {at};")
        condition, lines = of.there(scope, number), list[str]()
        here: list[StagedTile] = []
        for tile in tiles:
            size = plan.planes * tile.shape.elements(tile.below.load.dtype.nbytes)
            name, lead = frame.names.numbered(f"{tile.name}_here"), tile.lead
            lines.append(f"auto* const {name} = {tile.name} + {times(f'(({tile_number}) % {of.places})', size)};")
            if tile.shape.run:
                lead, more = self._tiles.lead_of_plane(window, tile, number)
                lines += more
            here.append(replace(tile, name=name, lead=lead))
        points = [
            (state, point)
            for result, state in enumerate(states)
            if (point := self.planes.point(result, plane)) is not None
        ]
        if window.separable and points:
            found, k = frame.names.numbered("of_plane"), frame.names.numbered("k")
            lines.append(f"{form.state} {found}[{form.way.states}];")
            lines += self.sliding.reduce(window, form, here, found)
            lines += loop(k, form.way.states, [f"{state}[{k}].merge({found}[{k}]);" for state, _ in points])
        elif points:
            targets = [Target(state, ((self.planes.tap, str(point)),)) for state, point in points]
            lines += self.rows(window, here, constants, targets)
        return block("", [*scope.lines, *where(lines, condition)])
