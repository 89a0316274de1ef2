"""What leaves an output tile: results, through shared memory as they lie in memory, and what the tile is reduced to over positions."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass

from fusepass.codegen.ir.index import Index
from fusepass.codegen.ir.program import Partials, Reduction, Store
from fusepass.codegen.render.cuda.output_tile.staged import StagedWindows, times
from fusepass.codegen.render.cuda.partials import state_type, store_partials
from fusepass.codegen.render.cuda.walk.frame import Around, Frame, Pool
from fusepass.codegen.render.cuda.walk.tile import OutputTilePlace
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block, where
from fusepass.codegen.schedule.output_tile_results import room_of_results, room_of_states
from fusepass.codegen.schedule.shape import ACCESS


@dataclass(frozen=True)
class Results:
    """The results of one store.

    Attributes:
        pointer, element: where they go to, and their C type.
        name: the C name of their place in shared memory, where they stand as in the vectors of memory that cover them.
        begin: that of where the block's begin in memory.
        vector: elements of such a vector.
    """

    pointer: str
    element: str
    name: str
    begin: str
    vector: int


class OutputTileResults:
    """What the stores of a kernel whose schedule walks output tiles lay down, and how it leaves."""

    def __init__(self, frame: Frame, pool: Pool) -> None:
        self.frame, self._pool = frame, pool
        self._of: dict[int, Results] = {}

    @property
    def _count(self) -> int:
        """Of a block."""
        plan = self.frame.image_plan
        _, x = self.frame.arranged.image
        return plan.planes * plan.tile_height * x.size

    def begin(self) -> None:
        """Print where results are to be laid down, when all threads have read the tiles."""
        top, pool = self.frame.top, Pool(self._pool.name)
        top.lines.append("__syncthreads();")
        for store in self.frame.kernel.stores:
            made = self._results(store)
            nbytes = room_of_results(self._count, ACCESS // made.vector)
            top.lines.append(pool.array(made.element, made.name, nbytes))
            self._of[id(store)] = made

    def _results(self, store: Store) -> Results:
        frame = self.frame
        dtype, pointer = frame.program.buffer(store.buffer).dtype, frame.pointers[store.buffer]
        scope, place = Scope(frame.printer), frame.output_tile
        assert place is not None
        y, x = frame.arranged.image
        still = {x: Index(), frame.lane: Index()}
        if place.first_row == "0":
            still[y] = Index()
        else:
            scope.define_axis(y, place.first_row)
        if frame.arranged.row is not None:
            scope.define_axis(frame.arranged.row, place.first_image)
        begin = frame.names.exact(f"{pointer}_begin")
        value = scope.index(store.index.substitute(still))
        frame.top.lines += [*scope.lines, f"const {frame.index_type} {begin} = {value};"]
        name = frame.names.exact(f"{pointer}_results")
        return Results(pointer, C_TYPES[dtype], name, begin, ACCESS // dtype.nbytes)

    def write(self, store: Store, lanes: Scope, around: Around) -> None:
        """Lay down a lane's result, if there is one."""
        value = lanes.converted(store.value, self.frame.program.buffer(store.buffer).dtype)
        frame, made, (_, x) = self.frame, self._of[id(store)], self.frame.arranged.image
        plan, place = frame.schedule, frame.output_tile
        assert place is not None
        here = frame.names.exact(f"{made.name}_here")
        around.before_lanes.append(f"{made.element}* const {here} = {made.name} + {self._first(made, place, x.size)};")
        line = [f"{here}[{frame.v}] = {value};"]
        there = [f"{place.column_in_tile} + {frame.v} < {x.size}"] if plan.lanes * plan.width > x.size else []
        there += [f"{frame.row_of_thread} >= {place.above}"] if frame.apart and place.above != "0" else []
        lanes.lines += where(line, *there)

    def _first(self, made: Results, place: OutputTilePlace, cols: int) -> str:
        """Where a thread's first result of a step is to stand."""
        plan, rows = self.frame.image_plan, [place.row_in_tile] if place.row_in_tile else []
        rows += [self.frame.u] if plan.unroll > 1 else []
        parts = [f"{made.begin} % {made.vector}"]
        parts += [times(place.plane, plan.tile_height * cols)] if place.plane else []
        parts += [times(f"({' + '.join(rows)})" if len(rows) > 1 else rows[0], cols)] if rows else []
        return " + ".join([*parts, place.column_in_tile])

    def leave(self) -> Iterator[str]:
        """The lines that store what is laid down, when all threads have done so."""
        frame, count, (_, x) = self.frame, self._count, self.frame.arranged.image
        assert frame.output_tile is not None
        before, _ = frame.output_tile.before
        yield "__syncthreads();"
        for made in self._of.values():
            t, vector = frame.names.numbered("t"), made.vector
            past = f"{made.begin} % {vector}"
            span = f"int {t} = threadIdx.x * {vector}; {t} < {past} + {count}; {t} += {frame.schedule.threads * vector}"
            target, first, most = f"{made.pointer} + ({made.begin} - {past} + {t})", f"{t} - {past}", str(count)
            if frame.apart and before != "0":
                others = f"({before}) * {x.size}"
                first, most = f"{first} - {others}", f"{count} - {others}"
            stored = f"fp::store_inside({target}, fp::as_vector<{vector}>({made.name}[{t}]), false, {first}, {most});"
            yield from block(f"for ({span})", [stored])


class OutputTilePartials:
    """What a kernel with `Partials` whose schedule walks output tiles does beside its stores."""

    def __init__(self, frame: Frame, tiles: StagedWindows, partials: Partials) -> None:
        self.frame, self.partials, self._tiles = frame, partials, tiles
        self._values = frame.names.exact("reduced")

    def begin(self) -> None:
        """Print where a thread collects what is reduced."""
        plan = self.frame.schedule
        element = C_TYPES[self.partials.value.dtype]
        self.frame.top.lines.append(f"{element} {self._values}[{plan.unroll * plan.width}];")

    def collect(self, lanes: Scope) -> None:
        """Add what collects the value at hand to the scope of its `lanes`."""
        value = bare(lanes.value(self.partials.value))
        lanes.lines.append(f"{self._values}[{self._tiles.result()}] = {value};")

    def leave(self) -> Iterator[str]:
        """The lines that reduce what threads have collected, and store what they found."""
        names, pool, places = self.frame.names, Pool(self._tiles.pool.name), dict[str, str]()
        yield "__syncthreads();"
        for reduction in self.partials.reductions:
            place = places[reduction.name] = names.numbered("states")
            yield pool.array(state_type(reduction), place, room_of_states(reduction, self.frame.schedule.threads))
            yield from self._reduced(reduction, place)
        yield from block(f"if (threadIdx.x % {self._threads} == 0)", self._stores(places))

    @property
    def _threads(self) -> int:
        """Of an image."""
        return self.frame.schedule.threads // self.frame.image_plan.planes

    def _reduced(self, reduction: Reduction, places: str) -> Iterator[str]:
        """The lines that merge the states of an image's threads in these `places`."""
        kind, state = state_type(reduction), self.frame.names.numbered("state")
        yield f"{kind} {state};"
        yield f"fp::push_own({state}, {self._values}, fp::Own<{self.frame.schedule.width}>({self._own()}));"
        yield f"fp::merge_threads<{self._threads}>({places}, {state});"

    def _own(self) -> str:
        """The first row and column of a thread's results that no other one has, and the first column that is not there."""
        plan, place, (_, x) = self.frame.schedule, self.frame.output_tile, self.frame.arranged.image
        assert place is not None
        (rows, columns), end = place.own, str(plan.width)
        if plan.lanes * plan.width > x.size:
            end = f"{x.size} - {place.column_in_tile}"
        return f"{rows}, {columns}, {end}"

    def _stores(self, places: dict[str, str]) -> list[str]:
        """The lines that store the first thread's states."""
        scope, place = self.frame.top.child(), self.frame.output_tile
        assert place is not None
        piece = scope.constant("int", self.frame.names.numbered("piece"), place.number)
        scope.define_axis(self.partials.pieces, piece)
        states = {name: f"{place}[threadIdx.x]" for name, place in places.items()}
        store_partials(self.partials, scope, states)
        return scope.lines


class ImageWindows(abc.ABC):
    """The windows over images of a kernel whose blocks have output tiles.

    Attributes:
        results: where these leave through shared memory.
        found: what output tiles are reduced to, where they are reduced over positions.
    """

    results: OutputTileResults | None = None
    found: OutputTilePartials | None = None

    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    @abc.abstractmethod
    def compute(self) -> None:
        """Print the windows, before all steps."""

    @abc.abstractmethod
    def bind(self, lanes: Scope) -> None:
        """Make the windows' results known to the lanes of a step."""

    def close(self) -> None:
        """Print what comes behind all steps."""
        for each in (self.results, self.found):
            self.frame.top.lines += [] if each is None else each.leave()
