"""Do two kernels walk the same rows? If so, the axes of one are renamed to the other's.

Axes are identified by what they do to the address of a buffer both touch: an axis of stride s and size n in one kernel is the axis of
stride s and size n in the other. Where one kernel has one axis and the other two, the one is split first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import FEW_POINTS, Kernel
from fusepass.codegen.passes.axes import count, split_axes, split_axis
from fusepass.codegen.passes.rewrite import rewrite_kernel


@dataclass(frozen=True)
class Unified:
    """The producer (perhaps with split axes) and the consumer in the producer's axes."""

    producer: Kernel
    consumer: Kernel


def unify(
    producer: Kernel, consumer: Kernel, through: Collection[str], builder: Builder, *, beside: bool = False
) -> Unified | None:
    """Rename the consumer's axes to the producer's, or None where their rows differ.

    Args:
        producer: a kernel with row stores.
        consumer: a kernel that loads what those stores wrote.
        through: the buffers that connect them.
        builder: interns the rewritten expressions.
        beside: whether the consumer may have axes that the producer has not.
    """
    producer, consumer = split_axes(producer, builder), split_axes(consumer, builder)
    link = _link(producer, consumer, through)
    if link is None:
        return None
    matched = _match(producer, consumer, *link, builder)
    if matched is None:
        return None
    producer, consumer, names = matched
    free = [axis for axis in (*consumer.rows, *consumer.cols) if axis not in names and axis.size != 1]
    if free and not beside:
        columns = _match_columns(producer, consumer, free, builder)
        if columns is None:
            return None
        producer, consumer, more = columns
        names |= more
    return Unified(producer, _renamed(consumer, names, builder))


def unify_siblings(first: Kernel, second: Kernel, builder: Builder) -> Unified | None:
    """Rename the axes of `second` to those of `first` where both read one buffer at every point of their domains, or around it.

    Where the points are few, it is enough that both write in the same order.
    """
    first, second = split_axes(first, builder), split_axes(second, builder)
    points = first.row_count * first.col_count
    if points != second.row_count * second.col_count:
        return None
    for load in first.loads():
        for other in second.loads():
            (left, moved), (right, others) = _at_rest(load.index, first), _at_rest(other.index, second)
            if other.buffer != load.buffer or moved != others:
                continue
            matched = _match(first, second, left, right, builder)
            if matched is not None and count(tuple(matched[2])) == points:
                return Unified(matched[0], _renamed(matched[1], matched[2], builder))
    if points > FEW_POINTS or not (first.is_pointwise and second.is_pointwise):
        return None
    matched = _match(first, second, first.stores[0].index, second.stores[0].index, builder)
    if matched is None or count(tuple(matched[2])) != points:
        return None
    return Unified(matched[0], _renamed(matched[1], matched[2], builder))


def _at_rest(index: Index, kernel: Kernel) -> tuple[Index, list[tuple[int, int]]]:
    """The part of `index` that no window moves, and the sizes and strides of windows that move the rest."""
    own = {*kernel.rows, *kernel.cols}
    moved = [(atom, stride) for atom, stride in index.terms if isinstance(atom, Axis) and atom not in own]
    rest = tuple(term for term in index.terms if term not in moved)
    return Index(index.constant, rest), [(axis.size, stride) for axis, stride in moved]


def _renamed(kernel: Kernel, names: dict[Axis, Axis], builder: Builder) -> Kernel:
    fresh = rewrite_kernel(kernel, builder, {old: axis_index(new) for old, new in names.items()})
    rows = tuple(names.get(axis, axis) for axis in kernel.rows if axis.size != 1)
    cols = tuple(names.get(axis, axis) for axis in kernel.cols if axis.size != 1)
    return replace(fresh, rows=rows, cols=cols)


def _link(producer: Kernel, consumer: Kernel, through: Collection[str]) -> tuple[Index, Index] | None:
    """The index of one connecting buffer in both kernels. A load that a window moves is not at the consumer's own row."""
    own = {*consumer.rows, *consumer.cols}
    for store in producer.row_stores:
        for load in consumer.loads():
            if load.buffer == store.buffer and store.buffer in through and load.index.axes <= own:
                return store.index, load.index
    return None


Matched = tuple[Kernel, Kernel, dict[Axis, Axis]]


def _match(producer: Kernel, consumer: Kernel, left: Index, right: Index, builder: Builder) -> Matched | None:
    """Pair the axes of two addresses of one buffer by stride, splitting until they agree."""
    if left.constant != right.constant:
        return None
    for _ in range(16):
        ours, theirs = _strided(left), _strided(right)
        if ours is None or theirs is None:
            return None
        if ours.keys() == theirs.keys() and all(ours[s].size == theirs[s].size for s in ours):
            return producer, consumer, {theirs[s]: ours[s] for s in ours}
        cut = _cut(theirs, ours)
        if cut is not None:
            consumer, right = split_axis(consumer, builder, *cut), _split_index(right, *cut)
            continue
        cut = _cut(ours, theirs)
        if cut is None:
            return None
        producer, left = split_axis(producer, builder, *cut), _split_index(left, *cut)
    return None


def _strided(index: Index) -> dict[int, Axis] | None:
    """Axes by stride; None where the index is not linear or two axes share a stride."""
    result: dict[int, Axis] = {}
    for atom, stride in index.terms:
        if not isinstance(atom, Axis) or stride <= 0 or stride in result:
            return None
        result[stride] = atom
    return result


def _cut(coarse: dict[int, Axis], fine: dict[int, Axis]) -> tuple[Axis, int] | None:
    """An axis of `coarse` that spans a stride of `fine`, and the size of the inner part."""
    for stride, axis in coarse.items():
        for boundary in fine:
            if stride < boundary < stride * axis.size and boundary % stride == 0:
                inner = boundary // stride
                if axis.size % inner == 0:
                    return axis, inner
    return None


def _split_index(index: Index, axis: Axis, inner: int) -> Index:
    outer, low = Axis(f"{axis.name}o", axis.size // inner), Axis(f"{axis.name}i", inner)
    return index.substitute({axis: axis_index(outer) * inner + axis_index(low)})


def _match_columns(producer: Kernel, consumer: Kernel, free: list[Axis], builder: Builder) -> Matched | None:
    """Pair the consumer's remaining axes with the producer's columns through a buffer that both read."""
    if count(tuple(free)) != producer.col_count:
        return None
    for load in producer.loads():
        for other in consumer.loads():
            if other.buffer != load.buffer:
                continue
            left, right = _only(load.index, producer.cols), _only(other.index, free)
            found = None if left is None or right is None else _match(producer, consumer, left, right, builder)
            if found is not None and count(tuple(found[2])) == producer.col_count:
                return found
    columns = [axis for axis in producer.cols if axis.size != 1]
    if [axis.size for axis in columns] == [axis.size for axis in free]:
        return producer, consumer, dict(zip(free, columns, strict=True))
    return None


def _only(index: Index, axes: Collection[Axis]) -> Index | None:
    """The part of a linear index that depends on `axes`."""
    if any(not isinstance(atom, Axis) and atom.index.axes & set(axes) for atom, _ in index.terms):
        return None
    return Index(0, tuple((atom, c) for atom, c in index.terms if atom in axes))
