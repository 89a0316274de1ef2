"""What kernels of rows bring closer before they need it: the next row of a block, or of its team."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.expr import Expr, Load
from fusepass.codegen.render.cuda.walk.accesses import loads_ahead
from fusepass.codegen.render.cuda.walk.frame import Frame, Number
from fusepass.codegen.render.cuda.walk.tile import Tile
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import Constant, block

_PREFETCHED = 4  # times as many vectors of a team's next row as a thread loads at once
_FEW_TEAMS = 4  # where there are more, the others keep the memory busy
_PREFETCHED_LESS = 1  # where the cache also has weights that every row meets


class Fetches:
    """Copies of what is kept of a row into shared memory, where a schedule fetches them ahead.

    A thread copies, reads and overwrites the same places, so that it waits for its own copies only.
    """

    def __init__(self, frame: Frame, kept: Sequence[tuple[Load, str]]) -> None:
        """`kept`: the loads, each with the C name of its places."""
        self.frame, self._kept = frame, kept
        self._next = frame.names.exact("next") if frame.arranged.row is not None else ""

    def first_row(self) -> list[str]:
        """Before the loop over rows: begin to copy the first one."""
        frame, tile = self.frame, self.frame.tile
        start = frame.names.numbered("start") if tile.loop else tile.start
        number = frame.number(tile, start)
        lines = self.vector(frame.first_row, number)
        lines = frame.of_each_step(tile, number, lines)
        if tile.loop:
            advance = frame.schedule.unroll * tile.step
            span = f"{start} = {tile.start}; {start} < {tile.count}; {start} += {advance}"
            lines = block(f"for ({frame.index_type} {span})", lines)
        team = frame.kernel.team
        if team is not None and team.teams > frame.kernel.row_count:
            lines = block(f"if ({frame.first_row} < {frame.kernel.row_count})", lines)
        return [*lines, "fp::end_copies();"]

    def row(self) -> list[str]:
        """At the beginning of a row."""
        return (
            [f"const {self.frame.index_type} {self._next} = {self.frame.row} + {self.frame.row_step};"]
            if self._next
            else []
        )

    def following(self, number: str | Number) -> list[str]:
        """After vector `number` of the row at hand was read for the last time: begin to copy that of the next."""
        if not self._next:
            return []
        return block(f"if ({self._next} < {self.frame.kernel.row_count})", self.vector(self._next, number))

    def vector(self, row: str | Constant, number: str | Number, to: str = "") -> list[str]:
        """Begin to copy vector `number` of `row` to the place of that number, or `to` another."""
        scope = self._at(row, number, self.frame.tile)
        for load, place in self._kept:
            reuse = "<fp::Reuse::none>" if load.buffer in self.frame.schedule.memory.once else ""
            source = ", ".join(self._source(scope, load))
            scope.lines.append(f"fp::fetch{reuse}(&{place}[{to or number}], {source});")
        return scope.lines

    def prefetch(self, row: str | Constant, number: str | Number, tile: Tile) -> list[str]:
        """Bring vector `number` of `row` to the L2 cache, as far as it is there."""
        scope = self._at(row, number, tile)
        for load, _ in self._kept:
            scope.lines.append(f"fp::prefetch({', '.join(self._source(scope, load))});")
        return scope.lines

    def _at(self, row: str | Constant, number: str | Number, tile: Tile) -> Scope:
        """A scope at this vector; of its own: quotients of the row at hand are not those of another."""
        scope = Scope(self.frame.printer)
        if self.frame.arranged.row is not None:
            scope.define_axis(self.frame.arranged.row, row)
        self.frame.define_position(scope, tile, number)
        return scope

    def _source(self, scope: Scope, load: Load) -> list[str]:
        """Where a vector is loaded from, and how many elements there are from there on, where rows begin anywhere."""
        frame = self.frame
        start = scope.operand(frame.first_lane(load.index))
        source = [f"{frame.pointers[load.buffer]} + {start}"]
        if frame.start is not None:
            source.append(f"{free(frame.program.buffer(load.buffer).extent)} - {start}")
        return source


def prefetch_row(frame: Frame, roots: Sequence[Expr]) -> list[str]:
    """Bring the beginning of a block's part of its team's next row closer: what `roots` load there, in a few steps.

    The first warp has other things to do: the team waits for it.
    """
    tile, rows, cols = frame.tile, frozenset(frame.kernel.rows), frozenset(frame.kernel.cols)
    found = [each.load for each in loads_ahead(frame, roots, ()) if not each.guard and each.load.index.axes & rows]
    team = frame.kernel.team
    assert team is not None
    if team.teams > _FEW_TEAMS:
        return []
    # Where most of a row is read again, the cache is better left to that.
    of_block = frame.of_block
    if of_block is None or 2 * of_block.on_chip(frame.schedule.lanes) < of_block.part:
        return []
    if not found or frame.arranged.row is None:
        return []
    following = frame.names.exact("next")
    # Of its own: quotients of the row at hand are not those of the next.
    scope = Scope(frame.printer, at={frame.arranged.row: following})
    met_again = any(load.index.axes & cols and not load.index.axes & rows for load in frame.kernel.loads())
    times = _PREFETCHED_LESS if met_again else _PREFETCHED
    steps = min(times * frame.schedule.unroll, -(-tile.count // tile.step))
    number = f"{tile.start} + {frame.u} * {tile.step}" if steps > 1 else tile.start
    inner = scope.child()
    frame.define_position(inner, tile, f"fp::least({number}, {tile.last})")
    for load in found:
        start = inner.operand(frame.first_lane(load.index))
        inner.lines.append(f"fp::prefetch({frame.pointers[load.buffer]} + {start});")
    lines = [*scope.lines, *frame.unrolled(frame.u, steps, inner.lines)]
    head = f"const {frame.index_type} {following} = {frame.row} + {frame.row_step};"
    return [head, *block(f"if (threadIdx.x >= 32 && {following} < {frame.kernel.row_count})", lines)]
