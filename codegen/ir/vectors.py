"""Flat iteration domains, and what an index does along a vector of neighbouring points.

A schedule walks a kernel's rows and columns as one flat axis each, and one of the two in vectors: aligned groups of
`width` consecutive points. `flatten` and `split` rewrite a kernel accordingly, with index arithmetic simplified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import gcd, prod

from fusepass.codegen.ir.expr import Builder, Expr, Load, Window
from fusepass.codegen.ir.index import Atom, Axis, Bound, FloorDiv, Index, Mod, axis_index, delinearize, from_the_end
from fusepass.codegen.ir.program import Kernel, Partials, Reduction, Store

ACCESS = 16  # bytes of the widest access of one thread
_LEAST_ACCESS = 4  # for several elements
_MOST = 4 * ACCESS  # of a window's points that are loaded together
_KEPT = 1 << 12  # results that are remembered, as all rules for schedules ask for them


@dataclass(frozen=True)
class Beginnings:
    """Where the rows of a kernel begin, and what should lie likewise.

    Attributes:
        width: elements of a vector.
        start: of a row, in elements from a multiple of the width; an index over the kernel's rows.
        loads: of what is the same for all rows, each with neighbours along the columns.
        column: the position along the columns, as these loads have it.
    """

    width: int
    start: Index
    loads: tuple[Load, ...]
    column: Index


def flatten(kernel: Kernel, builder: Builder) -> Kernel:
    """`kernel` with at most one row axis (``row``) and one column axis (``col``), in row-major order."""
    windows = (node.axes for node in kernel.nodes if isinstance(node, Window))
    names = {axis.name for axes in (kernel.rows, kernel.cols, *windows) for axis in axes}
    rows, cols = _flat(kernel.rows, "row", names), _flat(kernel.cols, "col", names)
    axes = {**_coordinates(kernel.rows, rows), **_coordinates(kernel.cols, cols)}
    return replace(_moved(kernel, axes, builder), rows=rows, cols=cols)


def across(kernel: Kernel) -> Kernel:
    """`kernel` with the innermost axis of its columns as the innermost of its rows: as many neighbouring rows are parts of one."""
    return replace(kernel, rows=(*kernel.rows, kernel.cols[-1]), cols=kernel.cols[:-1])


def backwards(kernel: Kernel, builder: Builder) -> Kernel:
    """`kernel` with its one axis of columns counted from the other end."""
    (axis,) = kernel.cols
    return _moved(kernel, {axis: from_the_end(axis)}, builder)


def in_runs(kernel: Kernel, length: int, builder: Builder) -> Kernel:
    """A `flatten`ed kernel with its columns as runs of `length` columns: axes for the run, and for the place in it."""
    run, col = run_axes(kernel.cols[0], length)
    place = {kernel.cols[0]: axis_index(run) * length + axis_index(col)}
    return replace(_moved(kernel, place, builder), cols=(run, col))


def run_axes(cols: Axis, length: int) -> tuple[Axis, Axis]:
    """The axes of `in_runs` for a flat axis of columns."""
    return Axis(f"{cols.name}_run", cols.size // length), Axis(cols.name, length)


def coordinate_names(kernel: Kernel) -> dict[Atom, str]:
    """The quotients and remainders of flat axes that are the position along an axis of `kernel`, by that axis' name."""
    names: dict[Atom, str] = {}
    flat = flatten(replace(kernel, reduction_loops=(), row_stores=(), stores=()), Builder())
    for axes, whole in ((kernel.rows, flat.rows), (kernel.cols, flat.cols)):
        for axis, index in _coordinates(axes, whole).items():
            if index.constant == 0 and len(index.terms) == 1 and index.terms[0][1] == 1:
                names[index.terms[0][0]] = axis.name
    return names


def _flat(axes: Sequence[Axis], name: str, taken: set[str]) -> tuple[Axis, ...]:
    if not axes:
        return ()
    while name in taken:
        name += "_"
    return (Axis(name, prod(axis.size for axis in axes)),)


def _coordinates(axes: Sequence[Axis], flat: Sequence[Axis]) -> dict[Axis, Index]:
    if not axes:
        return {}
    return dict(zip(axes, delinearize(axis_index(flat[0]), [max(axis.size, 1) for axis in axes]), strict=True))


def split(kernel: Kernel, axis: Axis, lane: Axis, builder: Builder, *, anywhere: bool = False) -> Kernel:
    """`kernel` with `axis` replaced by ``axis + lane``; from now on `axis` takes multiples of `lane.size` only.

    Any number, if vectors begin `anywhere`.
    """
    if lane.size == 1:
        return kernel

    def along(index: Index) -> Index:
        return (
            index.substitute({axis: axis_index(axis) + axis_index(lane)})
            if anywhere
            else split_index(index, axis, lane)
        )

    def condition(bound: Bound) -> Bound:
        return Bound(along(bound.index), bound.low, bound.high) if anywhere else _split_bound(bound, axis, lane)

    return map_values(kernel, builder.with_indices(along, condition), along)


def split_value(value: Expr, axis: Axis, lane: Axis, builder: Builder) -> Expr:
    """A value of a kernel after `split`."""
    along, condition = partial(split_index, axis=axis, lane=lane), partial(_split_bound, axis=axis, lane=lane)
    return builder.with_indices(along, condition)(value)


def _split_bound(bound: Bound, axis: Axis, lane: Axis) -> Bound:
    """`bound` after `split`, that of the first lane where it holds for all lanes or for none."""
    bound = Bound(split_index(bound.index, axis, lane), bound.low, bound.high)
    step, (low, high) = bound.index.stride(lane), bound.index.bounds
    if not step:
        return bound
    start = bound.index.substitute({lane: Index()})
    limits = [limit for limit, open_ in ((bound.low, low < bound.low), (bound.high, high >= bound.high)) if open_]
    same = 0 < step * (lane.size - 1) < gcd(alignment(start, axis, lane.size), *limits)
    return Bound(start, bound.low, bound.high) if same else bound


def _moved(kernel: Kernel, axes: Mapping[Axis, Index], builder: Builder) -> Kernel:
    """`kernel` with `axes` replaced in every index; its axis lists are left as they are."""
    return map_values(kernel, builder.rewriting(axes), lambda index: index.substitute(axes))


def map_values(kernel: Kernel, value: Callable[[Expr], Expr], index: Callable[[Index], Index]) -> Kernel:
    """`kernel` with every expression, and every index of stores and bounds, replaced."""

    def mapped(stores: Sequence[Store]) -> tuple[Store, ...]:
        return tuple(replace(store, index=index(store.index), value=value(store.value)) for store in stores)

    def reduced(reductions: Sequence[Reduction]) -> tuple[Reduction, ...]:
        return tuple(replace(each, values=tuple(map(value, each.values))) for each in reductions)

    def partials(found: Partials) -> Partials:
        return replace(found, reductions=reduced(found.reductions), stores=mapped(found.stores))

    return replace(
        kernel,
        reduction_loops=tuple(map(reduced, kernel.reduction_loops)),
        row_stores=mapped(kernel.row_stores),
        stores=mapped(kernel.stores),
        partials=kernel.partials and partials(kernel.partials),
        within=tuple(Bound(index(bound.index), bound.low, bound.high) for bound in kernel.within),
        overflow_flag=kernel.overflow_flag
        and replace(kernel.overflow_flag, condition=value(kernel.overflow_flag.condition)),
        once=mapped(kernel.once),
    )


@lru_cache(maxsize=_KEPT)
def split_index(index: Index, axis: Axis, lane: Axis) -> Index:
    """`index` after `split`: a quotient that is the same for the whole vector no longer mentions `lane`."""
    result = Index(index.constant)
    for atom, factor in index.terms:
        result = result + _split_atom(atom, axis, lane) * factor
    return result


def at_whole(index: Index, axis: Axis, lane: Axis, whole: Axis) -> Index:
    """What `split_index` gave for an index, as one of `whole`, which stands for `axis` and `lane` together.

    Where a vector's elements repeat within it, the index tells them apart by the lane alone.
    """
    place = axis_index(whole)
    plain = index.substitute({axis: place, lane: Index()})
    again = split_index(plain.substitute({whole: axis_index(axis)}), axis, lane)
    if index in (again, again.substitute({lane: Index()})):
        return plain
    return index.substitute({axis: place // lane.size * lane.size, lane: place % lane.size})


def _split_atom(atom: Atom, axis: Axis, lane: Axis) -> Index:
    if isinstance(atom, Axis):
        return axis_index(axis) + axis_index(lane) if atom == axis else axis_index(atom)
    inner, divisor = split_index(atom.index, axis, lane), atom.divisor
    step = inner.stride(lane)
    if step:
        start = inner - axis_index(lane) * step
        # start is g * q and the lanes add less than g, which divides the divisor: no lane reaches the next quotient.
        if 0 < step * (lane.size - 1) < gcd(alignment(start, axis, lane.size), divisor):
            if isinstance(atom, FloorDiv):
                return start // divisor
            return start % divisor + axis_index(lane) * step
        # start is whole quotients and a number: what the lanes add to that is all that counts.
        start = start - start.constant
        if alignment(start, axis, lane.size) % divisor == 0:
            added = inner - start
            return start // divisor + added // divisor if isinstance(atom, FloorDiv) else added % divisor
    return inner // divisor if isinstance(atom, FloorDiv) else inner % divisor


@lru_cache(maxsize=_KEPT)
def alignment(index: Index, axis: Axis, width: int) -> int:
    """A number that divides `index` wherever `axis` is a multiple of `width`; 0 where the index is always 0."""
    found = index.constant
    for atom, factor in index.terms:
        found = gcd(found, factor * _atom_alignment(atom, axis, width))
    return abs(found)


def _atom_alignment(atom: Atom, axis: Axis, width: int) -> int:
    if isinstance(atom, Axis):
        return width if atom == axis else 1
    inner = alignment(atom.index, axis, width)
    if isinstance(atom, FloorDiv):
        return inner // atom.divisor if inner % atom.divisor == 0 else 1
    return gcd(inner, atom.divisor)


def is_vector(index: Index, axis: Axis, lane: Axis) -> bool:
    """Whether the lanes of a vector touch `lane.size` consecutive elements that start at a multiple of it."""
    step = index.stride(lane)
    if step != 1:
        return False
    return alignment(index - axis_index(lane), axis, lane.size) % lane.size == 0


def access_along(load: Load, axis: Axis) -> int:
    """How many elements each of the aligned accesses has that load the points of a window along `axis`; 1 where that saves nothing, or
    they would take too many registers."""
    first, nbytes = load.index - axis_index(axis), load.dtype.nbytes
    if axis in first.axes or axis.size * nbytes > _MOST:
        return 1
    size = gcd(axis.size, ACCESS // nbytes)
    while alignment(first, axis, size) % size:
        size //= 2
    return size if size * nbytes >= _LEAST_ACCESS else 1


@dataclass(frozen=True)
class Picked:
    """The elements that the lanes of a vector have, out of one aligned access: in another order, or some of them for several lanes.

    Attributes:
        start: the first element of the access.
        count: how many it has.
        place: which of them a lane has; an index over that.
    """

    start: Index
    count: int
    place: Index


def picked(index: Index, axis: Axis, lane: Axis, most: int, extent: int) -> Picked | None:
    """How the lanes of a vector pick their elements out of an access of at most so many, of which they need half; None where they do not.

    No access ends behind the buffer's `extent` elements, which are whole accesses.
    """
    first = index.substitute({lane: Index()})
    place = index - first
    if place.axes != {lane}:
        return None
    places = [place.substitute({lane: Index(number)}).constant for number in range(lane.size)]
    count = 2
    while count <= min(most, 2 * len(set(places))):
        before = (first.constant + min(places)) % count - min(places)
        start = first - before
        if extent % count == 0 and max(places) + before < count and alignment(start, axis, lane.size) % count == 0:
            return Picked(start, count, place + before)
        count *= 2
    return None


def start_of(index: Index, axis: Axis) -> Index | None:
    """Where a row begins whose elements are neighbours along `axis`; None where they are not."""
    rest = index - axis_index(axis)
    return rest if index.stride(axis) == 1 and axis not in rest.axes else None


def begins_with(start: Index, other: Index, width: int) -> bool:
    """Whether the rows of two buffers begin at the same place of a vector."""
    difference = _without_remainders(start - other, width)
    return alignment(difference, Axis("", 1), 1) % width == 0


def _without_remainders(index: Index, width: int) -> Index:
    """What differs from `index` by a multiple of `width`."""
    result = Index(index.constant)
    for atom, factor in index.terms:
        if isinstance(atom, Mod) and atom.divisor % width == 0:
            result = result + _without_remainders(atom.index, width) * factor
        else:
            result = result + Index(0, ((atom, factor),))
    return result
