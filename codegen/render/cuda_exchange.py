"""The exchange of a tile through shared memory, in kernels whose operands are contiguous along different axes.

What crosses is loaded across before the computation and stored across after it; in between the block's threads read and
write its tile in shared memory, where they stand side by side along the axis that they compute along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusepass.codegen.ir.crossing import Crossing, Tile, crossings, near_step, neighbours, reused
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index
from fusepass.codegen.ir.program import Store
from fusepass.codegen.ir.vectors import split_index
from fusepass.codegen.render.cuda_frame import Frame, without_unused
from fusepass.codegen.render.cuda_states import Around
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, block
from fusepass.codegen.schedule.flat import exchange_tile
from fusepass.codegen.schedule.plan import Walk
from fusepass.codegen.schedule.shape import ACCESS


@dataclass(frozen=True)
class Exchange:
    """A tile in shared memory.

    Attributes:
        crossing: the access that goes through it.
        tile: its size, and how threads stand on it to load or store.
        name: the C variable.
        along, across, lane: axes of the position that a thread loads or stores; `lane` is the element of its vector.
        index, guard: those of `crossing` at that position.
        realigned: whether it does not cross: a store of rows that begin anywhere, which goes in whole accesses.
        reused: whether such a store goes through the tile of this load, of which a thread overwrites what it has read.
    """

    crossing: Crossing
    tile: Tile
    name: str
    along: Axis
    across: Axis
    lane: Axis
    index: Index
    guard: tuple[Bound, ...]
    realigned: bool = False
    reused: bool = False

    def at(self, across: str, along: str, number: str = "") -> str:
        """The element of the tile there; `number` is that of the access across, where `across` is not simply in it."""
        if self.tile.vector > 1:
            access = number or (f"{across} / {self.tile.width}" if self.tile.width > 1 else across)
            along = f"({along} ^ {access} % {self.tile.turns} * {self.tile.vector})"
        return f"{self.name}[{across} * {self.tile.pitch} + {along}]"

    def read(self, frame: Frame, step: Scope, lanes: Scope) -> str:
        """The element of the tile at the position that `lanes` computes; whole vectors are read in `step`."""
        if self.tile.vector == 1 and self.reused:
            read = frame.names.exact(f"{self.name}_at")
            lanes.lines.append(
                f"const {C_TYPES[frame.program.buffer(self.crossing.buffer).dtype]} {read} = {self.place(frame, lanes)};"
            )
            return read
        if self.tile.vector == 1:
            return self.place(frame, lanes)
        row = frame.names.exact(f"{self.name}_row")
        step.lines.append(f"const {self._row_type(frame)} {row} = {self._vector(frame, lanes)};")
        return f"{row}[{frame.v}]"

    def write(self, frame: Frame, lanes: Scope, value: str, around: Around) -> None:
        """Put `value` where `lanes` computes; whole vectors after all lanes."""
        if self.tile.vector == 1:
            lanes.lines.append(f"{self.place(frame, lanes)} = {value};")
            return
        row = frame.names.exact(f"{self.name}_row")
        around.before_lanes.append(f"{self._row_type(frame)} {row};")
        lanes.lines.append(f"{row}[{frame.v}] = {value};")
        around.after_lanes.append(f"{self._vector(frame, lanes)} = {row};")

    def _row_type(self, frame: Frame) -> str:
        return f"fp::Vec<{C_TYPES[frame.program.buffer(self.crossing.buffer).dtype]}, {self.tile.vector}>"

    def _vector(self, frame: Frame, lanes: Scope) -> str:
        return f"fp::as_vector<{self.tile.vector}>({self.place(frame, lanes)})"

    def place(self, frame: Frame, lanes: Scope) -> str:
        """The element of the tile at the position that `lanes` computes, or of its vector the first."""
        plan, (lane, group) = frame.schedule, frame.place
        if plan.walk in (Walk.CROSSING, Walk.OUTER):
            parts = [group] if plan.groups > 1 or plan.unroll == 1 else []
            if plan.unroll > 1:
                parts.append(f"{frame.u} * {plan.groups}" if plan.groups > 1 else frame.u)
            across = f"({' + '.join(parts)})" if len(parts) > 1 else parts[0]
            along = lane if plan.width == 1 else f"{lane} * {plan.width}"
        else:
            assert frame.arranged.col is not None
            across, along = group, lanes.index(axis_index(frame.arranged.col))
        along = along if plan.width == 1 or self.tile.vector > 1 else f"{along} + {frame.v}"
        return self.at(across, along)


def exchanges(frame: Frame) -> tuple[Exchange, ...]:
    """The tiles of a kernel whose schedule exchanges; they are declared."""
    arranged, inner = frame.arranged, frame.schedule.walk is Walk.INNER
    if not frame.schedule.exchanges:
        return ()
    here, there = (arranged.col, arranged.row) if inner else (arranged.row, arranged.col)
    assert here is not None
    assert there is not None
    made = []
    loads = frame.schedule.walk is Walk.CROSSING
    found = crossings(arranged.kernel, frame.program, here, there, loads=loads)
    again = reused(found, frame.schedule.realigned, frame.program)
    for number, crossing in enumerate(found):
        # Axes of its own, because the thread stands elsewhere while it computes; a position along is one number then,
        # of which the lane of the computed vector is no part.
        along, across = Axis(f"along {number}", here.size), Axis(f"across {number}", there.size)
        axes = {here: axis_index(along), there: axis_index(across), arranged.lane: Index()}
        index = crossing.index.substitute(axes)
        guard = tuple(Bound(bound.index.substitute(axes), bound.low, bound.high) for bound in crossing.guard)
        tile = exchange_tile(frame.kernel, frame.program, frame.schedule, crossing, across, index, guard)
        lane = Axis(f"lane {number}", tile.width)
        if tile.width > 1:
            index = split_index(index, across, lane)
        name = frame.names.exact(f"{frame.pointers[crossing.buffer]}_tile")
        taken = number in again.values()
        made.append(Exchange(crossing, tile, name, along, across, lane, index, guard, reused=taken))
    for store in arranged.kernel.stores:
        if _begins_anywhere(frame, store):
            tile_of_load = made[again[store.buffer]].name if store.buffer in again else ""
            made.append(_realigned(frame, store, here, there, tile_of_load))
    for each in {each.name: each for each in made}.values():
        element, count = C_TYPES[frame.program.buffer(each.crossing.buffer).dtype], each.tile.across * each.tile.pitch
        whole = "__align__(16) " if each.tile.vector > 1 else ""
        frame.top.lines.append(f"{whole}__shared__ fp::Slots<{element}, {count}> {each.name};")
    return tuple(made)


def _begins_anywhere(frame: Frame, store: Store) -> bool:
    row = frame.arranged.row
    return store.buffer in frame.schedule.realigned and row is not None and near_step(store.index, row) == 1


def _realigned(frame: Frame, store: Store, here: Axis, there: Axis, name: str) -> Exchange:
    """The tile for `store`: the one called `name`, or its own where there is none."""
    dtype = frame.program.buffer(store.buffer).dtype
    name = name or frame.names.exact(f"{frame.pointers[store.buffer]}_tile")
    along, across = Axis(f"along {name}", here.size), Axis(f"across {name}", there.size)
    index = store.index.substitute({here: axis_index(along), there: axis_index(across), frame.lane: Index()})
    tile = Tile(*frame.schedule.tile, frame.schedule.threads, 1, dtype.nbytes)
    return Exchange(Crossing(None, store), tile, name, along, across, frame.lane, index, (), realigned=True)


@dataclass(frozen=True)
class _Stand:
    """Where a thread stands to load or store what crosses, in the loop over its steps.

    Attributes:
        along, vector: C expressions of the position along and the number of the vector across, from the tile's first.
        first: number of the tile's first vector, and a plus sign; empty for 0.
        steps: of the loop.
    """

    along: str
    vector: str
    first: str
    steps: int

    @classmethod
    def of(cls, frame: Frame, each: Exchange) -> _Stand:
        """With the thread's place among the others defined."""
        tile, lines = each.tile, frame.top.lines
        across, along = tile.steps
        vector, line = frame.names.exact(f"{each.name}_lane"), frame.names.exact(f"{each.name}_line")
        lines.append(f"const int {vector} = threadIdx.x % {tile.lanes};")
        lines.append(f"const int {line} = threadIdx.x / {tile.lanes};")
        if across > 1:
            vector += f" + {tile.lanes} * {frame.u if along == 1 else f'({frame.u} % {across})'}"
        if along > 1:
            line += f" + {tile.lines} * {frame.u if across == 1 else f'({frame.u} / {across})'}"
        first = frame.first_across and f"{frame.first_across}{f' / {tile.width}' if tile.width > 1 else ''} + "
        return cls(line, vector, first, across * along)

    def slot(self, frame: Frame, each: Exchange) -> str:
        """The element of the tile for one lane of the thread's vector."""
        width = each.tile.width
        across = self.vector if width == 1 else f"({self.vector}) * {width} + {frame.v}"
        along = f"({self.along})" if each.tile.vector > 1 and " " in self.along else self.along
        return each.at(f"({across})", along, f"({self.vector})")


def read_in(frame: Frame, exchanges: Sequence[Exchange]) -> list[str]:
    """Load what crosses; the lines that write it to shared memory, when all else is loaded, and wait for the block."""
    written: list[str] = []
    for each in exchanges:
        if each.crossing.load is None:
            continue
        stand, width = _Stand.of(frame, each), each.tile.width
        loaded = frame.names.exact(f"{each.name}_in")
        array, step = (f"[{stand.steps}]", f"[{frame.u}]") if stand.steps > 1 else ("", "")
        vector = f"fp::Vec<{C_TYPES[each.crossing.load.dtype]}, {width}>"
        frame.top.lines.append(f"{vector} {loaded}{array}{' = {}' if each.guard else ''};")
        scope = frame.top.child()
        # A thread past the end loads what the last one loads.
        along = f"{frame.first_along}{stand.along}"
        if frame.leaves_rows(each.along.size, each.tile.along):
            along = f"fp::least({along}, {free(each.along.size - 1)})"
        _define(frame, scope, each.along, along, 1)
        across = _clamped(frame, f"{stand.first}{stand.vector}", each.across, each.tile.across, width)
        _define(frame, scope, each.across, across, width)
        inside = scope.child(conditional=True) if each.guard else scope
        start = inside.operand(each.index.substitute({each.lane: Index()}))
        reuse = ", fp::Reuse::none" if each.crossing.buffer in frame.schedule.once else ""
        pointer = frame.pointers[each.crossing.buffer]
        inside.lines.append(f"{loaded}{step} = fp::load_vector<{width}{reuse}>({pointer} + {start});")
        if each.guard:
            scope.lines += block(f"if ({scope.condition(each.guard)})", inside.lines)
        frame.top.lines += frame.unrolled(frame.u, stand.steps, without_unused(scope.lines))
        lane = frame.v if width > 1 else "0"
        moved = frame.unrolled(frame.v, width, [f"{stand.slot(frame, each)} = {loaded}{step}[{lane}];"])
        written += frame.unrolled(frame.u, stand.steps, moved)
    return [*written, "__syncthreads();"] if written else []


def write_out(frame: Frame, exchanges: Sequence[Exchange]) -> None:
    """Wait for the block; then store what crosses."""
    stores = [each for each in exchanges if each.crossing.store is not None]
    if stores:
        frame.top.lines.append("__syncthreads();")
    for each in stores:
        if each.realigned:
            _write_rows(frame, each)
            continue
        stand, width, buffer = _Stand.of(frame, each), each.tile.width, each.crossing.buffer
        scope = frame.top.child()
        along = _define(frame, scope, each.along, f"{frame.first_along}{stand.along}", 1)
        across = _define(frame, scope, each.across, f"{stand.first}{stand.vector}", width)
        inside = scope.child(conditional=True)
        vector = frame.names.exact(f"{each.name}_out")
        inside.lines.append(f"fp::Vec<{C_TYPES[frame.program.buffer(buffer).dtype]}, {width}> {vector};")
        lane = frame.v if width > 1 else "0"
        inside.lines += frame.unrolled(frame.v, width, [f"{vector}[{lane}] = {stand.slot(frame, each)};"])
        start = inside.operand(each.index.substitute({each.lane: Index()}))
        reuse = "<fp::Reuse::none>" if buffer in frame.schedule.once else ""
        inside.lines.append(f"fp::store_vector{reuse}({frame.pointers[buffer]} + {start}, {vector});")
        guards = []
        if frame.schedule.overlap:
            guards.append(f"{stand.along} < {frame.schedule.own_rows}")
        if frame.leaves_rows(each.along.size, each.tile.lines * each.tile.steps[1]):
            guards.append(f"{along} < {free(each.along.size)}")
        if frame.may_leave(each.across.size, each.tile.across):
            guards.append(f"{across} < {free(each.across.size)}")
        scope.lines += block(f"if ({' && '.join(guards)})", inside.lines) if guards else inside.lines
        frame.top.lines += frame.unrolled(frame.u, stand.steps, without_unused(scope.lines))


def _write_rows(frame: Frame, each: Exchange) -> None:
    """Store a tile row by row: in whole accesses where the tile's part of a row is one piece, else by element."""
    tile, pointer, count, plan = each.tile, frame.pointers[each.crossing.buffer], each.tile.along, frame.schedule
    lanes = count * tile.nbytes // ACCESS
    lines = tile.threads // lanes
    steps = max(tile.across // lines, 1)
    lane, line = frame.names.exact(f"{pointer}_lane"), frame.names.exact(f"{pointer}_line")
    frame.top.lines.append(f"const int {lane} = threadIdx.x % {lanes};")
    frame.top.lines.append(f"const int {line} = threadIdx.x / {lanes};")
    here = f"{line} + {lines} * {frame.u}" if steps > 1 else line
    scope = frame.top.child()
    across = _define(frame, scope, each.across, f"{frame.first_across} + {here}" if frame.first_across else here, 1)
    inside = scope.child(conditional=True)
    run = axis_index(each.along) % neighbours(each.index, each.along)

    def place(along: str, into: Scope) -> tuple[str, str]:
        """Where the element lies, and its place in what lies together in memory."""
        part = into.child()
        _define(frame, part, each.along, along, 1)
        found = part.operand(each.index), part.index(run) if plan.overlap else ""
        into.lines += part.lines
        return found

    first = frame.first_along.removesuffix(" + ")
    start, end = frame.names.exact(f"{pointer}_start"), frame.names.exact(f"{pointer}_end")
    at, before = place(first, inside)
    inside.lines.append(f"const {frame.index_type} {start} = {at};")
    last = f"{first} + {count - 1}"
    if frame.leaves_rows(each.along.size, count):
        last = f"fp::least({last}, {free(each.along.size - 1)})"
    inside.lines.append(f"const {frame.index_type} {end} = {place(last, inside)[0]};")
    single = inside.child(conditional=True)
    along = frame.names.exact(f"{pointer}_at")
    target, past = place(f"{first} + {along}", single)
    stored = [f"{pointer}[{target}] = {each.name}[({here}) * {tile.pitch} + {along}];"]
    row, piece = f"&{each.name}[({here}) * {tile.pitch}]", f"{end} - {start} == {count - 1}"
    whole = f"fp::store_row<{count}>({pointer} + {start}, {row}, {lane});"
    if plan.overlap:
        own, sector = plan.own_rows, plan.overlap
        begin = f"fp::least(unsigned({target}) % {sector}, unsigned({past}))"
        stored = block(f"if (unsigned({along}) - {begin} < {own})", stored)
        # No other block has the part of a sector that memory which lies together begins with.
        piece += f" && {before} != 0"
        whole = f"fp::store_sectors<{own}, {sector}>({pointer} + {start}, {row}, {lane}, unsigned({start}));"
    single.lines += stored
    fits = f"{first} + {along} < {free(each.along.size)}"
    guarded = block(f"if ({fits})", single.lines) if frame.leaves_rows(each.along.size, count) else single.lines
    inside.lines += block(f"if ({piece})", [whole])
    inside.lines += block("else", block(f"for (int {along} = {lane}; {along} < {count}; {along} += {lanes})", guarded))
    guards = [f"{here} < {tile.across}"] if lines > tile.across else []
    if frame.may_leave(each.across.size, tile.across):
        guards.append(f"{across} < {free(each.across.size)}")
    scope.lines += block(f"if ({' && '.join(guards)})", inside.lines) if guards else inside.lines
    frame.top.lines += frame.unrolled(frame.u, steps, without_unused(scope.lines))


def _clamped(frame: Frame, number: str, axis: Axis, tile: int, width: int = 1) -> str:
    return f"fp::least({number}, {free(axis.size // width - 1)})" if frame.may_leave(axis.size, tile) else number


def _define(frame: Frame, scope: Scope, axis: Axis, number: str, width: int) -> str:
    """Define `axis` in `scope` as the first point of vector `number` of `width` points; the name of the position."""
    name = frame.names.numbered(axis.name.split()[0])
    scope.lines.append(f"const {frame.index_type} {name} = {number if width == 1 else f'({number}) * {width}'};")
    scope.define_axis(axis, name)
    return name
