"""A float32 convolution's operands as halves, scaled by powers of two, so that tensor cores multiply them at the rate of halves.

A half has the 11 digits of a TF32 number, but a short range. With scales s of each sample, t of each input channel and u of each
output channel::

    x[n, c, ..] = s[n] t[c] x^[n, c, ..]        w[o, c, ..] t[c] = u[o] w^[o, c, ..]        result = s[n] u[o] sum(x^ w^)

where the largest finite numbers of each x^[n] and w^[o] are near 2^13. So a number loses digits against TF32 only where it is more
than 2^27 times smaller than the largest one of its sample, or output channel. A channel whose numbers are small beside the others of
every sample is measured by its own. NaN and infinities stay what they are, and no number but zero becomes zero: with an infinity it
makes an infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from fusepass.codegen.ir.convolution import HALVES
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Reduction, Role, Store

LOW_SHIFT = 11
"""Low parts are what high parts leave of a number, times 2^LOW_SHIFT."""

_F32 = DType.F32
_TOP = 13  # exponent of the largest halves
_LEAST_HALF = 2.0**-24
_LEAST_SAMPLE = -126  # exponents of the scales of tiny numbers, so that what numbers are multiplied with is finite
_LEAST_CHANNEL = -100
_LARGEST = float.fromhex("0x1.fffffep+127")
_ORIGIN = ("scaled halves",)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies packed: at a point of `axes`, slowest first, stands its element at `coordinates`; zero outside of it.

    With `part`, an index of 0 or 1, two halves stand for a number: the high part, then the low part (see `LOW_SHIFT`).
    """

    axes: tuple[Axis, ...]
    coordinates: tuple[Index, ...]
    part: Index | None = None


def channels_last(
    shape: Sequence[int], before: Sequence[int], after: Sequence[int], multiple: int = HALVES, parts: int = 1
) -> Layout:
    """A tensor of `shape` (samples, channels, *spatial) as (samples, *spatial, parts, channels).

    Its border of zeros has `before` and `after` elements along the spatial axes, fewer than none where it is cut; channels are
    filled up to a `multiple`.
    """
    samples, channels, *sizes = shape
    sample, channel = Axis("h0", samples), Axis("hc", -(-channels // multiple) * multiple)
    spatial = tuple(
        Axis(f"h{number + 1}", size + low + high)
        for number, (size, low, high) in enumerate(zip(sizes, before, after, strict=True))
    )
    places = [axis_index(axis) - low for axis, low in zip(spatial, before, strict=True)]
    part = Axis("hp", parts)
    axes = (sample, *spatial, *((part,) if parts > 1 else ()), channel)
    coordinates = (axis_index(sample), axis_index(channel), *places)
    return Layout(axes, coordinates, axis_index(part) if parts > 1 else None)


@dataclass(frozen=True)
class Scales:
    """The scales of one convolution, and the kernels that find them.

    Attributes:
        source, weight: its operands.
        transposed: whether the first two dimensions of the weight are exchanged.
        kernels, buffers: what is to be added to the program for them.
        factors: buffers of ``1 / s``, by sample, and of ``1 / t``, by input channel.
        channel, out: buffers of exponents: of t, by input channel, and of u, by output channel.
        result: buffers (samples, out_channels), the product of which is ``s u``; one alone may not be finite.
    """

    source: Buffer
    weight: Buffer
    transposed: bool
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]
    factors: tuple[Buffer, Buffer]
    channel: Buffer
    out: Buffer
    result: tuple[Buffer, Buffer]

    def restored(self, builder: Builder, value: Expr, sample: Index, out: Index) -> Expr:
        """The result from a sum of products of halves."""
        for buffer in self.result:
            scale = builder.load(buffer.name, linear([sample, out], buffer.strides), _F32)
            value = builder.apply(Op.MUL, value, scale)
        return value

    def pack_source(self, builder: Builder, name: str, layout: Layout) -> tuple[Buffer, Kernel]:
        """The scaled input in halves, as a buffer `name`, and the kernel that writes it."""
        factors = [_of(builder, each, at) for each, at in zip(self.factors, layout.coordinates, strict=False)]
        return _pack(builder, self.source, name, layout, factors)

    def pack_weight(self, builder: Builder, name: str, layout: Layout) -> tuple[Buffer, Kernel]:
        """The same of the weight, whose coordinates are in the order of its dimensions."""
        first, second, *_ = layout.coordinates
        out, channel = (second, first) if self.transposed else (first, second)
        exponent = builder.apply(Op.SUB, _of(builder, self.channel, channel), _of(builder, self.out, out))
        return _pack(builder, self.weight, name, layout, _powers(builder, exponent))


def scales_of(builder: Builder, name: str, source: Buffer, weight: Buffer, *, transposed: bool) -> Scales:
    """The scales of the convolution of `source` with `weight`, in buffers whose names begin with `name`."""
    work = _Finder(builder, name)
    samples, channels = source.shape[:2]
    outs = weight.shape[1 if transposed else 0]
    planes = work.largest_of_planes(source)
    sample, by_sample = work.sample_exponents(planes, samples, channels)
    channel, by_channel = work.channel_exponents(planes, sample, samples, channels)
    out = work.out_exponents(weight, channel, transposed=transposed)
    result = work.result_factors(sample, out, samples, outs)
    kernels, buffers = tuple(work.kernels), tuple(work.buffers)
    return Scales(source, weight, transposed, kernels, buffers, (by_sample, by_channel), channel, out, result)


class _Finder:
    """Makes the kernels that find scales, one after another; all that they write are exponents, but for the factors."""

    def __init__(self, builder: Builder, name: str) -> None:
        self.builder, self.name = builder, name
        self.kernels: list[Kernel] = []
        self.buffers: list[Buffer] = []

    def largest_of_planes(self, source: Buffer) -> Buffer:
        """The exponent of the largest finite number of each sample and channel; minus infinity where there is none but zero."""
        b = self.builder
        axes = tuple(Axis(f"m{number}", size) for number, size in enumerate(source.shape))
        at = linear([axis_index(axis) for axis in axes], source.strides)
        value = _finite_magnitude(b, b.load(source.name, at, _F32))
        largest = Reduction("largest", ReduceOp.MAX, (value,), _F32)
        made = self._buffer("planes", source.shape[:2])
        exponent = b.apply(Op.FLOOR, b.apply(Op.LOG2, b.stat("largest", 0, _F32)))
        self._kernel(axes[:2], axes[2:], largest, [_store(made, axes[:2], exponent)])
        return made

    def sample_exponents(self, planes: Buffer, samples: int, channels: int) -> tuple[Buffer, Buffer]:
        """The exponent of s, and ``1 / s``, which is finite."""
        b = self.builder
        sample, channel = Axis("s0", samples), Axis("s1", channels)
        value = b.load(planes.name, linear([axis_index(sample), axis_index(channel)], planes.strides), _F32)
        found = b.stat("largest", 0, _F32)
        lowered = b.apply(Op.SUB, found, b.const(float(_TOP), _F32))
        exponent = _unless_nothing(b, found, b.apply(Op.MAXIMUM, lowered, b.const(float(_LEAST_SAMPLE), _F32)))
        return self._with_factors("sample", sample, channel, value, exponent)

    def channel_exponents(self, planes: Buffer, scale: Buffer, samples: int, channels: int) -> tuple[Buffer, Buffer]:
        """The same of t: the largest number of a channel beside that of its sample, in the sample where it is most.

        So a sample with a number that is far too large changes nothing for the others.
        """
        b = self.builder
        sample, channel = Axis("c0", samples), Axis("c1", channels)
        plane = b.load(planes.name, linear([axis_index(sample), axis_index(channel)], planes.strides), _F32)
        beside = b.apply(Op.SUB, plane, b.load(scale.name, axis_index(sample), _F32))
        found = b.stat("largest", 0, _F32)
        lowered = b.apply(Op.SUB, found, b.const(float(_TOP), _F32))
        exponent = _unless_nothing(b, found, b.apply(Op.MAXIMUM, lowered, b.const(float(_LEAST_CHANNEL), _F32)))
        return self._with_factors("channel", channel, sample, beside, exponent)

    def _with_factors(self, what: str, row: Axis, column: Axis, value: Expr, exponent: Expr) -> tuple[Buffer, Buffer]:
        """Buffers of `exponent`, made of the largest `value`, and of ``2^-exponent``."""
        b = self.builder
        made, factor = self._buffer(what, (row.size,)), self._buffer(f"{what}_factor", (row.size,))
        stores = [
            _store(made, (row,), exponent),
            _store(factor, (row,), b.apply(Op.EXP2, b.apply(Op.NEG, exponent))),
        ]
        self._kernel((row,), (column,), Reduction("largest", ReduceOp.MAX, (value,), _F32), stores)
        return made, factor

    def out_exponents(self, weight: Buffer, scale: Buffer, *, transposed: bool) -> Buffer:
        b = self.builder
        axes = tuple(Axis(f"o{number}", size) for number, size in enumerate(weight.shape))
        out, channel = (axes[1], axes[0]) if transposed else axes[:2]
        at = linear([axis_index(axis) for axis in axes], weight.strides)
        magnitude = _finite_magnitude(b, b.load(weight.name, at, _F32))
        exponent = b.apply(Op.FLOOR, b.apply(Op.LOG2, magnitude))
        value = b.apply(Op.ADD, exponent, b.load(scale.name, axis_index(channel), _F32))
        made = self._buffer("out", (out.size,))
        found = b.stat("largest", 0, _F32)
        lowered = b.apply(Op.SUB, found, b.const(float(_TOP), _F32))
        largest = Reduction("largest", ReduceOp.MAX, (value,), _F32)
        columns = tuple(axis for axis in axes if axis is not out)
        self._kernel((out,), columns, largest, [_store(made, (out,), _unless_nothing(b, found, lowered))])
        return made

    def result_factors(self, sample: Buffer, out: Buffer, samples: int, outs: int) -> tuple[Buffer, Buffer]:
        b = self.builder
        axes = Axis("r0", samples), Axis("r1", outs)
        exponents = (b.load(each.name, axis_index(axis), _F32) for each, axis in zip((sample, out), axes, strict=True))
        powers = _powers(b, b.apply(Op.ADD, *exponents))
        made = self._buffer("result", (samples, outs)), self._buffer("result_too", (samples, outs))
        stores = [_store(buffer, axes, power) for buffer, power in zip(made, powers, strict=True)]
        self._kernel(axes, (), None, [], stores)
        return made

    def _buffer(self, what: str, shape: tuple[int, ...]) -> Buffer:
        made = Buffer(f"{self.name}_{what}", _F32, shape, contiguous_strides(shape), Role.TEMP)
        self.buffers.append(made)
        return made

    def _kernel(
        self,
        rows: tuple[Axis, ...],
        columns: tuple[Axis, ...],
        reduction: Reduction | None,
        row_stores: Sequence[Store],
        stores: Sequence[Store] = (),
    ) -> None:
        name = f"{(*row_stores, *stores)[0].buffer}_kernel"
        sweeps = ((reduction,),) if reduction else ()
        self.kernels.append(Kernel(name, rows, columns, sweeps, tuple(row_stores), tuple(stores), _ORIGIN))


def _of(b: Builder, buffer: Buffer, at: Index) -> Expr:
    """The number of `buffer` that has one dimension, at `at`; 0 outside of it."""
    return b.masked((Bound(at, 0, buffer.numel),), b.load(buffer.name, at, _F32), b.const(0.0, _F32))


def _store(buffer: Buffer, axes: Sequence[Axis], value: Expr) -> Store:
    return Store(buffer.name, linear([axis_index(axis) for axis in axes], buffer.strides), value)


def _finite_magnitude(b: Builder, value: Expr) -> Expr:
    """``|value|``, or 0 where that is not finite."""
    magnitude = b.apply(Op.ABS, value)
    finite = b.apply(Op.LE, magnitude, b.const(_LARGEST, _F32), dtype=DType.BOOL)
    return b.apply(Op.WHERE, finite, magnitude, b.const(0.0, _F32))


def _unless_nothing(b: Builder, found: Expr, exponent: Expr) -> Expr:
    """`exponent`, or 0 where nothing but zeros was found."""
    nothing = b.apply(Op.EQ, found, b.const(-inf, _F32), dtype=DType.BOOL)
    return b.apply(Op.WHERE, nothing, b.const(0.0, _F32), exponent)


def _powers(b: Builder, exponent: Expr) -> tuple[Expr, Expr]:
    """Two finite numbers whose product is 2^exponent; multiplied one after the other, neither is beyond 1 and the product."""
    half = b.apply(Op.FLOOR, b.apply(Op.MUL, exponent, b.const(0.5, _F32)))
    return b.apply(Op.EXP2, half), b.apply(Op.EXP2, b.apply(Op.SUB, exponent, half))


def _pack(b: Builder, operand: Buffer, name: str, layout: Layout, factors: Sequence[Expr]) -> tuple[Buffer, Kernel]:
    bounds = zip(layout.coordinates, operand.shape, strict=True)
    real = tuple(Bound(index, 0, size) for index, size in bounds)
    # Zeros go the way of all numbers: what they are multiplied with is then read without a condition, several at once.
    number = b.load(operand.name, linear(layout.coordinates, operand.strides), _F32)
    value = number = b.masked(real, number, b.const(0.0, _F32))
    for factor in factors:
        value = b.apply(Op.MUL, value, factor)
    half = b.cast(_visible(b, number, value), DType.F16)
    if layout.part is not None:
        half = b.masked((Bound(layout.part, 0, 1),), half, _rest(b, value, half))
    shape = tuple(axis.size for axis in layout.axes)
    made = Buffer(name, DType.F16, shape, contiguous_strides(shape), Role.TEMP)
    return made, Kernel(f"{name}_kernel", layout.axes, (), (), (), (_store(made, layout.axes, half),), _ORIGIN)


def _visible(b: Builder, number: Expr, value: Expr) -> Expr:
    """`value`, the scaled `number`, or the smallest half of its sign where it would become zero and the number is none."""
    least = b.const(_LEAST_HALF, _F32)
    small = b.apply(Op.LT, b.apply(Op.ABS, value), least, dtype=DType.BOOL)
    real = b.apply(Op.NE, number, b.const(0.0, _F32), dtype=DType.BOOL)
    lost = b.apply(Op.AND, small, real, dtype=DType.BOOL)
    return b.apply(Op.WHERE, lost, b.apply(Op.COPYSIGN, least, number), value)


def _rest(b: Builder, value: Expr, half: Expr) -> Expr:
    """The low part of `value`, whose high part is `half`; 0 where that is not finite."""
    high = b.cast(half, _F32)
    low = b.apply(Op.MUL, b.apply(Op.SUB, value, high), b.const(2.0**LOW_SHIFT, _F32))
    finite = b.apply(Op.LE, b.apply(Op.ABS, high), b.const(_LARGEST, _F32), dtype=DType.BOOL)
    return b.cast(b.apply(Op.WHERE, finite, low, b.const(0.0, _F32)), DType.F16)
