"""Kernels whose operands are contiguous along different axes, and the tiles that bring them together.

A block of such a kernel takes a tile: neighbouring points *along* the axis that it computes along times neighbouring
points *across* it. An access that is contiguous across *crosses*: it is made across, and exchanged through shared memory.
A pointwise kernel gets rows and columns for that; it computes along the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, prod

from fusepass.codegen.ir.expr import Load, inside_windows
from fusepass.codegen.ir.guards import Guard, guarded_loads
from fusepass.codegen.ir.index import Axis, Index, Mod, axis_index
from fusepass.codegen.ir.program import Kernel, Program, Store

_LINE = 128  # bytes
COLUMNS = 128  # of a tile
_FIRST = 32  # points of an axis
_KEPT = 1 << 12  # results that are remembered, as schedules and what writes them ask for the same ones
_MOST = 4  # accesses of a kernel that cross; more do not fit in a block's shared memory


@dataclass(frozen=True)
class Transpose:
    """A load (with what must hold for it) or a store of a kernel that crosses; the other of the two is None."""

    load: Load | None
    store: Store | None
    guard: Guard = ()

    @property
    def buffer(self) -> str:
        found = self.load or self.store
        assert found is not None
        return found.buffer

    @property
    def index(self) -> Index:
        found = self.load or self.store
        assert found is not None
        return found.index


def columns_of(kernel: Kernel, program: Program) -> tuple[Axis, ...]:
    """The axes of a pointwise kernel that should be its columns, slowest first; none where nothing crosses."""
    accesses = _Accesses(kernel, program)
    main = accesses.main()
    if main is None:
        return ()
    other = accesses.other(main)
    if other is None:
        return ()
    run = accesses.run(main, stop=frozenset({other}))
    return tuple(reversed(accesses.run(other, stop=frozenset(run))))


def with_columns(kernel: Kernel, program: Program, columns: tuple[Axis, ...]) -> Kernel:
    """The pointwise `kernel` with `columns` as its columns and the rows in the order of memory."""
    accesses = _Accesses(kernel, program)
    rows = tuple(axis for axis in kernel.rows if axis not in columns)
    main = accesses.main()
    index = None if main is None else accesses.largest(main)
    if index is not None:
        rows = tuple(sorted(rows, key=lambda axis: -abs(index.stride(axis) or 0)))
    return replace(kernel, rows=rows, cols=columns)


def along_windows(kernel: Kernel, program: Program) -> Axis | None:
    """The axis along which most of what windows read has neighbours, elements that several windows share among them."""
    accesses = _Accesses(kernel, program)
    return accesses.nearest(accesses.windows)


def rows_together(kernel: Kernel, program: Program) -> int:
    """How many rows of a pointwise kernel with columns follow each other in memory before columns come between."""
    accesses = _Accesses(kernel, program)
    main = accesses.main() or accesses.nearest(accesses.plain)
    return 1 if main is None else prod(axis.size for axis in accesses.run(main, stop=frozenset(kernel.cols)))


@dataclass(frozen=True)
class _Access:
    index: Index
    nbytes: int  # of the whole buffer
    element: int  # bytes
    store: bool
    window: bool


class _Accesses:
    """The accesses of a pointwise kernel that most of its traffic comes from."""

    def __init__(self, kernel: Kernel, program: Program) -> None:
        self.rows = kernel.rows
        inside = inside_windows(kernel.nodes)
        least = kernel.row_count // 4
        found = [
            *((load.buffer, load.index, False, id(load) in inside) for load in kernel.loads()),
            *((store.buffer, store.index, True, False) for store in kernel.stores),
        ]
        self.all = [
            _Access(index, program.buffer(name).nbytes, program.buffer(name).dtype.nbytes, store, window)
            for name, index, store, window in found
            if program.buffer(name).numel >= least
        ]
        self.plain = [access for access in self.all if not access.window]
        self.windows = [access for access in self.all if access.window]

    def main(self) -> Axis | None:
        """The axis to compute along: that of the windows, whose loads cannot cross, else that of the stores.

        Another one where the stores have less than a cache line along theirs: rows of a tile are long.
        """
        if self.windows:
            return self.nearest(self.windows)
        found = self.nearest([access for access in self.plain if access.store])
        other = None if found is None else self.other(found)
        if (
            found is not None
            and other is not None
            and self._is_short(found, other)
            and not self._is_short(other, found)
        ):
            return other
        return found

    def other(self, main: Axis) -> Axis | None:
        """The axis that most of what is not contiguous along `main` is contiguous along."""
        return self.nearest([access for access in self.plain if self.unit(access.index) not in (None, main)])

    def _is_short(self, axis: Axis, stop: Axis) -> bool:
        """Whether the largest access along `axis` has less than a cache line there, before it comes to `stop`, or few points that are no
        whole lines: a tile may have all of them as its columns."""
        along = [access for access in self.plain if self.unit(access.index) == axis]
        element = max(along, key=lambda access: access.nbytes).element
        count = prod(each.size for each in self.run(axis, stop=frozenset({stop})))
        return count * element < _LINE or (count <= COLUMNS and count * element % _LINE != 0)

    def nearest(self, accesses: Iterable[_Access]) -> Axis | None:
        """The axis along which most of the bytes of `accesses` are nearest in memory."""
        votes: dict[Axis, int] = {}
        for access in accesses:
            axis = self._smallest(access.index) if access.window else self.unit(access.index)
            if axis is not None:
                votes[axis] = votes.get(axis, 0) + access.nbytes
        return max(votes, key=lambda axis: votes[axis], default=None)

    def unit(self, index: Index) -> Axis | None:
        """The axis whose points are neighbours in memory."""
        return next((axis for axis in self.rows if axis.size > 1 and index.stride(axis) == 1), None)

    def _smallest(self, index: Index) -> Axis | None:
        strides = {axis: _mean_step(index, axis) for axis in self.rows if axis.size > 1}
        return min((axis for axis in strides if strides[axis]), key=lambda axis: strides[axis], default=None)

    def largest(self, axis: Axis) -> Index | None:
        """The index of the largest access that is contiguous along `axis`."""
        along = [access for access in self.plain if self.unit(access.index) == axis]
        return max(along, key=lambda access: access.nbytes).index if along else None

    def run(self, start: Axis, stop: frozenset[Axis]) -> list[Axis]:
        """`start` and the axes that go on where the one before ends, in the largest access along it."""
        index, run, step = self.largest(start), [start], start.size
        while index is not None:
            follows = (a for a in self.rows if a not in (*run, *stop) and a.size > 1 and index.stride(a) == step)
            axis = next(follows, None)
            if axis is None:
                break
            run.append(axis)
            step *= axis.size
        return run


def transposes(
    kernel: Kernel, program: Program, along: Axis, across: Axis, *, loads: bool = True
) -> tuple[Transpose, ...]:
    """What of the element stores, and with `loads` of what they need, crosses in a kernel on flat axes; the widest first."""
    least = along.size * across.size // 4

    def crosses(buffer: str, index: Index) -> bool:
        if program.buffer(buffer).numel < least or along not in index.axes:
            return False
        return near_step(index, across) == 1 and near_step(index, along) != 1

    found = [Transpose(None, store) for store in kernel.stores if crosses(store.buffer, store.index)]
    inside = inside_windows(kernel.nodes)
    for load, guard in guarded_loads([store.value for store in kernel.stores]) if loads else ():
        if guard is not None and id(load) not in inside and crosses(load.buffer, load.index):
            found.append(Transpose(load, None, guard))
    return tuple(sorted(found, key=lambda each: -program.buffer(each.buffer).dtype.nbytes)[:_MOST])


def reused(found: Sequence[Transpose], stores: Iterable[str], program: Program) -> dict[str, int]:
    """Of buffers that are stored along the rows through a tile, those that may go into the tile of a load that crosses, and its number
    in `found`: a thread reads a place of that before it writes there, and no other does."""
    made: dict[str, int] = {}
    for name in sorted(stores):
        loads = (number for number, each in enumerate(found) if each.load is not None and number not in made.values())
        alike = (number for number in loads if program.buffer(found[number].buffer).dtype is program.buffer(name).dtype)
        number = next(alike, None)
        if number is not None:
            made[name] = number
    return made


@lru_cache(maxsize=_KEPT)
def near_step(index: Index, axis: Axis) -> float:
    """How far apart in memory the first two points of `axis` are; infinite where they are the same element."""
    if axis.size < 2:
        return inf
    return abs(_at(index, axis, 1) - _at(index, axis, 0)) or inf


def pace(index: Index, axis: Axis) -> float:
    """How far apart in memory neighbouring points are at the beginning of `axis`: of elements that are repeated, on average."""
    step = near_step(index, axis)
    if step != inf or axis.size < 2:
        return step
    places = [_at(index, axis, position) for position in range(min(axis.size, _FIRST))]
    return (max(places) - min(places)) / (len(places) - 1) or inf


def close_by(index: Index, axis: Axis, reach: int, most: int) -> int:
    """How many points from the first one of the flat `axis` on, `most` at the most, lie at most `reach` elements behind the one before."""
    found = min(neighbours(index, axis), most)
    if found > 1:
        return found
    place = _at(index, axis, 0)
    for position in range(1, min(axis.size, most)):
        before, place = place, _at(index, axis, position)
        if not 0 <= place - before <= reach:
            return position
    return min(axis.size, most)


def _mean_step(index: Index, axis: Axis) -> float:
    """How far apart in memory neighbouring points of `axis` are on average, rounded down ones among them; 0 where they come back."""
    if any(isinstance(atom, Mod) and axis in atom.index.axes for atom, _ in index.terms):
        return 0.0
    return abs(_at(index, axis, axis.size - 1) - _at(index, axis, 0)) / (axis.size - 1)


def neighbours(index: Index, axis: Axis) -> int:
    """How many points of the flat `axis` follow each other in memory before others come between."""
    for atom, factor in index.terms:
        if factor == 1 and atom == axis:
            return axis.size
        if factor == 1 and isinstance(atom, Mod) and atom.index == axis_index(axis):
            return atom.divisor
    return 1


def _at(index: Index, axis: Axis, position: int) -> int:
    fixed = index.substitute({other: Index(position if other == axis else 0) for other in index.axes})
    return fixed.constant
