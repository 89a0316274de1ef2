"""The exchange of a tile through shared memory, in kernels whose operands are contiguous along different axes.

What crosses is loaded across before the computation and stored across after it; in between the block's threads read and
write its tile in shared memory, where they stand side by side along the axis that they compute along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index
from fusepass.codegen.ir.program import Store
from fusepass.codegen.ir.tile import Tile
from fusepass.codegen.ir.transpose import Transpose, near_step, reused, transposes
from fusepass.codegen.ir.vectors import at_whole, split_index
from fusepass.codegen.render.cuda.walk.frame import Around, Frame, Pool
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import C_TYPES, Constant
from fusepass.codegen.schedule.plan_flat import Transposed
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from fusepass.codegen.schedule.shape import ACCESS
from fusepass.codegen.schedule.transpose import exchange_tile


@dataclass(frozen=True)
class SharedTranspose:
    """A tile in shared memory.

    Attributes:
        crossing: the access that goes through it.
        tile: its size, and how threads stand on it to load or store.
        name: the C variable.
        along, across, lane: axes of the position that a thread loads or stores; `lane` is the element of its vector.
        index, guard: those of `transposing` at that position.
        realigned: whether it does not cross: a store of rows that begin anywhere, which goes in whole accesses.
        piece: elements of an access where all of the tile is one piece of memory, across before along; else 0.
        reused: whether such a store goes through the tile of this load, of which a thread overwrites what it has read.
    """

    transposing: Transpose
    tile: Tile
    name: str
    along: Axis
    across: Axis
    lane: Axis
    index: Index
    guard: tuple[Bound, ...]
    realigned: bool = False
    piece: int = 0
    reused: bool = False

    def at(self, across: str, along: str, number: str = "") -> str:
        """The element of the tile there; `number` is that of the access across, where `across` is not simply in it."""
        if self.tile.vector > 1:
            along = f"({along} ^ {self.iteration(across, number)})"
        return f"{self.name}[{across} * {self.tile.pitch} + {along}]"

    def iteration(self, across: str, number: str = "") -> str:
        """What a position along is changed by there, bit by bit."""
        if self.tile.vector == 1:
            return "0"
        access = number or (f"{across} / {self.tile.width}" if self.tile.width > 1 else across)
        return f"{access} % {self.tile.iterations} * {self.tile.vector}"

    def read(self, frame: Frame, step: Scope, lanes: Scope) -> str:
        """The element of the tile at the position that `lanes` computes; whole vectors are read in `step`."""
        if self.tile.vector == 1 and self.reused:
            read = frame.names.exact(f"{self.name}_at")
            lanes.lines.append(
                f"const {C_TYPES[frame.program.buffer(self.transposing.buffer).dtype]} {read} = {self.place(frame, lanes)};"
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
        return f"fp::Vec<{C_TYPES[frame.program.buffer(self.transposing.buffer).dtype]}, {self.tile.vector}>"

    def _vector(self, frame: Frame, lanes: Scope) -> str:
        return f"fp::as_vector<{self.tile.vector}>({self.place(frame, lanes)})"

    def place(self, frame: Frame, lanes: Scope) -> str:
        """The element of the tile at the position that `lanes` computes, or of its vector the first."""
        plan, (lane, group) = frame.schedule, frame.place
        if isinstance(plan, Transposed | Columns):
            parts = [str(group)] if plan.groups > 1 or plan.unroll == 1 else []
            if plan.unroll > 1:
                parts.append(f"{frame.u} * {plan.groups}" if plan.groups > 1 else frame.u)
            across = f"({' + '.join(parts)})" if len(parts) > 1 else parts[0]
            along = lane if plan.width == 1 else f"{lane} * {plan.width}"
        else:
            assert frame.arranged.col is not None
            across, along = str(group), lanes.index(axis_index(frame.arranged.col))
        along = along if plan.width == 1 or self.tile.vector > 1 else f"{along} + {frame.v}"
        return self.at(across, along)


def exchanges(frame: Frame) -> tuple[SharedTranspose, ...]:
    """The tiles of a kernel whose schedule exchanges; they are declared."""
    arranged, plan, inner = frame.arranged, frame.schedule, frame.in_rows is not None
    if not (isinstance(plan, Transposed) or (isinstance(plan, Rows | Columns) and plan.exchanges)):
        return ()
    here, there = (arranged.col, arranged.row) if inner else (arranged.row, arranged.col)
    assert here is not None
    assert there is not None
    made = []
    loads = isinstance(plan, Transposed)
    found = transposes(arranged.kernel, frame.program, here, there, loads=loads)
    realigned = plan.realigned if isinstance(plan, Transposed) else frozenset[str]()
    again = reused(found, realigned, frame.program)
    for number, transposing in enumerate(found):
        # Axes of its own, because the thread stands elsewhere while it computes; a position along is one number then,
        # of which the lane of the computed vector is no part.
        along, across = Axis(f"along {number}", here.size), Axis(f"across {number}", there.size)
        index = _at_position(transposing.index, frame, along, across)
        guard = tuple(
            Bound(_at_position(bound.index, frame, along, across), bound.low, bound.high) for bound in transposing.guard
        )
        tile = exchange_tile(frame.kernel, frame.program, plan, transposing, across, index, guard)
        piece = _piece(frame, transposing, tile, index, along, across)
        tile = replace(tile, width=1) if piece else tile
        lane = Axis(f"lane {number}", tile.width)
        if lane.size > 1:
            index = split_index(index, across, lane)
        name = frame.names.exact(f"{frame.pointers[transposing.buffer]}_tile")
        taken = number in again.values()
        made.append(
            SharedTranspose(transposing, tile, name, along, across, lane, index, guard, piece=piece, reused=taken)
        )
    for store in arranged.kernel.stores:
        if store.buffer in realigned and near_step(store.index, here) == 1:
            taken_from = made[again[store.buffer]] if store.buffer in again else None
            made.append(_realigned(frame, store, here, there, taken_from))
    _declare(frame, list({each.name: each for each in made}.values()), pooled=inner and frame.schedule.shared_bytes > 0)
    return tuple(made)


def _at_position(index: Index, frame: Frame, along: Axis, across: Axis) -> Index:
    """`index`, of the kernel as a thread computes it, at a position of a tile."""
    arranged, inner = frame.arranged, frame.in_rows is not None
    here, there = (arranged.col, arranged.row) if inner else (arranged.row, arranged.col)
    assert here is not None
    assert there is not None
    return at_whole(index.substitute({there: axis_index(across)}), here, arranged.lane, along)


def _declare(frame: Frame, made: Sequence[SharedTranspose], *, pooled: bool) -> None:
    """The tiles; those that the schedule counts in its bytes lie in dynamic shared memory, one after another."""
    pool, lines = Pool(frame.names.exact("pool")), frame.top.lines
    lines += [pool.declaration] if pooled else []
    for each in made:
        slots = f"fp::Slots<{C_TYPES[frame.program.buffer(each.transposing.buffer).dtype]}, {each.tile.elements}>"
        whole = "__align__(16) " if each.tile.vector > 1 else ""
        if pooled:
            place = pool.take(each.tile.shared_bytes)
            lines.append(f"{slots}& {each.name} = *reinterpret_cast<{slots}*>({place});")
        else:
            lines.append(f"{whole}__shared__ {slots} {each.name};")
    pool.check(frame.kernel.name, frame.schedule.shared_bytes)


def _piece(frame: Frame, transposing: Transpose, tile: Tile, index: Index, along: Axis, across: Axis) -> int:
    """Elements of an access of 16 bytes to what crosses, where the tile has all columns and they lie together with its rows, and the
    columns alone would be accessed in less; else 0."""
    plan, nbytes = frame.schedule, frame.program.buffer(transposing.buffer).dtype.nbytes
    width, terms = ACCESS // nbytes, axis_index(along) * across.size + axis_index(across)
    together = isinstance(plan, Transposed) and not transposing.guard and index == terms and tile.across >= across.size
    whole = tile.along % width == 0 and frame.own_rows % width == 0 and frame.is_aligned(transposing.buffer)
    return width if together and whole and tile.width < width and along.size > 1 else 0


def _realigned(frame: Frame, store: Store, here: Axis, there: Axis, load: SharedTranspose | None) -> SharedTranspose:
    """The tile for `store`: that of `load`, or its own."""
    dtype, plan = frame.program.buffer(store.buffer).dtype, frame.schedule
    assert isinstance(plan, Transposed)
    name = load.name if load else frame.names.exact(f"{frame.pointers[store.buffer]}_tile")
    tile = load.tile if load else Tile(*plan.tile, plan.threads, 1, dtype.nbytes)
    along, across = Axis(f"along {name}", here.size), Axis(f"across {name}", there.size)
    index = _at_position(store.index, frame, along, across)
    return SharedTranspose(Transpose(None, store), tile, name, along, across, frame.lane, index, (), realigned=True)


def define(frame: Frame, scope: Scope, axis: Axis, number: str, width: int) -> Constant:
    """Define `axis` in `scope` as the first point of vector `number` of `width` points; the name of the position."""
    name = frame.names.numbered(axis.name.split()[0])
    defined = scope.constant(frame.index_type, name, number if width == 1 else f"({number}) * {width}")
    scope.define_axis(axis, defined)
    return defined
