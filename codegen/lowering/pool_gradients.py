"""Gradients of pooling, of nearest upsampling and of what takes windows apart: an element of the input gathers from the windows that cover it.

A scatter, as PyTorch does it, would need a place for each sum; here the windows over an element are a window
themselves, with bounds that say which of its taps count. So every element is written once, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Bound, Index, contiguous_strides, linear
from fusepass.codegen.lowering.pooling import Slide, adaptive, counts, ints, once, pool, strided
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Coordinates, Tensor, Unsupported

aten = torch.ops.aten


def _covering(size: int, outputs: int, stride: int, padding: int, dilation: int = 1) -> Slide:
    """The windows of `size` taps over an element, in order; where they are dilated, some that pass over it too."""
    span = dilation * (size - 1) + 1
    last = -(-span // stride) - 1

    def position(i: Index, tap: Index) -> Index:
        return (i + padding) // stride + tap - last

    def bounds(i: Index, tap: Index) -> tuple[Bound, ...]:
        within = (i + padding) % stride + (tap * -stride + last * stride)
        return Bound(position(i, tap), 0, outputs), Bound(within, 0, span)

    return Slide(last + 1, position, bounds)


def _adaptive_covering(extent: int, outputs: int) -> Slide:
    """The adaptive windows over an element, from the first that ends behind it."""
    most = max(
        sum((o * extent) // outputs <= i < -(-(o + 1) * extent // outputs) for o in range(outputs))
        for i in range(extent)
    )

    def position(i: Index, tap: Index) -> Index:
        return (i * outputs) // extent + tap

    def bounds(i: Index, tap: Index) -> tuple[Bound, ...]:
        o = position(i, tap)
        return Bound(o, 0, outputs), Bound(i - (o * extent) // outputs, 0, extent)

    return Slide(most, position, bounds)


def _shared(call: Call, gradient: Tensor, like: Tensor, windows: Sequence[Slide], covering: Sequence[Slide]) -> Tensor:
    """The gradient of means: each window's own, divided by its elements, summed over the windows that cover an element."""
    shares = call.context.pointwise(Op.DIV, (gradient, counts(call, windows, gradient.shape)), like.dtype)
    return pool(call, once(call, shares, covering), ReduceOp.SUM, covering)


@lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _avg_pool(
    call: Call, gradient: Tensor, a: Tensor, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Tensor:  # fmt: skip
    rank = int(call.origin[len("avg_pool")])
    size = ints(kernel_size, rank)
    steps, pads = ints(stride, rank, size), ints(padding, rank)
    geometry = list(zip(size, a.shape[-rank:], gradient.shape[-rank:], steps, pads, strict=True))
    covering = [_covering(k, o, s, p) for k, _, o, s, p in geometry]
    if divisor_override is not None:
        divisor = call.context.constant(divisor_override, (), a.dtype)
        shares = call.context.pointwise(Op.DIV, (gradient, divisor), a.dtype)
        return pool(call, once(call, shares, covering), ReduceOp.SUM, covering)
    windows = [strided(k, e, s, p, 1, clip=p if count_include_pad else 0) for k, e, _, s, p in geometry]
    return _shared(call, gradient, a, windows, covering)


@lowers(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def _adaptive_avg_pool(call: Call, gradient: Tensor, a: Tensor) -> Tensor:
    rank = int(call.origin[len("_adaptive_avg_pool")])
    pairs = list(zip(a.shape[-rank:], gradient.shape[-rank:], strict=True))
    covering = [_adaptive_covering(extent, out) for extent, out in pairs]
    return _shared(call, gradient, a, [adaptive(extent, out) for extent, out in pairs], covering)


@lowers(aten.max_pool2d_with_indices_backward.default)
def _max_pool(
    call: Call, gradient: Tensor, a: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, indices: Tensor,
) -> Tensor:  # fmt: skip
    """A window gives its gradient to the element that its index names: the place in the last two dimensions."""
    context, builder = call.context, call.context.builder
    size = ints(kernel_size, 2)
    steps, pads, holes = ints(stride, 2, size), ints(padding, 2), ints(dilation, 2)
    geometry = zip(size, gradient.shape[-2:], steps, pads, holes, strict=True)
    covering = [_covering(*each) for each in geometry]
    typed = context.cast(gradient, a.dtype)
    zero = builder.const(0, a.dtype.compute)

    def towards(c: Coordinates, windows: Coordinates) -> Expr:
        place = builder.position(linear(c[-2:], contiguous_strides(a.shape[-2:])))
        chosen = builder.apply(Op.EQ, indices.at(windows), place, dtype=DType.BOOL)
        return builder.apply(Op.WHERE, chosen, typed.at(windows), zero, dtype=a.dtype.compute)

    return pool(call, once(call, typed, covering), ReduceOp.SUM, covering, of=towards)


@lowers(aten.col2im.default)
def _col2im(
    call: Call,
    a: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """Each element of an image is the sum of what the windows that cover it have of it: along a dimension these are neighbours."""
    if any(gap > 1 and taps > 1 for gap, taps in zip(dilation, kernel, strict=True)):
        raise Unsupported("windows with gaps")
    windows = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(size, padding, kernel, stride, strict=True)]

    def of(c: Coordinates, inner: Coordinates) -> Expr:
        y, x = (
            (at + p) % s + ((at + p) // s - window) * s
            for at, p, window, s in zip(c[-2:], padding, inner[-2:], stride, strict=True)
        )
        element = (c[-3] * kernel[0] + y) * kernel[1] + x
        return a.at((*c[:-3], element, inner[-2] * windows[1] + inner[-1]))

    covering = [_covering(*each) for each in zip(kernel, windows, stride, padding, strict=True)]
    return pool(call, a, ReduceOp.SUM, covering, of)


@lowers(
    aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default, aten._upsample_nearest_exact3d_backward.default,
)  # fmt: skip
def _nearest(
    call: Call, gradient: Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
) -> Tensor:
    before, after = input_size[2:], gradient.shape[2:]
    factors = [out // max(size, 1) for out, size in zip(after, before, strict=True)]
    whole = all(size * factor == out for size, factor, out in zip(before, factors, after, strict=True))
    given = all(scale in (None, factor) for scale, factor in zip(scales, factors, strict=False))
    if not (whole and given):
        raise Unsupported("the gradient of upsampling by a factor that is not whole")
    slides = [strided(factor, out, factor, 0, 1, clip=0) for factor, out in zip(factors, after, strict=True)]
    return pool(call, once(call, gradient, slides), ReduceOp.SUM, slides)
