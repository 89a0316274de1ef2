"""What writing to a view leaves behind: one tensor's elements in some places of another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusepass.codegen.ir.expr import Expr
from fusepass.codegen.ir.index import Bound
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Coordinates, Tensor

aten = torch.ops.aten


@lowers(aten.slice_scatter.default)
def _slice_scatter(
    call: Call, a: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    axis = dim % len(a.shape)
    first, stop, _ = slice(start, end, step).indices(a.shape[axis])

    def to_source(c: Coordinates) -> Coordinates:
        return (*c[:axis], (c[axis] - first) // step, *c[axis + 1 :])

    def inside(c: Coordinates) -> tuple[Bound, ...]:
        between = Bound(c[axis], first, stop)
        return (between,) if step == 1 else (between, Bound((c[axis] - first) % step, 0, 1))

    return _written(call, a, source, inside, to_source)


@lowers(aten.select_scatter.default)
def _select_scatter(call: Call, a: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    axis = dim % len(a.shape)
    place = index % a.shape[axis]
    return _written(
        call, a, source, lambda c: (Bound(c[axis], place, place + 1),), lambda c: (*c[:axis], *c[axis + 1 :])
    )


@lowers(aten.diagonal_scatter.default)
def _diagonal_scatter(call: Call, a: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    first, second = dim1 % len(a.shape), dim2 % len(a.shape)

    def to_source(c: Coordinates) -> Coordinates:
        others = tuple(index for axis, index in enumerate(c) if axis not in (first, second))
        return (*others, c[first] if offset >= 0 else c[second])

    return _written(call, a, source, lambda c: (Bound(c[second] - c[first], offset, offset + 1),), to_source)


def _written(
    call: Call,
    a: Tensor,
    source: Tensor,
    inside: Callable[[Coordinates], tuple[Bound, ...]],
    to_source: Callable[[Coordinates], Coordinates],
) -> Tensor:
    """`a` with `source` in the places where the bounds ``inside(coordinates)`` hold."""
    context = call.context
    typed = context.cast(source, a.dtype)

    def at(c: Coordinates) -> Expr:
        return context.builder.masked(inside(c), typed.at(to_source(c)), a.at(c))

    return context.tensor(a.shape, a.dtype, at, windowed=a.windowed or source.windowed)
