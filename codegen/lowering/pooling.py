"""Pooling: a short sequential reduction over a window of the input, masked at the borders.

Every kind is one function: the position of each window along a dimension is ``first(o) + dilation * k`` for
``k < size``, valid where it lies inside the input (and, for adaptive pooling, before the window's end).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from typing import Any

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
    ReduceOp,
    Window,
    children,
    own_indices,
    walk,
)
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.lowering.gathers import PLACE
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import DTYPES, WORK_OF_A_BYTE, Context, Coordinates, Tensor, Unsupported, domain

aten = torch.ops.aten

_EXACT = frozenset({Op.MAXIMUM, Op.MINIMUM, Op.FMAX, Op.FMIN, Op.WHERE, Op.CAST, Op.NEG, Op.ABS}) | {
    *(Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE, Op.AND, Op.OR, Op.NOT)
}
"""What gives the same bits whenever it is computed again; a compiler may join a product and a sum here, and not there."""

_WORK_OF_A_BYTE_IN_CACHE = 2
"""`WORK_OF_A_BYTE` on a CPU, where taps at the border are branches, and a layer's results stay in the cache."""

_LARGEST_WINDOW = 64  # points that one thread goes through
_MOST_OVERLAP = 2  # windows that an element of the input may lie in, for rows that are windows
_COSTLY = 16  # instructions of a function that is not cheap
_OFTEN = 4  # windows that an element lies in, from which on these are staged in tiles on a GPU
_IN_TILES = (
    0.5  # times that an element is computed there besides once, about, as rows are reduced in a turn of their own
)
_IN_PLANES = 2  # the same of windows over three axes, at most


@dataclass(frozen=True)
class Slide:
    """How the window moves along one dimension: `size` taps, at ``first(o) + dilation * tap``, valid where every bound holds."""

    size: int
    position: Callable[[Index, Index], Index]
    bounds: Callable[[Index, Index], tuple[Bound, ...]]


def ints(value: Any, rank: int, default: Sequence[int] = ()) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    values = values or tuple(default)
    return values * rank if len(values) == 1 else values


def strided(size: int, extent: int, stride: int, padding: int, dilation: int, *, clip: int) -> Slide:
    """A window of fixed size; taps outside ``-clip <= position < extent + clip`` do not count (clip 0: the input itself)."""

    def position(o: Index, tap: Index) -> Index:
        return o * stride + tap * dilation - padding

    def bounds(o: Index, tap: Index) -> tuple[Bound, ...]:
        return (Bound(position(o, tap), -clip, extent + clip),)

    return Slide(size, position, bounds)


def adaptive(extent: int, out: int) -> Slide:
    """PyTorch's adaptive windows: from ``floor(o * extent / out)`` up to ``ceil((o + 1) * extent / out)``."""
    if out == 0 or extent % out == 0:
        out = max(out, 1)  # no windows at all have any size
        return strided(extent // out, extent, extent // out, 0, 1, clip=0)
    longest = max(-(-(o + 1) * extent // out) - o * extent // out for o in range(out))

    def position(o: Index, tap: Index) -> Index:
        return (o * extent) // out + tap

    def bounds(o: Index, tap: Index) -> tuple[Bound, ...]:
        end = ((o + 1) * extent + (out - 1)) // out
        return (Bound(end - position(o, tap), 1, extent + longest + 1),)

    return Slide(longest, position, bounds)


def pool(
    call: Call,
    a: Tensor,
    op: ReduceOp,
    slides: Sequence[Slide],
    of: Callable[[Coordinates, Coordinates], Expr] | None = None,
    dtype: DType | None = None,
) -> Tensor:
    """`op` over windows of the last dimensions of `a`, in the compute type of `dtype`, that of `a` unless given.

    Args:
        of: what to reduce instead of `a`, given the coordinates in the result and in `a`; a window of one point has that.
    """
    context, builder = call.context, call.context.builder
    rank = len(slides)
    dtype = dtype or a.dtype
    compute = dtype.compute
    identity = builder.const(0 if op is ReduceOp.SUM else _lowest(compute), compute)
    result = call.value.shape
    points = prod(slide.size for slide in slides)
    if of is None and points > _LARGEST_WINDOW and prod(result) * points <= _MOST_OVERLAP * a.numel:
        return _reduced(call, a, op, slides)
    number = len(context.buffers) + len(context.kernels)
    value = of or (lambda c, place: _inside(context, a, place[: len(c) - rank], place[len(c) - rank :]))

    def at(c: Coordinates) -> Expr:
        axes = tuple(Axis(f"k{number}_{d}", slide.size) for d, slide in enumerate(slides)) if points > 1 else ()
        taps = tuple(map(axis_index, axes)) or (Index(),) * rank
        found = [*zip(slides, c[len(c) - rank :], taps, strict=True)]
        inner = (slide.position(o, tap) for slide, o, tap in found)
        mask = tuple(bound for slide, o, tap in found for bound in slide.bounds(o, tap))
        element = builder.masked(mask, value(c, (*c[: len(c) - rank], *inner)), identity)
        return builder.window(op, axes, element) if axes else element

    return context.tensor(result, dtype, at, windowed=points > 1 or a.windowed)


def _inside(context: Context, a: Tensor, outer: Coordinates, inner: Sequence[Index]) -> Expr:
    """`a` at places of which those along the last dimensions, `inner`, lie inside of it: so no quotient by a size is left of them."""
    sizes = a.shape[len(a.shape) - len(inner) :]
    axes = context.axes(sizes)
    value = a.at((*outer, *map(axis_index, axes)))
    return context.builder.rewrite(value, dict(zip(axes, inner, strict=True)))


def _reduced(call: Call, a: Tensor, op: ReduceOp, slides: Sequence[Slide]) -> Tensor:
    """`pool` of windows that are too large for one thread each: as a reduction whose rows are the windows."""
    context, result, rank = call.context, call.value.shape, len(slides)
    identity = context.builder.const(0 if op is ReduceOp.SUM else _lowest(a.dtype.compute), a.dtype.compute)
    outer = len(result) - rank

    def at(c: Coordinates) -> Expr:
        each = list(zip(slides, c[outer : len(result)], c[len(result) :], strict=True))
        mask = tuple(bound for slide, o, tap in each for bound in slide.bounds(o, tap))
        inner = (slide.position(o, tap) for slide, o, tap in each)
        return context.builder.masked(mask, a.at((*c[:outer], *inner)), identity)

    windows = context.tensor((*result, *(slide.size for slide in slides)), a.dtype, at)
    dims = range(len(result), len(windows.shape))
    (kept,) = context.reduce(op, (windows,), dims, a.dtype.compute, call.origin)
    return context.cast(context.reshape(kept, result), a.dtype)


def _lowest(dtype: DType) -> float | int:
    return float("-inf") if dtype.is_float else dtype.limits[0]


def once(call: Call, a: Tensor, slides: Sequence[Slide] = ()) -> Tensor:
    """`a`, stored first where that is less than to compute it for each of the windows that an element lies in.

    So it is where reading `a` goes through another window, which would be gone through for each tap. Where threads of a GPU find elements in
    tiles, each computes for several results at once what it needs of a row.
    """
    axes = domain(a.shape)
    value = a.at(tuple(map(axis_index, axes[: len(a.shape)])))
    windows = prod(call.value.shape) * prod(slide.size for slide in slides) / max(a.numel, 1)
    again, moving = windows - 1, axes
    byte = WORK_OF_A_BYTE if call.context.cuda else _WORK_OF_A_BYTE_IN_CACHE
    if call.context.cuda and slides:
        moving = axes[-len(slides) :]
        if windows >= _OFTEN and a.dtype.is_float and _along_rows(value, axes[-1]):
            again = min(again, _IN_PLANES if len(slides) > 2 else _IN_TILES)
    if a.windowed or again * _work(value, moving) > byte * a.dtype.nbytes:
        return call.context.materialize(a, f"{call.origin}_input", call.origin)
    return a


def _along_rows(value: Expr, row: Axis) -> bool:
    """Whether neighbours along `row` are neighbours in all memory of which each has an element of its own, and nothing is left out."""
    indices = [node.index for node in walk(value) if isinstance(node, Load)]
    plain = not any(isinstance(node, Masked | Gather | Window) for node in walk(value))
    return plain and all(index.stride(row) == 1 for index in indices if row in index.axes)


def _work(value: Expr, moving: Collection[Axis]) -> int:
    """Instructions that `value` takes at each place along the `moving` axes, about; what is stored is cast again as it is read."""
    moves: set[int] = set()
    work = 0
    for node in walk(value):
        axes = frozenset[Axis]().union(*(index.axes for index in own_indices(node)))
        if axes & {*moving} or any(id(child) in moves for child in children(node)):
            moves.add(id(node))
            if isinstance(node, Apply) and node.op is not Op.CAST:
                shares = node.op is Op.DIV and isinstance(node.args[1], Const)  # a product
                work += 1 if shares or node.op in CHEAP else _COSTLY
    return work


@lowers(
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
)
def _max_pool(
    call: Call,
    a: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    rank = 3 if "3d" in call.origin else 2
    size = ints(kernel_size, rank)
    steps, pads, holes = ints(stride, rank, size), ints(padding, rank), ints(dilation, rank)
    extents = a.shape[-rank:]
    slides = [strided(k, e, s, p, d, clip=0) for k, e, s, p, d in zip(size, extents, steps, pads, holes, strict=True)]
    if not call.origin.endswith("with_indices"):
        return pool(call, once(call, a, slides), ReduceOp.MAX, slides)
    return _maxima(call, a, slides)


def _maxima(call: Call, a: Tensor, slides: Sequence[Slide]) -> tuple[Tensor, Tensor | None]:
    """The maximum of each window, and where it is, if anybody reads that."""
    if not call.uses(1):
        return pool(call, once(call, a, slides), ReduceOp.MAX, slides), None
    # A place is found again by its value: what may round otherwise when it is computed again is stored, as it is where halves are rounded.
    a = call.context.materialize(a, f"{call.origin}_input", call.origin) if _rounds(a) else once(call, a, slides)
    most = pool(call, a, ReduceOp.MAX, slides)
    return most, _places(call, a, most, slides)


def _rounds(a: Tensor) -> bool:
    """Whether `a` is computed by more than comparisons."""
    return a.windowed or any(isinstance(node, Apply) and node.op not in _EXACT for node in walk(a.element))


def _places(call: Call, a: Tensor, most: Tensor, slides: Sequence[Slide]) -> Tensor:
    """Where in the last dimensions of `a`, counted in their order, each window has its maximum: the first one that is the largest, or the
    last NaN, as PyTorch's kernels go on to the next one.
    """
    context, builder, rank = call.context, call.context.builder, len(slides)
    extents, floats = a.shape[-rank:], a.dtype.is_float
    place_of = DType.I32 if prod(extents) <= DType.I32.limits[1] else DType.I64
    nowhere = builder.const(place_of.limits[0], place_of)

    def is_nan(value: Expr) -> Expr:
        return builder.apply(Op.ISNAN, value, dtype=DType.BOOL)

    def counted(c: Coordinates, place: Expr) -> Expr:
        """`place` from the last one where the maximum is NaN, else from the first one: the largest is wanted. What is counted so twice is
        `place` again."""
        backwards = builder.apply(Op.BIT_NOT, place)
        return builder.apply(Op.WHERE, is_nan(most.at(c)), place, backwards) if floats else backwards

    def of(c: Coordinates, at: Coordinates) -> Expr:
        value, top = _inside(context, a, at[:-rank], at[-rank:]), most.at(c)
        found = builder.apply(Op.EQ, value, top, dtype=DType.BOOL)
        if floats:
            found = builder.apply(Op.WHERE, is_nan(top), is_nan(value), found)
        place = builder.position(linear(at[-rank:], contiguous_strides(extents)), place_of)
        return builder.apply(Op.WHERE, found, counted(c, place), nowhere)

    found = pool(call, a, ReduceOp.MAX, slides, of, place_of)
    places = context.tensor(found.shape, place_of, lambda c: counted(c, found.at(c)), windowed=True)
    return context.cast(places, DType.I64)


@lowers(aten.avg_pool2d.default, aten.avg_pool3d.default, aten.avg_pool1d.default)
def _avg_pool(
    call: Call, a: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    if not a.dtype.is_float:
        raise Unsupported("average pooling of integers")
    rank = int(call.origin[-2])
    size = ints(kernel_size, rank)
    steps, pads = ints(stride, rank, size), ints(padding, rank)
    extents = a.shape[-rank:]
    geometry = list(zip(size, extents, steps, pads, strict=True))
    slides = [strided(k, e, s, p, 1, clip=0) for k, e, s, p in geometry]
    total = pool(call, once(call, a, slides), ReduceOp.SUM, slides)
    if divisor_override is not None:
        return _divided(call, total, call.context.constant(divisor_override, (), a.dtype.compute))
    counted = [strided(k, e, s, p, 1, clip=p if count_include_pad else 0) for k, e, s, p in geometry]
    return _divided(call, total, counts(call, counted, call.value.shape))


@lowers(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, aten.adaptive_avg_pool1d.default)
def _adaptive_avg_pool(call: Call, a: Tensor, output_size: Any) -> Tensor:
    rank = int(call.origin[-2])
    slides = [adaptive(extent, out) for extent, out in zip(a.shape[-rank:], ints(output_size, rank), strict=True)]
    total = pool(call, once(call, a, slides), ReduceOp.SUM, slides)
    return _divided(call, total, counts(call, slides, call.value.shape))


@lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def _adaptive_max_pool(call: Call, a: Tensor, output_size: Any) -> tuple[Tensor, Tensor | None]:
    rank = int(call.origin[-2])
    slides = [adaptive(extent, out) for extent, out in zip(a.shape[-rank:], ints(output_size, rank), strict=True)]
    return _maxima(call, a, slides)


def counts(call: Call, slides: Sequence[Slide], shape: Sequence[int]) -> Tensor:
    """How many taps of each window count, in a result of `shape`, as numbers of the type that it is computed in."""
    context, rank = call.context, len(slides)
    compute = DTYPES[call.value.dtype].compute

    def at(c: Coordinates) -> Expr:
        each = [_count(context, slide, o, compute) for slide, o in zip(slides, c[len(c) - rank :], strict=True)]
        known = prod(count for count in each if isinstance(count, int))
        parts = [count for count in each if not isinstance(count, int)]
        factors = [context.builder.const(known, compute)] if known != 1 or not parts else []
        return reduce(lambda a, b: context.builder.apply(Op.MUL, a, b), [*factors, *parts])

    return context.tensor(shape, compute, at)


def _count(context: Context, slide: Slide, o: Index, dtype: DType) -> Expr | int:
    """How many taps of window `o` count along one dimension: those from the last one that is too early to the first that is too late."""
    tap, builder = Axis("tap", slide.size), context.builder
    place = PLACE if slide.size <= PLACE.limits[1] else DType.I64
    first, end = [Index()], [Index(slide.size)]
    for bound in slide.bounds(o, axis_index(tap)):
        at_first = bound.index.substitute({tap: Index()})
        forwards = bound.index.stride(tap) == 1
        first.append(at_first * -1 + bound.low if forwards else at_first + (1 - bound.high))
        end.append(at_first * -1 + bound.high if forwards else at_first + (1 - bound.low))
    first, end = _outermost(first, 1), _outermost(end, -1)
    if len(first) == 1:
        end, first = [index - first[0] for index in end], []
    if not first and len(end) == 1 and not end[0].terms:
        return end[0].constant
    count = reduce(partial(builder.apply, Op.MINIMUM), [builder.position(index, place) for index in end])
    if first:
        begin = reduce(partial(builder.apply, Op.MAXIMUM), [builder.position(index, place) for index in first])
        count = builder.apply(Op.SUB, count, begin)
    return builder.cast(count, dtype)


def _outermost(found: Sequence[Index], sign: int) -> list[Index]:
    """Those of `found` that may be the largest, or the smallest where `sign` is -1; for others, the number that these never pass."""
    ranges = [(index, sorted(sign * bound for bound in index.tight_bounds)) for index in found]
    least = max(low for _, (low, _) in ranges)
    beyond = [(index, low) for index, (low, high) in ranges if high > least]
    reached = any(low == least for _, low in beyond)
    return [index for index, _ in beyond] + ([] if reached else [Index(sign * least)])


def _divided(call: Call, total: Tensor, count: Tensor) -> Tensor:
    return call.context.pointwise(Op.DIV, (total, count), total.dtype)
