"""Operators whose elements stand at places that come from data: embedding, gather, indexing with tensors.

A place outside its dimension is an error in eager. A kernel for a CPU reports it, and the original operators run and
raise; on a GPU both end in an assertion. An element that nobody uses is not looked for, nor is an error in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import (
    Apply,
    Const,
    Expr,
    Gather,
    Load,
    Masked,
    Op,
    Place,
    known_inside,
    own_indices,
    walk,
)
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import (
    Context,
    Coordinates,
    Tensor,
    Unsupported,
    broadcast,
    broadcast_shape,
    points,
)

aten = torch.ops.aten

PLACE = DType.I32
"""The type of places that are computed from positions: half as wide as PyTorch's, so that twice as many fit a vector."""


@dataclass(frozen=True)
class Lookup:
    """Where along a dimension of `size` elements to read: an int64 expression, which `checked` ones may leave."""

    place: Expr
    size: int
    checked: bool = True

    @property
    def known(self) -> Index | None:
        """The place where that only depends on where the element stands, and lies inside: it needs no looking up."""
        return known_inside(self.place, self.size)


Looked = tuple[Coordinates, Mapping[int, Lookup]]
"""Coordinates, of which some dimensions have none but are looked up."""

Lookups = Callable[[Coordinates], Looked]


def gathered(call: Call, a: Tensor, shape: Sequence[int], lookups: Lookups) -> Tensor:
    """A tensor of `shape` whose elements are elements of `a`.

    Args:
        lookups: gives, for coordinates in the result, coordinates in `a` (any in the dimensions looked up), and
            the looked-up dimensions with their places.
    """
    context = call.context
    if not a.windowed and not _told(lookups(points(shape)))[1]:
        return context.tensor(shape, a.dtype, lambda c: _known_element(context, a, shape, lookups, c))
    source = a if _movable(a) else context.materialize(a, f"{call.origin}_table", call.origin)
    axes = context.axes(source.shape)

    def at(c: Coordinates) -> Expr:
        fixed, found = _told(lookups(c))
        # Of coordinates that may leave the source, quotients by its sizes would be left.
        inside = source.at(tuple(map(axis_index, axes)))
        value = context.builder.rewrite(inside, {axis: fixed[d] for d, axis in enumerate(axes) if d not in found})
        return _moved(context, value, {axes[d]: lookup for d, lookup in found.items()})

    return context.tensor(shape, a.dtype, at, windowed=a.windowed)


def _known_element(context: Context, a: Tensor, shape: Sequence[int], lookups: Lookups, c: Coordinates) -> Expr:
    """The element at `c` of a tensor of `shape` whose places are all known within it."""
    fixed, left = _told(lookups(c))
    if not left:
        return a.at(fixed)
    # `c` may leave the shape, as in a window, which reads nothing there: elsewhere places are those within it.
    axes = context.axes(shape)
    inside, _ = _told(lookups(tuple(map(axis_index, axes))))
    return context.builder.rewrite(a.at(inside), dict(zip(axes, c, strict=True)))


def _told(looked: Looked) -> Looked:
    """`looked` with known places as coordinates."""
    fixed, found = looked
    known = {d: index for d, lookup in found.items() if (index := lookup.known) is not None}
    rest = {d: lookup for d, lookup in found.items() if d not in known}
    return tuple(known.get(d, at) for d, at in enumerate(fixed)), rest


def _movable(a: Tensor) -> bool:
    """Whether the element at computed places is that of the loads moved there: nothing else depends on where it stands."""
    if a.windowed:
        return False
    nodes = list(walk(a.element))
    plain = all(isinstance(node, Load | Gather | Const | Apply) for node in nodes)
    indices = [index for node in nodes for index in own_indices(node)]
    return plain and bool(indices) and all(isinstance(atom, Axis) for index in indices for atom, _ in index.terms)


def _moved(context: Context, value: Expr, lookups: Mapping[Axis, Lookup]) -> Expr:
    """`value` with the loads in it moved along the axes that are looked up."""
    start = dict.fromkeys(lookups, Index())
    indices = [node.index for node in walk(value) if isinstance(node, Load | Gather)]
    moving = {axis for axis in lookups if any(_stride(index, axis) for index in indices)}

    def places(index: Index) -> tuple[Place, ...]:
        # One of stride 0 moves nothing, and reports a place outside where no other does.
        return tuple(
            Place(found.place, _stride(index, axis), found.size, found.checked)
            for axis, found in lookups.items()
            if _stride(index, axis) or axis not in moving
        )

    def leaf(node: Expr) -> Expr | None:
        match node:
            case Load(buffer, index, dtype):
                at, moved = index.substitute(start), places(index)
                builder = context.builder
                return builder.gather(buffer, at, moved, dtype) if moved else builder.load(buffer, at, dtype)
            case Gather(buffer, index, known, dtype):
                return context.builder.gather(buffer, index.substitute(start), (*known, *places(index)), dtype)
            case Masked(mask) if any(bound.index.axes & lookups.keys() for bound in mask):
                raise AssertionError("what a place decides on is materialised before it is looked up")
            case _:
                return None

    return context.builder.rewrite(value, leaf=leaf)


def _stride(index: Index, axis: Axis) -> int:
    found = index.stride(axis)
    assert found is not None, f"{index} is not linear in a place: its table is materialised"
    return found


def position(context: Context, value: Tensor, c: Coordinates) -> Expr:
    """The element of an integer tensor at `c` as a place."""
    return context.builder.cast(value.at(broadcast(c, value.shape)), DType.I64)


def _from_the_end(context: Context, place: Expr, size: int) -> Expr:
    """`place` where it is not negative, else counted from the end."""
    builder = context.builder
    negative = builder.apply(Op.LT, place, builder.const(0, DType.I64), dtype=DType.BOOL)
    wrapped = builder.apply(Op.ADD, place, builder.const(size, DType.I64), dtype=DType.I64)
    return builder.apply(Op.WHERE, negative, wrapped, place, dtype=DType.I64)


@lowers(aten.embedding.default)
def _embedding(
    call: Call, weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad: bool = False, sparse: bool = False
) -> Tensor:
    def lookups(c: Coordinates) -> Looked:
        return (Index(), c[-1]), {0: Lookup(position(call.context, indices, c[:-1]), weight.shape[0])}

    return gathered(call, weight, call.value.shape, lookups)


@lowers(aten.index_select.default)
def _index_select(call: Call, a: Tensor, dim: int, index: Tensor) -> Tensor:
    source = a if a.shape else call.context.reshape(a, (1,))
    axis = dim % len(source.shape)
    flat = call.context.reshape(index, (index.numel,))

    def lookups(c: Coordinates) -> Looked:
        return c, {axis: Lookup(position(call.context, flat, (c[axis],)), source.shape[axis])}

    shape = (*source.shape[:axis], index.numel, *source.shape[axis + 1 :])
    return call.context.reshape(gathered(call, source, shape, lookups), call.value.shape)


@lowers(aten.gather.default)
def _gather(call: Call, a: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    source = a if a.shape else call.context.reshape(a, (1,))
    chosen = index if index.shape else call.context.reshape(index, (1,))
    axis = dim % len(source.shape)

    def lookups(c: Coordinates) -> Looked:
        return c, {axis: Lookup(position(call.context, chosen, c), source.shape[axis])}

    return call.context.reshape(gathered(call, source, chosen.shape, lookups), call.value.shape)


@lowers(aten.take.default)
def _take(call: Call, a: Tensor, index: Tensor) -> Tensor:
    flat = call.context.reshape(a, (a.numel,))

    def lookups(c: Coordinates) -> Looked:
        place = _from_the_end(call.context, position(call.context, index, c), a.numel)
        return (Index(),), {0: Lookup(place, a.numel)}

    return gathered(call, flat, index.shape, lookups)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call, a: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """The indexed dimensions become those of the indices, broadcast: in their place if they are neighbours, else first."""
    context = call.context
    chosen = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype in (DType.BOOL, DType.U8) for index in chosen.values()):
        raise Unsupported("a choice by truth values, whose size is not known")
    shape = broadcast_shape([index.shape for index in chosen.values()])
    first, last = min(chosen), max(chosen)
    start = first if last - first + 1 == len(chosen) else 0
    kept = [dim for dim in range(len(a.shape)) if dim not in chosen]

    def lookups(c: Coordinates) -> Looked:
        inner = c[start : start + len(shape)]
        rest = iter((*c[:start], *c[start + len(shape) :]))
        fixed = dict(zip(kept, rest, strict=True))
        found = {
            dim: Lookup(_from_the_end(context, position(context, index, inner), a.shape[dim]), a.shape[dim])
            for dim, index in chosen.items()
        }
        return tuple(fixed.get(dim, Index()) for dim in range(len(a.shape))), found

    return gathered(call, a, call.value.shape, lookups)


SCATTERS = (aten.scatter.src, aten.scatter.value, aten.scatter_add.default)


def meet_alone(into: Sequence[int], dim: int, index: Sequence[int]) -> bool:
    """Whether a scatter along `dim` of a tensor of shape `into`, at places of shape `index`, writes one element of each row."""
    along = dim % max(len(into), 1)
    return bool(into) and tuple(index) == (*into[:along], 1, *into[along + 1 :])


@lowers(*SCATTERS)
def _scatter(call: Call, a: Tensor, dim: int, index: Tensor, source: Tensor | float) -> Tensor:
    """Where each row gets one element: every element of the result asks whether it is that one. An index that leaves its row is an error."""
    context, builder, dtype = call.context, call.context.builder, a.dtype.compute
    if not meet_alone(a.shape, dim, index.shape):
        raise Unsupported("several elements may meet in one place")
    axis = dim % len(a.shape)
    value = source if isinstance(source, Tensor) else context.constant(source, (1,) * len(a.shape), a.dtype)

    def looked(c: Coordinates) -> Looked:
        found = Lookup(position(context, index, c), a.shape[axis])
        return c, {
            axis: found
        } if found.known is None else {}  # a place is none of `index`, which has one element there

    place = gathered(call, index, index.shape, looked)

    def at(c: Coordinates) -> Expr:
        row = (*c[:axis], Index(), *c[axis + 1 :])
        hit = builder.apply(Op.EQ, place.at(row), builder.position(c[axis]), dtype=DType.BOOL)
        own, given = a.at(c), builder.cast(value.at(broadcast(row, value.shape)), dtype)
        given = builder.apply(Op.ADD, own, given, dtype=dtype) if call.origin == "scatter_add" else given
        return builder.apply(Op.WHERE, hit, given, own, dtype=dtype)

    return context.tensor(a.shape, a.dtype, at, windowed=a.windowed or value.windowed)


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    call: Call, gradient: Tensor, a: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int,
    total_weight: Tensor,
) -> Tensor:  # fmt: skip
    """The share of each sample stands at its class, with the class's weight; everything else is 0."""
    context, builder = call.context, call.context.builder
    classes, compute = (1 if len(a.shape) > 1 else 0), a.dtype.compute
    share = context.cast(gradient, a.dtype)
    if reduction == 1:
        share = context.pointwise(Op.DIV, (share, context.cast(total_weight, a.dtype)), a.dtype)
    zero, unused = builder.const(0, compute), builder.const(ignored, DType.I64)

    def at(c: Coordinates) -> Expr:
        sample = (*c[:classes], *c[classes + 1 :])
        wanted = position(context, target, sample)
        hit = builder.apply(Op.EQ, wanted, builder.position(c[classes]), dtype=DType.BOOL)
        counts = builder.apply(Op.NE, wanted, unused, dtype=DType.BOOL)
        value = builder.apply(Op.NEG, share.at(broadcast(sample, share.shape)), dtype=compute)
        if weight is not None:
            of_class = builder.cast(weight.at((c[classes],)), compute)
            value = builder.apply(Op.MUL, value, of_class, dtype=compute)
        chosen = builder.apply(Op.AND, hit, counts, dtype=DType.BOOL)
        return builder.apply(Op.WHERE, chosen, value, zero, dtype=compute)

    return context.tensor(a.shape, a.dtype, at)
