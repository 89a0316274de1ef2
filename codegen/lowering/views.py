"""Operators that only move elements: views, padding, concatenation, as functions on coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from math import prod
from typing import Any

import torch

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, Op, Window, walk
from fusepass.codegen.ir.index import Index, contiguous_strides, delinearize, linear
from fusepass.codegen.lowering.joined import Piece, chosen
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import WORK_OF_A_BYTE, Coordinates, Tensor, Unsupported, dtype_of

aten, prims = torch.ops.aten, torch.ops.prims

_POINT = 4  # instructions of a point of a window, about
_MOST_NODES = 300  # of which an element of a concatenation is made


def _moved(call: Call, a: Tensor, to_source: Any) -> Tensor:
    """`a` read at ``to_source(coordinates)``, with the shape PyTorch gave the result."""
    return call.context.tensor(call.value.shape, a.dtype, lambda c: a.at(to_source(c)), windowed=a.windowed)


@lowers(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, prims.squeeze.default, aten.flatten.using_ints,
    prims.reshape.default, prims.split_dim.default, prims.collapse_view.default,
)  # fmt: skip
def _reshape(call: Call, a: Tensor, *unused: Any) -> Tensor:
    return call.context.reshape(a, call.value.shape)


@lowers(aten.permute.default, prims.transpose.default)
def _permute(call: Call, a: Tensor, dims: Sequence[int]) -> Tensor:
    order = [dim % len(dims) for dim in dims]
    return _moved(call, a, lambda c: tuple(c[order.index(d)] for d in range(len(order))))


@lowers(aten.t.default, aten.transpose.int)
def _transpose(call: Call, a: Tensor, first: int = 0, second: int = 1) -> Tensor:
    rank = len(a.shape)
    if rank < 2:
        return a
    order = list(range(rank))
    order[first % rank], order[second % rank] = order[second % rank], order[first % rank]
    return _moved(call, a, lambda c: tuple(c[d] for d in order))


@lowers(aten.expand.default)
def _expand(call: Call, a: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
    return _broadcast(call, a)


@lowers(aten.copy.default)
def _copy(call: Call, a: Tensor, source: Tensor, *unused: Any) -> Tensor:
    return _broadcast(call, call.context.cast(source, a.dtype))


def _broadcast(call: Call, a: Tensor) -> Tensor:
    skipped = len(call.value.shape) - len(a.shape)
    return _moved(call, a, lambda c: _drop_broadcast(c[skipped:], a.shape))


@lowers(prims.broadcast_in_dim.default)
def _broadcast_in_dim(call: Call, a: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    return _moved(call, a, lambda c: _drop_broadcast(tuple(c[d] for d in dims), a.shape))


def _drop_broadcast(coordinates: Coordinates, shape: Sequence[int]) -> Coordinates:
    return tuple(Index() if size == 1 else c for c, size in zip(coordinates, shape, strict=True))


@lowers(aten.slice.Tensor)
def _slice(
    call: Call, a: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    axis = dim % len(a.shape)
    first = slice(start, end, step).indices(a.shape[axis])[0]
    return _moved(call, a, lambda c: (*c[:axis], c[axis] * step + first, *c[axis + 1 :]))


@lowers(aten.select.int)
def _select(call: Call, a: Tensor, dim: int, index: int) -> Tensor:
    axis = dim % len(a.shape)
    at = Index(index % a.shape[axis])
    return _moved(call, a, lambda c: (*c[:axis], at, *c[axis:]))


@lowers(aten.flip.default, prims.rev.default)
def _flip(call: Call, a: Tensor, dims: Sequence[int]) -> Tensor:
    flipped = {dim % max(len(a.shape), 1) for dim in dims}
    return _moved(call, a, lambda c: tuple(i * -1 + (a.shape[d] - 1) if d in flipped else i for d, i in enumerate(c)))


@lowers(aten.roll.default)
def _roll(call: Call, a: Tensor, shifts: Sequence[int] | int, dims: Sequence[int] | int = ()) -> Tensor:
    moves = [shifts] if isinstance(shifts, int) else list(shifts)
    axes = [dims] if isinstance(dims, int) else [dim % len(a.shape) for dim in dims]
    flat = a if axes else call.context.reshape(a, (a.numel,))
    by = [0] * len(flat.shape)
    for axis, move in zip(axes or [0], moves, strict=True):
        by[axis] += move
    steps = [-move % max(size, 1) for move, size in zip(by, flat.shape, strict=True)]

    def at(c: Coordinates) -> Expr:
        return flat.at(tuple((i + step) % max(n, 1) for i, step, n in zip(c, steps, flat.shape, strict=True)))

    rolled = call.context.tensor(flat.shape, a.dtype, at, windowed=a.windowed)
    return call.context.reshape(rolled, a.shape)


@lowers(
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
)  # fmt: skip
def _split(call: Call, a: Tensor, unused: Any, dim: int = 0) -> tuple[Tensor, ...]:
    axis = dim % len(a.shape)
    shapes = [tuple(part.shape) for part in call.node.meta["val"]]
    starts = accumulate((shape[axis] for shape in shapes), initial=0)
    return tuple(_narrowed(call, a, axis, start, shape) for start, shape in zip(starts, shapes, strict=False))


def _narrowed(call: Call, a: Tensor, axis: int, start: int, shape: tuple[int, ...]) -> Tensor:
    def at(c: Coordinates) -> Expr:
        return a.at((*c[:axis], c[axis] + start, *c[axis + 1 :]))

    return call.context.tensor(shape, a.dtype, at, windowed=a.windowed)


@lowers(aten.unbind.int)
def _unbind(call: Call, a: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    axis = dim % len(a.shape)

    def selected(place: int) -> Tensor:
        return _moved(call, a, lambda c: (*c[:axis], Index(place), *c[axis:]))

    return tuple(map(selected, range(a.shape[axis])))


@lowers(aten.unfold.default)
def _unfold(call: Call, a: Tensor, dim: int, size: int, step: int) -> Tensor:
    if not a.shape:
        raise Unsupported("windows over a number")
    axis = dim % len(a.shape)
    return _moved(call, a, lambda c: (*c[:axis], c[axis] * step + c[-1], *c[axis + 1 : -1]))


@lowers(aten.as_strided.default)
def _as_strided(call: Call, a: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """PyTorch spells some reshapes this way. A place in memory is a coordinate again where `a` fills its memory."""
    viewed: Any = call.node.args[0]
    source = viewed.meta["val"]
    base = source.storage_offset()
    dims = sorted((d for d, n in enumerate(a.shape) if n != 1), key=lambda d: -source.stride(d))
    shape = [a.shape[d] for d in dims]
    if [source.stride(d) for d in dims] != list(contiguous_strides(shape)):
        raise Unsupported("as_strided of a tensor whose memory has gaps")
    first = (base if offset is None else offset) - base
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if first < 0 or last >= max(a.numel, 1):
        raise Unsupported("as_strided beyond the memory of its tensor")

    def at(c: Coordinates) -> Expr:
        found = dict(zip(dims, delinearize(linear(c, stride, first), shape), strict=True))
        return a.at(tuple(found.get(d, Index()) for d in range(len(a.shape))))

    return call.context.tensor(size, a.dtype, at, windowed=a.windowed)


@lowers(aten.cat.default, prims.cat.default)
def _cat(call: Call, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _joined(call, tensors, dim)


def _joined(call: Call, tensors: Sequence[Tensor], dim: int) -> Tensor:
    context, value = call.context, call.value
    axis = dim % len(value.shape)
    parts = [part for part in tensors if len(part.shape) == len(value.shape)]
    parts = [part for part in parts if part.shape[axis]] or parts[:1]
    target = _result_dtype(call)
    typed = [context.cast(part, target) for part in parts]
    if len(typed) > 1:
        typed = [_apart(call, part) for part in typed]

    def within(part: Tensor, c: Coordinates, start: int) -> Expr:
        # Of one element it is the first: an index that no longer depends on where the part begins lies in memory like the others.
        place = c[axis] - start if part.shape[axis] > 1 else Index()
        return context.kept(part).at((*c[:axis], place, *c[axis + 1 :]))

    starts = [*accumulate((part.shape[axis] for part in typed), initial=0)]
    ranges = [*zip(starts, starts[1:], typed, strict=False)]

    def chosen_at(c: Coordinates) -> Expr:
        # Pieces of pieces would be without number, if those were looked at that a slice leaves out.
        low, high = c[axis].bounds
        reached = [each for each in ranges if each[0] <= high and low < each[1]] or ranges[:1]
        pieces = [Piece(start, within(part, c, start)) for start, _, part in reached]
        return chosen(context.builder, c[axis], pieces)

    def at(c: Coordinates) -> Expr:
        # What reads this at several places has all parts at each of them. Where such results are parts of the next concatenation, the
        # text would grow by a factor with each: then parts are computed once.
        element = chosen_at(c)
        if next(islice(walk(element), _MOST_NODES, None), None) is None:
            return element
        for part in typed:
            context.keep(part, f"{call.origin}_part", call.origin)
        return chosen_at(c)

    return context.tensor(value.shape, target, at, windowed=any(part.windowed for part in typed))


def _apart(call: Call, part: Tensor) -> Tensor:
    """`part`, in memory of its own where it looks at so many points that a kernel for it alone, whose threads share what they load, takes
    less than writing and reading it does."""
    if not part.windowed:
        return part
    windows = [node for node in walk(part.element) if isinstance(node, Window)]
    points = max((prod(axis.size for axis in node.axes) for node in windows), default=0)
    if points * _POINT <= 2 * WORK_OF_A_BYTE * part.dtype.nbytes:
        return part
    return call.context.materialize(part, f"{call.origin}_part", call.origin)


@lowers(aten.stack.default)
def _stack(call: Call, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = call.value.shape
    axis = dim % len(shape)
    return _joined(call, [call.context.reshape(part, (*shape[:axis], 1, *shape[axis + 1 :])) for part in tensors], axis)


@lowers(aten.tril.default, aten.triu.default)
def _triangle(call: Call, a: Tensor, diagonal: int = 0) -> Tensor:
    context, builder, compute = call.context, call.context.builder, a.dtype.compute
    op, limit = (Op.LE if call.origin == "tril" else Op.GE), builder.const(diagonal, DType.I64)
    zero = builder.const(0, compute)

    def at(c: Coordinates) -> Expr:
        inside = builder.apply(op, builder.position(c[-1] - c[-2]), limit, dtype=DType.BOOL)
        return builder.apply(Op.WHERE, inside, a.at(c), zero, dtype=compute)

    return context.tensor(a.shape, a.dtype, at, windowed=a.windowed)


@lowers(aten.repeat.default)
def _repeat(call: Call, a: Tensor, repeats: Sequence[int]) -> Tensor:
    skipped = len(call.value.shape) - len(a.shape)
    return _moved(call, a, lambda c: tuple(i % max(n, 1) for i, n in zip(c[skipped:], a.shape, strict=True)))


@lowers(aten.pixel_shuffle.default)
def _pixel_shuffle(call: Call, a: Tensor, factor: int) -> Tensor:
    def to_source(c: Coordinates) -> Coordinates:
        channel, y, x = c[-3:]
        return (*c[:-3], channel * factor**2 + (y % factor) * factor + x % factor, y // factor, x // factor)

    return _moved(call, a, to_source)


@lowers(aten.pixel_unshuffle.default)
def _pixel_unshuffle(call: Call, a: Tensor, factor: int) -> Tensor:
    def to_source(c: Coordinates) -> Coordinates:
        channel, y, x = c[-3:]
        within = channel % factor**2
        return (*c[:-3], channel // factor**2, y * factor + within // factor, x * factor + within % factor)

    return _moved(call, a, to_source)


def _result_dtype(call: Call) -> DType:
    return dtype_of(call.value.dtype)
