"""The exchange of a tile through shared memory, in kernels whose operands are contiguous along different axes.

What crosses is loaded along the columns before the computation and stored along them after it; in between the block's
threads read and write its tile in shared memory, where they stand side by side along the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusepass.codegen.ir.crossing import Crossing, Tile, crossings, pitch
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index
from fusepass.codegen.ir.vectors import split_index
from fusepass.codegen.render.cuda_frame import Frame, without_unused
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, block
from fusepass.codegen.schedule import exchange_tile


@dataclass(frozen=True)
class Exchange:
    """A tile in shared memory.

    Attributes:
        crossing: the access that goes through it.
        tile: how threads stand on it to load or store.
        name: the C variable.
        row, col, lane: axes of the position that a thread loads or stores; `lane` is the element of its vector.
        index, guard: those of `crossing` at that position.
    """

    crossing: Crossing
    tile: Tile
    name: str
    row: Axis
    col: Axis
    lane: Axis
    index: Index
    guard: tuple[Bound, ...]

    @property
    def pitch(self) -> int:
        return pitch(self.tile.rows, self.tile.nbytes)

    def place(self, frame: Frame) -> str:
        """The element of the tile at the position that is computed, in the loops over steps and lanes."""
        plan, (lane, group) = frame.schedule, frame.place
        col = group if plan.unroll == 1 else f"({group} + {frame.u} * {plan.groups})"
        row = lane if plan.width == 1 else f"{lane} * {plan.width} + {frame.v}"
        return f"{self.name}[{col} * {self.pitch} + {row}]"


def exchanges(frame: Frame) -> tuple[Exchange, ...]:
    """The tiles of a `CROSSING` kernel, which are declared."""
    arranged = frame.arranged
    assert arranged.row is not None
    assert arranged.col is not None
    made = []
    for number, crossing in enumerate(crossings(arranged.kernel, frame.program, arranged.row, arranged.col)):
        # Axes of its own, because the thread stands elsewhere while it computes. A position on the tile's row is one
        # number, so that the lane of the vector that is computed has no part in it.
        row, col = Axis(f"row of tile {number}", arranged.row.size), Axis(f"column of tile {number}", arranged.col.size)
        there = {arranged.row: axis_index(row), arranged.col: axis_index(col), arranged.lane: Index()}
        index = crossing.index.substitute(there)
        tile = exchange_tile(frame.kernel, frame.program, frame.schedule, crossing, col, index)
        lane = Axis(f"lane of tile {number}", tile.width)
        guard = tuple(Bound(bound.index.substitute(there), bound.low, bound.high) for bound in crossing.guard)
        if tile.width > 1:
            index = split_index(index, col, lane)
        name = frame.names.exact(f"{frame.pointers[crossing.buffer]}_tile")
        made.append(Exchange(crossing, tile, name, row, col, lane, index, guard))
    for each in made:
        element, count = C_TYPES[frame.program.buffer(each.crossing.buffer).dtype], each.tile.cols * each.pitch
        frame.top.lines.append(f"__shared__ fp::Slots<{element}, {count}> {each.name};")
    return tuple(made)


@dataclass(frozen=True)
class _Stand:
    """Where a thread stands to load or store what crosses, in the loop over its steps.

    Attributes:
        row, col: C expressions of the row and the number of the vector along the columns, from the tile's first.
        first_col: of the tile, as the number of a vector.
        steps: of the loop.
    """

    row: str
    col: str
    first_col: str
    steps: int

    @classmethod
    def of(cls, frame: Frame, each: Exchange) -> _Stand:
        """With the thread's place among the others defined."""
        tile, lines = each.tile, frame.top.lines
        along_cols, along_rows = tile.steps
        col, row = frame.names.exact(f"{each.name}_lane"), frame.names.exact(f"{each.name}_line")
        lines.append(f"const int {col} = threadIdx.x % {tile.lanes};")
        lines.append(f"const int {row} = threadIdx.x / {tile.lanes};")
        if along_cols > 1:
            col += f" + {tile.lanes} * {frame.u if along_rows == 1 else f'({frame.u} % {along_cols})'}"
        if along_rows > 1:
            row += f" + {tile.lines} * {frame.u if along_cols == 1 else f'({frame.u} / {along_cols})'}"
        first = frame.first_col and (
            f"{frame.first_col} / {tile.width} + " if tile.width > 1 else f"{frame.first_col} + "
        )
        return cls(row, col, first, along_cols * along_rows)

    def slot(self, frame: Frame, each: Exchange) -> str:
        """The element of the tile for one lane of the thread's vector."""
        width = each.tile.width
        col = self.col if width == 1 else f"({self.col}) * {width} + {frame.v}"
        return f"{each.name}[({col}) * {each.pitch} + {self.row}]"


def read_in(frame: Frame, exchanges: Sequence[Exchange]) -> None:
    """Load what crosses, all of it before the first is written to shared memory; then wait for the block."""
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
        rows, cols = each.row.size, each.col.size // width
        row, col = f"{frame.first_row} + {stand.row}", f"{stand.first_col}{stand.col}"
        # A thread past the end loads what the last one loads.
        _define(frame, scope, each.row, row if rows % each.tile.rows == 0 else f"fp::least({row}, {rows - 1})", 1)
        whole = each.col.size % each.tile.cols == 0
        _define(frame, scope, each.col, col if whole else f"fp::least({col}, {cols - 1})", width)
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
    if written:
        frame.top.lines += [*written, "__syncthreads();"]


def write_out(frame: Frame, exchanges: Sequence[Exchange]) -> None:
    """Wait for the block; then store what crosses."""
    stores = [each for each in exchanges if each.crossing.store is not None]
    if stores:
        frame.top.lines.append("__syncthreads();")
    for each in stores:
        stand, width, buffer = _Stand.of(frame, each), each.tile.width, each.crossing.buffer
        scope = frame.top.child()
        rows, cols = each.row.size, each.col.size // width
        row = _define(frame, scope, each.row, f"{frame.first_row} + {stand.row}", 1)
        number = frame.names.numbered("vector")
        scope.lines.append(f"const {frame.index_type} {number} = {stand.first_col}{stand.col};")
        _define(frame, scope, each.col, number, width)
        inside = scope.child(conditional=True)
        vector = f"{each.name}_out"
        inside.lines.append(f"fp::Vec<{C_TYPES[frame.program.buffer(buffer).dtype]}, {width}> {vector};")
        lane = frame.v if width > 1 else "0"
        inside.lines += frame.unrolled(frame.v, width, [f"{vector}[{lane}] = {stand.slot(frame, each)};"])
        start = inside.operand(each.index.substitute({each.lane: Index()}))
        reuse = "<fp::Reuse::none>" if buffer in frame.schedule.once else ""
        inside.lines.append(f"fp::store_vector{reuse}({frame.pointers[buffer]} + {start}, {vector});")
        guards = [f"{row} < {rows}"] if rows % each.tile.rows else []
        guards += [f"{number} < {cols}"] if each.col.size % each.tile.cols else []
        scope.lines += block(f"if ({' && '.join(guards)})", inside.lines) if guards else inside.lines
        frame.top.lines += frame.unrolled(frame.u, stand.steps, without_unused(scope.lines))


def _define(frame: Frame, scope: Scope, axis: Axis, number: str, width: int) -> str:
    """Define `axis` in `scope` as vector `number` of `width` points; the name of the position."""
    name = frame.names.numbered("row" if width == 1 and "row" in axis.name else "column")
    text = number if width == 1 else f"({number}) * {width}"
    scope.lines.append(f"const {frame.index_type} {name} = {text};")
    scope.define_axis(axis, name)
    return name
