"""Padding with a number, or with elements that are repeated or mirrored; the windows of a padded image, side by side.

PyTorch has decompositions of the latter, but running one imports SymPy, and theirs look indices up in tensors made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fusepass.codegen.ir.expr import Expr, Op
from fusepass.codegen.ir.index import Bound, Index
from fusepass.codegen.lowering.gathers import PLACE, Lookup, gathered
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Coordinates, Tensor

aten = torch.ops.aten


@lowers(aten.constant_pad_nd.default)
def _constant_pad(call: Call, a: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    context, rank = call.context, len(a.shape)
    before = [0] * rank
    for number in range(len(pad) // 2):
        before[rank - 1 - number] = pad[2 * number]
    fill = context.constant(value, (), a.dtype).at(())

    def at(c: Coordinates) -> Expr:
        inner = tuple(i - low for i, low in zip(c, before, strict=True))
        mask = tuple(Bound(i, 0, size) for i, size in zip(inner, a.shape, strict=True))
        return context.builder.masked(mask, a.at(inner), fill)

    return context.tensor(call.value.shape, a.dtype, at, windowed=a.windowed)


@lowers(aten.im2col.default)
def _im2col(
    call: Call, a: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """A column for each position of a window, which has the window's elements, channel by channel."""
    context, size = call.context, a.shape[-2:]
    fill = context.constant(0, (), a.dtype).at(())
    wide = (size[1] + 2 * padding[1] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1

    def at(c: Coordinates) -> Expr:
        element, position = c[-2:]
        tap = (element // kernel[1]) % kernel[0], element % kernel[1]
        place = position // wide, position % wide
        inner = tuple(place[d] * stride[d] + tap[d] * dilation[d] - padding[d] for d in range(2))
        mask = tuple(Bound(inner[d], 0, size[d]) for d in range(2))
        channel = element // (kernel[0] * kernel[1])
        return context.builder.masked(mask, a.at((*c[:-2], channel, *inner)), fill)

    return context.tensor(call.value.shape, a.dtype, at, windowed=a.windowed)


def _padded(call: Call, a: Tensor, padding: Sequence[int], within: Callable[[Expr, int], Expr]) -> Tensor:
    """`a` with the last dimensions padded; ``within(place, size)`` brings a place beside the dimension back into it."""
    rank = len(a.shape)
    before = {rank - 1 - number: low for number, low in enumerate(padding[::2])}

    def lookups(c: Coordinates) -> tuple[Coordinates, Mapping[int, Lookup]]:
        found = {}
        for dim, low in before.items():
            place = within(call.context.builder.position(c[dim] - low, PLACE), a.shape[dim])
            found[dim] = Lookup(place, a.shape[dim], checked=False)
        return tuple(Index() if dim in found else index for dim, index in enumerate(c)), found

    return gathered(call, a, call.value.shape, lookups)


@lowers(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def _reflection_pad(call: Call, a: Tensor, padding: Sequence[int]) -> Tensor:
    builder = call.context.builder

    def mirrored(place: Expr, size: int) -> Expr:
        last = builder.const(size - 1, PLACE)
        behind = builder.apply(Op.SUB, last, builder.apply(Op.ABS, place))
        return builder.apply(Op.SUB, last, builder.apply(Op.ABS, behind))

    return _padded(call, a, padding, mirrored)


@lowers(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def _replication_pad(call: Call, a: Tensor, padding: Sequence[int]) -> Tensor:
    builder = call.context.builder

    def nearest(place: Expr, size: int) -> Expr:
        inside = builder.apply(Op.MAXIMUM, place, builder.const(0, PLACE))
        return builder.apply(Op.MINIMUM, inside, builder.const(size - 1, PLACE))

    return _padded(call, a, padding, nearest)
