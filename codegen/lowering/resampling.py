"""Upsampling, and its gradients: elements at places computed from the position of the result.

PyTorch has decompositions, but running one imports SymPy, and theirs look indices up in tensors made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from math import ceil, floor, prod
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Builder, Expr, Load, Op, ReduceOp, walk
from fusepass.codegen.ir.index import Bound, Index
from fusepass.codegen.lowering.gathers import PLACE, Lookup, gathered
from fusepass.codegen.lowering.pooling import Slide, once, pool
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Context, Coordinates, Tensor, Unsupported

aten = torch.ops.aten

_EXACT = 1 << 23  # to which float32 has whole numbers and halves of them
_MOST_READERS = 1024  # elements of the result that an element's gradient is summed over

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
    with unset_fake_temporarily():  # numbers, and not their shapes alone
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


@dataclass(frozen=True)
class _Tap:
    """An element along a dimension that makes one of the result, at a `place` inside of the input; `raw` is where that would be without an
    end of the input, if arithmetic is exact."""

    place: Expr
    weight: Expr
    raw: Index | None


Taps = Sequence[_Tap]


@dataclass(frozen=True)
class _Dimension:
    """Along which the result's element i lies between elements of the input, at ``(slope * i + start) / parts`` of exact arithmetic.

    Attributes:
        size: of the input.
        fraction, step: how far apart in the input neighbours of the result lie, and the same as PyTorch rounds it.
        corners: whether the first and last elements of both lie at the same places, and not their outer ends.
        exact: slope, start and parts, where PyTorch's arithmetic is exact; parts are a power of two.
    """

    context: Context
    dtype: DType
    size: int
    fraction: Fraction
    step: float
    corners: bool
    exact: tuple[int, int, int] | None

    def number(self, value: float) -> Expr:
        """A constant of the type that is computed in."""
        return self.context.builder.const(value, self.dtype)

    def at(self, i: Index) -> Expr:
        """Where element `i` lies, in PyTorch's own arithmetic."""
        apply = self.context.builder.apply
        at = self.context.builder.cast(self.context.builder.position(i, PLACE), self.dtype)
        if self.corners:
            return apply(Op.MUL, at, self.number(self.step))
        centre = apply(Op.MUL, apply(Op.ADD, at, self.number(0.5)), self.number(self.step))
        return apply(Op.SUB, centre, self.number(0.5))

    def split(self, i: Index) -> tuple[Index, Expr] | None:
        """The element before that place, or at it, and how far it is from there; None where arithmetic is not exact."""
        if self.exact is None:
            return None
        slope, start, parts = self.exact
        builder, place = self.context.builder, i * slope + start
        rest = builder.cast(builder.position(place % parts, PLACE), self.dtype)
        return place // parts, builder.apply(Op.MUL, rest, self.number(1 / parts))

    def readers(self, results: int, reach: int) -> Slide:
        """Those of so many results' elements that lie less than `reach` behind an element of the input, or at most so far before it; where
        arithmetic is not exact, some beside them, too."""
        slope, start, parts = self.exact or _affine(self.fraction.limit_denominator(4 * max(results, 1)), self.corners)
        # Where the step is another one, or rounded, places are not quite where it says.
        off = 0 if self.exact else abs(Fraction(slope, parts) - self.fraction) * results + Fraction(self.size, _EXACT)
        far = ceil((reach + off) * parts)
        if slope * (results - 1) + start >= (self.size - 1) * parts + far:
            raise Unsupported("the gradient of upsampling that goes on behind its input")
        count = -(-2 * far // slope) if slope else results
        every = count >= results

        def position(i: Index, tap: Index) -> Index:
            return tap if every else (i * parts - (far + start - slope + 1)) // slope + tap

        def bounds(i: Index, tap: Index) -> tuple[Bound, ...]:
            o = position(i, tap)
            before = o * -slope + i * parts + (far - start)  # the place, in parts, from `reach` behind the element on
            return Bound(o, 0, results), Bound(before, 1, 2 * far + 1)

        return Slide(min(count, results), position, bounds)


def _linear_taps(along: _Dimension, i: Index) -> Taps:
    """The two neighbours, by the distance to them; PyTorch's own arithmetic."""
    context, builder = along.context, along.context.builder
    last, one = _number(context, along.size - 1), _number(context, 1)
    split = along.split(i)
    raw = None if split is None else split[0]
    if split is not None:
        before, weight = split
        low = builder.position(before, PLACE)
        if before.bounds[0] < 0:  # before the first element there is nothing
            zero = _number(context, 0)
            weight = builder.apply(
                Op.WHERE, builder.apply(Op.LT, low, zero, dtype=DType.BOOL), along.number(0.0), weight
            )
            low = builder.apply(Op.MAXIMUM, low, zero)
    else:
        at = along.at(i) if along.corners else builder.apply(Op.MAXIMUM, along.at(i), along.number(0.0))
        low = builder.apply(Op.MINIMUM, builder.cast(at, PLACE), last)
        weight = builder.apply(Op.SUB, at, builder.cast(low, along.dtype))
        weight = builder.apply(Op.MINIMUM, weight, along.number(1.0))
    high = builder.apply(Op.MINIMUM, builder.apply(Op.ADD, low, one), last)
    rest = builder.apply(Op.SUB, along.number(1.0), weight)
    return _Tap(low, rest, raw), _Tap(high, weight, None if raw is None else raw + 1)


def _cubic_taps(along: _Dimension, i: Index) -> Taps:
    """Four neighbours, by Keys' kernel with PyTorch's A = -0.75.

    Keys, "Cubic convolution interpolation for digital image processing", 1981. With t, the distance to the second
    neighbour, and s = 1 - t the weights are A t s^2, (A + 2) t^3 - (A + 3) t^2 + 1, and both again with t and s exchanged:
    factors in place of PyTorch's polynomials of t + 1 and 2 - t, whose terms cancel.
    """
    context, number, sharpness = along.context, along.number, -0.75
    builder = context.builder

    def product(*factors: Expr) -> Expr:
        return reduce(lambda x, y: builder.apply(Op.MUL, x, y), factors)

    def inner(t: Expr) -> Expr:
        slope = builder.apply(Op.ADD, builder.apply(Op.TERM, number(sharpness + 2), t), number(-sharpness - 3))
        return builder.apply(Op.ADD, builder.apply(Op.TERM, product(slope, t), t), number(1.0))

    split = along.split(i)
    if split is not None:
        first, t = builder.position(split[0], PLACE), split[1]
    else:
        floor_ = builder.apply(Op.FLOOR, along.at(i))
        t = builder.apply(Op.MAXIMUM, builder.apply(Op.SUB, along.at(i), floor_), number(0.0))
        first, t = builder.cast(floor_, PLACE), builder.apply(Op.MINIMUM, t, number(1.0))
    s = builder.apply(Op.SUB, number(1.0), t)
    weights = product(number(sharpness), t, s, s), inner(t), inner(s), product(number(sharpness), s, t, t)
    none, last = _number(context, 0), _number(context, along.size - 1)

    def tap(offset: int, weight: Expr) -> _Tap:
        place = builder.apply(Op.ADD, first, _number(context, offset))
        inside = builder.apply(Op.MINIMUM, builder.apply(Op.MAXIMUM, place, none), last)
        return _Tap(inside, weight, None if split is None else split[0] + offset)

    return tuple(map(tap, (-1, 0, 1, 2), weights))


@dataclass(frozen=True)
class _Kernel:
    """How an element is made of its neighbours along a dimension: the `taps` of the result's element, of which the first one lies less than
    `reach` before its place, and the last one at most so far behind it. `copies`: whether PyTorch's kernels for a CPU copy along a dimension
    that keeps its size, whatever the factor; those for a GPU copy where all do."""

    taps: Callable[[_Dimension, Index], Taps]
    reach: int
    copies: bool


_LINEAR, _CUBIC = _Kernel(_linear_taps, 1, copies=True), _Kernel(_cubic_taps, 2, copies=False)


@lowers(
    aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default,
    aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec,
)  # fmt: skip
def _linear(call: Call, a: Tensor, size: Any, align_corners: bool, *scales: Any) -> Tensor:
    return _interpolated(call, a, align_corners, scales, _LINEAR)


@lowers(aten.upsample_bicubic2d.default, aten.upsample_bicubic2d.vec)
def _cubic(call: Call, a: Tensor, size: Any, align_corners: bool, *scales: Any) -> Tensor:
    return _interpolated(call, a, align_corners, scales, _CUBIC)


@lowers(
    aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)  # fmt: skip
def _linear_gradient(
    call: Call, gradient: Tensor, size: Any, input_size: Sequence[int], align_corners: bool, *scales: Any
) -> Tensor:
    return _gathered_back(call, gradient, align_corners, scales, _LINEAR)


@lowers(aten.upsample_bicubic2d_backward.default)
def _cubic_gradient(
    call: Call, gradient: Tensor, size: Any, input_size: Sequence[int], align_corners: bool, *scales: Any
) -> Tensor:
    return _gathered_back(call, gradient, align_corners, scales, _CUBIC)


def _interpolated(call: Call, a: Tensor, align_corners: bool, scales: Sequence[Any], kernel: _Kernel) -> Tensor:
    """Sums of elements times weights, along one dimension after the other."""
    if not a.dtype.is_float:
        raise Unsupported("upsampling of integers")
    context, builder = call.context, call.context.builder
    rank, shape = len(a.shape) - 2, call.value.shape
    dimensions = _dimensions(call, kernel, a.dtype, a.shape, shape, align_corners, scales)
    source = a if _loaded(a) else context.materialize(a, f"{call.origin}_input", call.origin)

    def corner(places: Sequence[Expr]) -> Tensor:
        found = {
            dim: Lookup(place, extent, checked=False)
            for dim, (place, extent) in enumerate(zip(places, a.shape[2:], strict=True), 2)
        }
        return gathered(call, source, shape, lambda c: ((*c[:2], *(Index(),) * rank), found))

    def at(c: Coordinates) -> Expr:
        found = [kernel.taps(along, i) for i, along in zip(c[2:], dimensions, strict=True)]

        def summed(places: tuple[Expr, ...]) -> Expr:
            if len(places) == rank:
                return corner(places).at(c)
            taps = found[len(places)]
            return _sum(builder, [builder.apply(Op.TERM, tap.weight, summed((*places, tap.place))) for tap in taps])

        return summed(())

    return context.tensor(shape, a.dtype, at, windowed=True)


def _gathered_back(call: Call, gradient: Tensor, align_corners: bool, scales: Sequence[Any], kernel: _Kernel) -> Tensor:
    """The gradient of what was interpolated: an element gathers from the elements of the result that may have read it, each times the weight
    that it had there."""
    shape = call.value.shape
    dimensions = _dimensions(call, kernel, gradient.dtype, shape, gradient.shape, align_corners, scales)
    readers = [along.readers(out, kernel.reach) for along, out in zip(dimensions, gradient.shape[2:], strict=True)]
    if prod(slide.size for slide in readers) > _MOST_READERS:
        raise Unsupported("the gradient of upsampling by a large factor")

    def towards(c: Coordinates, results: Coordinates) -> Expr:
        value = gradient.at(results)
        for along, i, o in zip(dimensions, c[2:], results[2:], strict=True):
            value = _weighted(along, value, i, kernel.taps(along, o))
        return value

    return pool(call, once(call, gradient, readers), ReduceOp.SUM, readers, of=towards)


def _weighted(along: _Dimension, value: Expr, i: Index, taps: Taps) -> Expr:
    """`value` times the weight of those `taps` that are element `i`; zero where none is."""
    builder, at = along.context.builder, along.context.builder.position(i, PLACE)
    compare = partial(builder.apply, dtype=DType.BOOL)

    def chosen(condition: Expr, part: Expr) -> Expr:
        return builder.apply(Op.WHERE, condition, part, along.number(0.0))

    def where(op: Op, left: Expr, right: int, part: Expr) -> Expr:
        return chosen(compare(op, left, _number(along.context, right)), part)

    raw = [(builder.position(tap.raw - i, PLACE), tap.weight) for tap in taps if tap.raw is not None]
    if raw:
        # How far taps are from the element depends on which reader it is, and mostly on nothing else: a compiler knows the sums.
        own, below, above = (
            _sum(builder, [where(op, distance, 0, weight) for distance, weight in raw]) for op in (Op.EQ, Op.LT, Op.GT)
        )
        ends = where(Op.EQ, at, 0, below), where(Op.EQ, at, along.size - 1, above)
        return builder.apply(Op.MUL, value, _sum(builder, [own, *ends]))
    hits = [compare(Op.EQ, tap.place, at) for tap in taps]
    weight = _sum(builder, [chosen(hit, tap.weight) for hit, tap in zip(hits, taps, strict=True)])
    return chosen(reduce(partial(compare, Op.OR), hits), builder.apply(Op.MUL, value, weight))


def _sum(builder: Builder, parts: Sequence[Expr]) -> Expr:
    return reduce(lambda x, y: builder.apply(Op.ADD, x, y), parts)


def _dimensions(
    call: Call,
    kernel: _Kernel,
    dtype: DType,
    before: Sequence[int],
    after: Sequence[int],
    align_corners: bool,
    scales: Sequence[Any],
) -> list[_Dimension]:
    """The dimensions of images along which tensors of the shape `after` lie between elements of those of the shape `before`."""
    given = _scales(call.node, len(before) - 2, scales)
    sizes = [*zip(before[2:], after[2:], given, strict=True)]
    made = [_dimension(call.context, dtype.compute, *each, align_corners) for each in sizes]
    moved = [size == out > 1 and along.fraction != 1 for (size, out, _), along in zip(sizes, made, strict=True)]
    copied = all(size == out for size, out, _ in sizes) if call.context.cuda else kernel.copies
    if any(moved) and copied:
        raise Unsupported(
            "resampling to the size that there is by another factor, which PyTorch's kernels take for a copy"
        )
    return made


def _scales(node: fx.Node, rank: int, scales: Sequence[Any]) -> Sequence[float | None]:
    """The factors that the caller of an upsampling gave, one per dimension, of its last arguments."""
    if node.target._overloadname == "vec":  # type: ignore[union-attr]
        scales = scales[0] or () if scales else ()
    return (*scales, *(None,) * (rank - len(scales)))


def _step(before: int, after: int, scale: float | None, align_corners: bool) -> Fraction:
    """How far apart in the input neighbours of the result lie."""
    if align_corners:
        return Fraction(before - 1, after - 1) if after > 1 else Fraction(0)
    return Fraction(1 / scale) if scale else Fraction(before, after)


def _dimension(
    context: Context, dtype: DType, before: int, after: int, scale: float | None, align_corners: bool
) -> _Dimension:
    step = _step(before, after, scale, align_corners)
    return _Dimension(
        context, dtype, before, step, float(step), align_corners, _exact(step, before, after, align_corners)
    )


def _affine(step: Fraction, align_corners: bool) -> tuple[int, int, int]:
    """Slope, start and parts of the places ``(slope * i + start) / parts``."""
    up, down = step.numerator, step.denominator
    return (up, 0, down) if align_corners else (2 * up, up - down, 2 * down)


def _exact(step: Fraction, before: int, after: int, align_corners: bool) -> tuple[int, int, int] | None:
    """Slope, start and parts of a dimension where all that PyTorch computes from them has few enough digits, and ends inside of the input."""
    slope, start, parts = _affine(step, align_corners)
    dyadic, last = parts & (parts - 1) == 0, slope * (after - 1) + start
    return (slope, start, parts) if dyadic and last + parts < _EXACT and last < parts * before else None


def _loaded(a: Tensor) -> bool:
    """Whether an element of `a` is one of memory: reading it several times computes nothing again."""
    nodes = walk(a.element)
    return not a.windowed and all(
        isinstance(node, Load) or (isinstance(node, Apply) and node.op is Op.CAST) for node in nodes
    )
