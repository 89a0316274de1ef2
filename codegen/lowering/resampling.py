"""Upsampling: elements at places computed from the position of the result.

PyTorch has decompositions, but running one imports SymPy, and theirs look indices up in tensors made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from math import floor
from typing import Any

import torch
from torch import fx

from fusepass.codegen.ir.expr import Apply, Expr, Load, Op, walk
from fusepass.codegen.ir.index import Index
from fusepass.codegen.lowering.gathers import PLACE, Lookup, gathered
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Context, Coordinates, Tensor, Unsupported, domain

aten = torch.ops.aten

NEAREST = (
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
    aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec,
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default, aten._upsample_nearest_exact1d.vec,
    aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact3d.vec,
)  # fmt: skip
"""Upsampling that repeats elements."""


def _number(context: Context, value: int) -> Expr:
    return context.builder.const(value, PLACE)


@lowers(*NEAREST)
def _nearest(call: Call, a: Tensor, *size_and_scales: Any) -> Tensor:
    """Elements at places that are quotients of whole numbers: the result is read like a view."""
    slopes, exact = nearest_slopes(call.node), "exact" in call.origin
    if slopes is None:
        raise Unsupported("upsampling to places that depend on rounding")
    source = call.context.materialize(a, f"{call.origin}_input", call.origin) if a.windowed else a

    def place(i: Index, slope: Fraction) -> Index:
        step, parts = slope.numerator, slope.denominator
        return (i * (2 * step) + step) // (2 * parts) if exact else (i * step) // parts

    def at(c: Coordinates) -> Expr:
        return source.at((*c[:2], *(place(i, slope) for i, slope in zip(c[2:], slopes, strict=True))))

    return call.context.tensor(call.value.shape, a.dtype, at)


def nearest_slopes(node: fx.Node) -> list[Fraction] | None:
    """How far apart in its input neighbours of a nearest upsampling's result lie, for each dimension.

    Element i is that at ``floor(i * slope)``, of the exact kind ``floor((i + 1/2) * slope)``. None where no fraction gives
    eager's places: its kernels multiply in float32 or float64, and differ where rounding decides.
    """
    before, after = node.args[0].meta["val"].shape[2:], node.meta["val"].shape[2:]  # type: ignore[union-attr]
    scales, exact = _scales(node, len(after), node.args[2:]), "exact" in str(node.target)
    slopes = [_slope(*each, exact) for each in zip(before, after, scales, strict=True)]
    known = [slope for slope in slopes if slope is not None]
    return known if len(known) == len(slopes) else None


def _slope(before: int, after: int, scale: float | None, exact: bool) -> Fraction | None:
    step = 1 / scale if scale else before / max(after, 1)
    slope = Fraction(step).limit_denominator(4 * max(after, 1)) if scale else Fraction(before, max(after, 1))
    half = Fraction(exact, 2)
    places = [floor((i + half) * slope) for i in range(after)]
    if any(after == factor * before and places != [i // factor for i in range(after)] for factor in (1, 2)):
        return None  # some kernels go by the sizes here, others by the factor
    for dtype in (torch.float32, torch.float64):
        numbers, factor = torch.arange(after, dtype=dtype), torch.tensor(step, dtype=dtype)
        at = (numbers + float(half)) * factor
        forms = (at, at - float(half) + float(half))  # the two that eager's kernels have
        if any(form.floor().clamp(max=before - 1).tolist() != places for form in forms):
            return None
    return slope


Taps = Sequence[tuple[Expr, Expr]]
"""Elements along a dimension that make one of the result: (place, weight)."""


@lowers(
    aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default,
    aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec,
)  # fmt: skip
def _linear(call: Call, a: Tensor, size: Any, align_corners: bool, *scales: Any) -> Tensor:
    """Between the two neighbours along each dimension, by the distance to them; PyTorch's own arithmetic."""
    builder, number = call.context.builder, _numbers(call, a)

    def taps(at: Expr, extent: int) -> Taps:
        at = at if align_corners else builder.apply(Op.MAXIMUM, at, number(0.0))
        last, one = _number(call.context, extent - 1), _number(call.context, 1)
        low = builder.apply(Op.MINIMUM, builder.cast(at, PLACE), last)
        high = builder.apply(Op.MINIMUM, builder.apply(Op.ADD, low, one), last)
        weight = builder.apply(Op.SUB, at, builder.cast(low, a.dtype.compute))
        weight = builder.apply(Op.MINIMUM, weight, number(1.0))
        return (low, builder.apply(Op.SUB, number(1.0), weight)), (high, weight)

    return _interpolated(call, a, align_corners, scales, taps)


@lowers(aten.upsample_bicubic2d.default, aten.upsample_bicubic2d.vec)
def _cubic(call: Call, a: Tensor, size: Any, align_corners: bool, *scales: Any) -> Tensor:
    """Of four neighbours along each dimension, by Keys' kernel with PyTorch's A = -0.75.

    Keys, "Cubic convolution interpolation for digital image processing", 1981. With t, the distance to the second
    neighbour, and s = 1 - t the weights are A t s^2, (A + 2) t^3 - (A + 3) t^2 + 1, and both again with t and s exchanged:
    factors in place of PyTorch's polynomials of t + 1 and 2 - t, whose terms cancel.
    """
    builder, number, sharpness = call.context.builder, _numbers(call, a), -0.75

    def product(*factors: Expr) -> Expr:
        return reduce(lambda x, y: builder.apply(Op.MUL, x, y), factors)

    def inner(t: Expr) -> Expr:
        slope = builder.apply(Op.SUB, product(number(sharpness + 2), t), number(sharpness + 3))
        return builder.apply(Op.ADD, product(slope, t, t), number(1.0))

    def taps(at: Expr, extent: int) -> Taps:
        floor_ = builder.apply(Op.FLOOR, at)
        t = builder.apply(Op.MAXIMUM, builder.apply(Op.SUB, at, floor_), number(0.0))
        t = builder.apply(Op.MINIMUM, t, number(1.0))
        s = builder.apply(Op.SUB, number(1.0), t)
        weights = product(number(sharpness), t, s, s), inner(t), inner(s), product(number(sharpness), s, t, t)
        first, none, last = builder.cast(floor_, PLACE), _number(call.context, 0), _number(call.context, extent - 1)
        places = [builder.apply(Op.ADD, first, _number(call.context, offset)) for offset in (-1, 0, 1, 2)]
        inside = [builder.apply(Op.MINIMUM, builder.apply(Op.MAXIMUM, place, none), last) for place in places]
        return tuple(zip(inside, weights, strict=True))

    return _interpolated(call, a, align_corners, scales, taps)


def _numbers(call: Call, a: Tensor) -> Callable[[float], Expr]:
    """Constants of the type that elements of `a` are computed in."""
    return lambda value: call.context.builder.const(value, a.dtype.compute)


def _interpolated(
    call: Call, a: Tensor, align_corners: bool, scales: Sequence[Any], taps: Callable[[Expr, int], Taps]
) -> Tensor:
    """Sums of elements times weights, along one dimension after the other.

    ``taps(at, extent)`` gives them for `at`, a place between elements of the input, and the dimension's size there.
    """
    if not a.dtype.is_float:
        raise Unsupported("upsampling of integers")
    context, builder, number = call.context, call.context.builder, _numbers(call, a)
    rank, shape = len(a.shape) - 2, call.value.shape
    given = _scales(call.node, rank, scales)
    sizes = list(zip(a.shape[2:], shape[2:], given, strict=True))
    steps = [_step(before, after, scale, align_corners) for before, after, scale in sizes]
    source = a if _loaded(a) else context.materialize(a, f"{call.origin}_input", call.origin)

    def between(i: Index, step: float) -> Expr:
        at = builder.cast(builder.position(i, PLACE), a.dtype.compute)
        if align_corners:
            return builder.apply(Op.MUL, at, number(step))
        centre = builder.apply(Op.MUL, builder.apply(Op.ADD, at, number(0.5)), number(step))
        return builder.apply(Op.SUB, centre, number(0.5))

    def corner(places: Sequence[Expr]) -> Tensor:
        found = {
            dim: Lookup(place, extent, checked=False)
            for dim, (place, extent) in enumerate(zip(places, a.shape[2:], strict=True), 2)
        }
        return gathered(call, source, shape, lambda c: ((*c[:2], *(Index(),) * rank), found))

    def at(c: Coordinates) -> Expr:
        found = [taps(between(i, step), e) for i, e, step in zip(c[2:], a.shape[2:], steps, strict=True)]

        def summed(places: tuple[Expr, ...]) -> Expr:
            if len(places) == rank:
                return corner(places).at(c)
            parts = [builder.apply(Op.MUL, weight, summed((*places, place))) for place, weight in found[len(places)]]
            return reduce(lambda x, y: builder.apply(Op.ADD, x, y), parts)

        return summed(())

    return context.tensor(shape, a.dtype, at, windowed=True)


def _scales(node: fx.Node, rank: int, scales: Sequence[Any]) -> Sequence[float | None]:
    """The factors that the caller of an upsampling gave, one per dimension, of its last arguments."""
    if node.target._overloadname == "vec":  # type: ignore[union-attr]
        scales = scales[0] or () if scales else ()
    return (*scales, *(None,) * (rank - len(scales)))


def _step(before: int, after: int, scale: float | None, align_corners: bool) -> float:
    """How far apart in the input neighbours of the result lie."""
    if align_corners:
        return (before - 1) / (after - 1) if after > 1 else 0.0
    return 1 / scale if scale else before / after


def _loaded(a: Tensor) -> bool:
    """Whether an element of `a` is one of memory: reading it several times computes nothing again."""
    nodes = walk(a.at(tuple(Index(0, ((axis, 1),)) for axis in domain(a.shape)[: len(a.shape)])))
    return not a.windowed and all(
        isinstance(node, Load) or (isinstance(node, Apply) and node.op is Op.CAST) for node in nodes
    )
