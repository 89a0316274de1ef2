"""Reductions over the positions of an output tile: each thread reduces its own results, then the threads of an image merge what they found.

They do so in shared memory, by halves, when the tiles have been read and what was laid down there has left; always in the same order. The first
thread of an image stores its state, which is that of the piece.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusepass.codegen.ir.program import Partials, Reduction
from fusepass.codegen.render.cuda.output_tile.staged import StagedWindows
from fusepass.codegen.render.cuda.partials import state_type, store_partials
from fusepass.codegen.render.cuda.walk.frame import Frame
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block
from fusepass.codegen.schedule.output_tile_results import room_of_states


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
        names, used, places = self.frame.names, 0, dict[str, str]()
        yield "__syncthreads();"
        for reduction in self.partials.reductions:
            start = f"{self._tiles.pool} + {used}" if used else self._tiles.pool
            place = places[reduction.name] = names.numbered("states")
            yield from self._reduced(reduction, place, start)
            used += room_of_states(reduction, self.frame.schedule.threads)
        yield from block(f"if (threadIdx.x % {self._threads} == 0)", self._stores(places))

    @property
    def _threads(self) -> int:
        """Of an image."""
        return self.frame.schedule.threads // self.frame.image_plan.planes

    def _reduced(self, reduction: Reduction, places: str, start: str) -> Iterator[str]:
        """The lines that merge the states of an image's threads, in shared memory from `start` on."""
        kind, state = state_type(reduction), self.frame.names.numbered("state")
        yield f"{kind}* const {places} = reinterpret_cast<{kind}*>({start});"
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
        store_partials(self.partials, self.frame.pointers, scope, states)
        return scope.lines
