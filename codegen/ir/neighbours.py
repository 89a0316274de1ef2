"""Windows over neighbours, point by point for all lanes of a vector, and what of their loads lies together in memory.

Neighbouring windows share points, and those of a vector of windows together are whole vectors of what is pooled: a thread that has two
windows of 3 points with stride 2 needs 5 neighbours, of which 4 are one access. Points that several lanes share are one expression.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Builder, Const, Expr, Load, Masked, Window, children, descend, walk
from fusepass.codegen.ir.index import Axis, Bound, Index
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.vectors import ACCESS, alignment

Points = tuple[tuple[Expr, ...], ...]
"""What a window takes together: for each point along its last axis, the value of each lane."""

_MOST = 64  # values, of all lanes


@dataclass(frozen=True)
class Stretch:
    """Neighbouring elements that one access loads.

    Attributes:
        buffer, dtype: what they are elements of.
        first: where the first of them is, at a multiple of the access.
        size: how many elements the access has.
        mask: where they are loaded; all of them or none.
        other: what stands in their place elsewhere; None without a mask.
        elements: the values that they are, with their numbers in the access.
    """

    buffer: str
    dtype: DType
    first: Index
    size: int
    mask: tuple[Bound, ...]
    other: Const | None
    elements: tuple[tuple[int, Expr], ...]


def points(window: Window, axis: Axis, lane: Axis, builder: Builder) -> Points:
    """What `window` takes along its last axis, for the lanes of a vector along `axis`; nothing where that is too much to write out, or
    is made of more than loads."""
    along = window.axes[-1]
    plain = all(isinstance(node, Load | Masked | Apply | Const) for node in walk(window.value))
    if not plain or along.size * lane.size > _MOST:
        return ()

    def leaf(node: Expr) -> Expr | None:
        if not isinstance(node, Masked):
            return None
        return builder.masked(tuple(_tight(bound, axis, lane.size) for bound in node.mask), node.value, node.other)

    def value(point: int, number: int) -> Expr:
        return builder.rewrite(window.value, {along: Index(point), lane: Index(number)}, leaf)

    return tuple(tuple(value(point, number) for number in range(lane.size)) for point in range(along.size))


def _tight(bound: Bound, axis: Axis, width: int) -> Bound:
    """The same condition where `axis` is at a multiple of `width`: one text for all that holds together, without sides that always hold."""
    index = bound.index - bound.index.constant
    low, last = bound.low - bound.index.constant, bound.high - 1 - bound.index.constant
    least, most = index.bounds
    step = alignment(index, axis, width)
    if step:  # the index is a multiple of it
        low, last, least, most = (
            -(-low // step) * step,
            last // step * step,
            -(-least // step) * step,
            most // step * step,
        )
    return Bound(
        index,
        min(low, index.bounds[0]) if low <= least else low,
        max(last, index.bounds[1] if last >= most else last) + 1,
    )


def stretches(found: Points, axis: Axis, width: int, program: Program) -> list[Stretch]:
    """Those loads of `found` that are two or more elements of one access, where `axis` is at a multiple of `width`."""
    together: dict[tuple[str, DType, Index, int, tuple[Bound, ...], Const | None], dict[int, Expr]] = {}
    for node, load, mask, other in _elements(found):
        size = ACCESS // load.dtype.nbytes
        rest = load.index - load.index.constant
        if axis in rest.axes and size > 1 and alignment(rest, axis, width) % size == 0:
            place = load.index.constant % size
            key = (load.buffer, load.dtype, load.index - place, size, mask, other)
            together.setdefault(key, {})[place] = node
    made = (
        Stretch(*key, elements=tuple(sorted(places.items(), key=lambda each: each[0])))
        for key, places in together.items()
    )
    return [each for each in made if len(each.elements) > 1 and _is_whole(each, program)]


def _is_whole(stretch: Stretch, program: Program) -> bool:
    """Whether all of an access lies in its buffer where one of its elements does."""
    return len(stretch.elements) == stretch.size or program.buffer(stretch.buffer).extent % stretch.size == 0


def _elements(found: Points) -> Iterator[tuple[Expr, Load, tuple[Bound, ...], Const | None]]:
    """Values that are loads, or loads under a mask with a number elsewhere, and are always needed."""
    for node in descend(chain(*found), lambda node: (node.other,) if isinstance(node, Masked) else children(node)):
        match node:
            case Load():
                yield node, node, (), None
            case Masked(mask, Load() as load, Const() as other, _):
                yield node, load, mask, other
