"""A float32 convolution's operands as halves, scaled by powers of two, so that tensor cores multiply them at the rate of halves.

A half has the 11 digits of a TF32 number, but a short range. With scales s of each sample, t of each input channel and u of each
output channel::

    x[n, c, ..] = s[n] t[c] x^[n, c, ..]        w[o, c, ..] t[c] = u[o] w^[o, c, ..]        result = s[n] u[o] sum(x^ w^)

where the largest finite numbers of each x^[n] and w^[o] are near 2^13. So a number loses digits against TF32 only where it is more
than 2^27 times smaller than the largest one of its sample, or output channel. A channel whose numbers are small beside the others of
every sample is measured by its own. NaN and infinities stay what they are, and no number but zero becomes zero: with an infinity it
makes an infinity.

Of a large input the largest numbers are guessed from some of its rows, and brought near 2^9, so that there are 23 binades below and no
number is too large that is up to 2^6 times larger than the guess. A channel in which little was seen, or nothing but zeros, may have
numbers as large as its sample's largest; it keeps the digits of those that are at most 2^29 times smaller than that. A sample of which
nothing but zeros was seen is taken for tiny. What packs the input raises an overflow flag where a half becomes an infinity. Then kernels that otherwise do nothing find the largest numbers of all, and
pack the input again. Some products pack such an input themselves; see `fusepass.codegen.passes.filled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.convolution import HALVES
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Buffer, Kernel, OverflowFlag, Role, Store
from fusepass.codegen.passes.exponents import LARGEST, ORIGIN, Finder, powers, some_places

LOW_SHIFT = 11
"""Low parts are what high parts leave of a number, times 2^LOW_SHIFT."""

_F32 = DType.F32
_TOO_LARGE = 65520.0  # rounded to a half it is an infinity
_GUESSED_BYTES = 64 << 20  # of an input: 15 us to read it, beside four kernels that do nothing
_LEAST_HALF = 2.0**-24


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


def in_places(shape: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Layout:
    """The same as (samples, channels / 8, *spatial, 8): planes of places, each of 8 channels."""
    last = channels_last(shape, before, after)
    sample, *spatial, channel = last.axes
    plane, number = Axis("hp", channel.size // HALVES), Axis("hc", HALVES)
    coordinates = (last.coordinates[0], axis_index(plane) * HALVES + axis_index(number), *last.coordinates[2:])
    return Layout((sample, plane, *spatial, number), coordinates)


@dataclass(frozen=True)
class WeightScales:
    """The scales of a convolution's channels, and the kernels that find them.

    Attributes:
        weight: its weight.
        transposed: whether the first two dimensions of the weight are exchanged.
        kernels, buffers: what is to be added to the program for them.
        channel, out: buffers of exponents: of t, by input channel, and of u, by output channel.
    """

    weight: Buffer
    transposed: bool
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]
    channel: Buffer
    out: Buffer

    def pack_weight(self, builder: Builder, name: str, layout: Layout, shift: int = LOW_SHIFT) -> tuple[Buffer, Kernel]:
        """The scaled weight in halves, as a buffer `name`, and the kernel that writes it; its coordinates are in the order of its dimensions."""
        first, second, *_ = layout.coordinates
        out, channel = (second, first) if self.transposed else (first, second)
        exponent = builder.apply(Op.SUB, _of(builder, self.channel, channel), _of(builder, self.out, out))
        return _pack(builder, self.weight, name, layout, powers(builder, exponent), shift)


@dataclass(frozen=True)
class Scales(WeightScales):
    """Those of its input as well.

    Attributes:
        source: its input.
        first: the kernels before the one that packs it, which find s and t; `kernels` come behind it.
        again: those behind it that find them once more after an overflow flag; none where nothing is guessed.
        factors: buffers of ``1 / s``, by sample, and of ``1 / t``, by input channel.
        result: buffers (samples, out_channels), the product of which is ``s u``, which may not be finite; the first has what the second
            cannot have of it, and is 1 as a rule.
    """

    source: Buffer
    first: tuple[Kernel, ...]
    again: tuple[Kernel, ...]
    factors: tuple[Buffer, Buffer]
    result: tuple[Buffer, Buffer]

    def restored(self, builder: Builder, value: Expr, sample: Index, out: Index) -> Expr:
        """The result from a sum of products of halves."""
        for buffer, op in zip(self.result, (Op.RESCALE, Op.MUL), strict=True):
            scale = builder.load(buffer.name, linear([sample, out], buffer.strides), _F32)
            value = builder.apply(op, value, scale)
        return value

    def pack_source(self, builder: Builder, name: str, layout: Layout) -> tuple[Buffer, tuple[Kernel, ...]]:
        """The scaled input in halves, as a buffer `name`, and the kernels that find its scales and write it."""
        factors = [_of(builder, each, at) for each, at in zip(self.factors, layout.coordinates, strict=False)]
        made, kernel = _pack(builder, self.source, name, layout, factors)
        if not self.again:
            return made, (*self.first, kernel)
        magnitude = builder.apply(Op.ABS, _scaled(builder, _number(builder, self.source, layout), factors))
        large = builder.apply(Op.GE, magnitude, builder.const(_TOO_LARGE, _F32), dtype=DType.BOOL)
        overflow_flag = OverflowFlag(self.flag, large)
        once_more = replace(kernel, name=f"{kernel.name}_again", when=self.flag)
        return made, (*self.first, replace(kernel, overflow_flag=overflow_flag), *self.again, once_more)

    @property
    def flag(self) -> str:
        """The buffer of the overflow flag."""
        (flag,) = {kernel.when for kernel in self.again if kernel.when is not None}
        return flag


def scales_of(
    builder: Builder, name: str, source: Buffer, weight: Buffer, *, transposed: bool, least: int = _GUESSED_BYTES
) -> Scales:
    """The scales of the convolution of `source` with `weight`, in buffers whose names begin with `name`.

    Those of an input of at `least` so many bytes are guessed, if it has rows enough.
    """
    samples, outs = source.shape[0], weight.shape[1 if transposed else 0]
    some = some_places(source) if source.nbytes >= least else None
    flag = Buffer(f"{name}_alarm", _F32, (samples,), (1,), Role.TEMP) if some else None
    work = Finder(builder, name, flag)
    (sample, by_sample), (channel, by_channel) = work.source_exponents(source, some)
    first, again = tuple(work.kernels), tuple[Kernel, ...]()
    if flag is not None:
        exact = Finder(builder, name)
        exact.source_exponents(source, None)
        again = tuple(replace(kernel, name=f"{kernel.name}_again", when=flag.name) for kernel in exact.kernels)
    work.kernels = []
    out = work.out_exponents(weight, channel, transposed=transposed)
    result = work.result_factors(sample, out, samples, outs)
    buffers, kernels = (*work.buffers, *([flag] if flag else [])), tuple(work.kernels)
    factors = by_sample, by_channel
    return Scales(weight, transposed, kernels, buffers, channel, out, source, first, again, factors, result)


@dataclass(frozen=True)
class Unscaled:
    """What stands for `Scales` where a convolution's operands are halves: they are packed as they are.

    Attributes:
        source, weight: the operands.
    """

    source: Buffer
    weight: Buffer
    kernels: tuple[Kernel, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    result: tuple[Buffer, ...] = ()

    def pack_source(self, builder: Builder, name: str, layout: Layout) -> tuple[Buffer, tuple[Kernel, ...]]:
        """The input as a buffer `name`, and the kernel that writes it."""
        made, kernel = _copy(builder, self.source, name, layout)
        return made, (kernel,)

    def pack_weight(self, builder: Builder, name: str, layout: Layout) -> tuple[Buffer, Kernel]:
        """The same of the weight; its coordinates are in the order of its dimensions."""
        return _copy(builder, self.weight, name, layout)

    def restored(self, builder: Builder, value: Expr, sample: Index, out: Index) -> Expr:
        """The result from a sum of products, rounded as the library rounds it."""
        return builder.cast(value, self.source.dtype)


def as_halves(builder: Builder, name: str, source: Buffer, weight: Buffer, *, transposed: bool) -> Scales | Unscaled:
    """The scales of a convolution of floats, or what stands for them where its operands are halves already."""
    if source.dtype.is_half:
        return Unscaled(source, weight)
    return scales_of(builder, name, source, weight, transposed=transposed)


def weight_scales_of(builder: Builder, name: str, weight: Buffer, *, transposed: bool) -> WeightScales:
    """The same of `weight` alone: t makes the largest weights of all input channels alike. Where weights of an output channel are not
    finite, its exponent is not.
    """
    work = Finder(builder, name)
    channel = work.weight_exponents(weight, transposed=transposed)
    out = work.out_exponents(weight, channel, transposed=transposed, finite=False)
    return WeightScales(weight, transposed, tuple(work.kernels), tuple(work.buffers), channel, out)


def _of(b: Builder, buffer: Buffer, at: Index) -> Expr:
    """The number of `buffer` that has one dimension, at `at`; 0 outside of it."""
    return b.masked((Bound(at, 0, buffer.numel),), b.load(buffer.name, at, _F32), b.const(0.0, _F32))


def _number(b: Builder, operand: Buffer, layout: Layout) -> Expr:
    """The element of `operand` at a place of `layout`, or zero."""
    bounds = zip(layout.coordinates, operand.shape, strict=True)
    real = tuple(Bound(index, 0, size) for index, size in bounds)
    number = b.load(operand.name, linear(layout.coordinates, operand.strides), operand.dtype)
    return b.masked(real, number, b.const(0.0, operand.dtype))


def _scaled(b: Builder, number: Expr, factors: Sequence[Expr]) -> Expr:
    for factor in factors:
        number = b.apply(Op.MUL, number, factor)
    return number


def _pack(
    b: Builder, operand: Buffer, name: str, layout: Layout, factors: Sequence[Expr], shift: int = LOW_SHIFT
) -> tuple[Buffer, Kernel]:
    # Zeros go the way of all numbers: what they are multiplied with is then read without a condition, several at once.
    number = _number(b, operand, layout)
    value = _scaled(b, number, factors)
    half = b.cast(_visible(b, number, value), DType.F16)
    if layout.part is not None:
        half = b.masked((Bound(layout.part, 0, 1),), half, _rest(b, value, half, shift))
    return _packed(name, layout, half, ORIGIN)


def _copy(b: Builder, operand: Buffer, name: str, layout: Layout) -> tuple[Buffer, Kernel]:
    return _packed(name, layout, _number(b, operand, layout), ("packed operand",))


def _packed(name: str, layout: Layout, half: Expr, origin: tuple[str, ...]) -> tuple[Buffer, Kernel]:
    shape = tuple(axis.size for axis in layout.axes)
    made = Buffer(name, half.dtype, shape, contiguous_strides(shape), Role.TEMP)
    store = Store(made.name, linear([axis_index(axis) for axis in layout.axes], made.strides), half)
    return made, Kernel(f"{name}_kernel", layout.axes, (), (), (), (store,), origin)


def _visible(b: Builder, number: Expr, value: Expr) -> Expr:
    """`value`, the scaled `number`, or the smallest half of its sign where it would become zero and the number is none."""
    least = b.const(_LEAST_HALF, _F32)
    small = b.apply(Op.LT, b.apply(Op.ABS, value), least, dtype=DType.BOOL)
    real = b.apply(Op.NE, number, b.const(0.0, _F32), dtype=DType.BOOL)
    lost = b.apply(Op.AND, small, real, dtype=DType.BOOL)
    return b.apply(Op.WHERE, lost, b.apply(Op.COPYSIGN, least, number), value)


def _rest(b: Builder, value: Expr, half: Expr, shift: int) -> Expr:
    """The low part of `value`, whose high part is `half`, times 2^`shift`; 0 where that is not finite."""
    high = b.cast(half, _F32)
    low = b.apply(Op.SUB, value, high)
    if shift:
        low = b.apply(Op.MUL, low, b.const(2.0**shift, _F32))
    finite = b.apply(Op.LE, b.apply(Op.ABS, high), b.const(LARGEST, _F32), dtype=DType.BOOL)
    return b.cast(b.apply(Op.WHERE, finite, low, b.const(0.0, _F32)), DType.F16)
