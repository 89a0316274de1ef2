"""Kernels that find the scales of a convolution's operands; `codegen.passes.halves` says what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, Index, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Reduction, Role, Store

LARGEST = float.fromhex("0x1.fffffep+127")
"""Of all finite numbers."""

ORIGIN = ("scaled halves",)
"""What kernels that have to do with halves say of themselves."""

_F32 = DType.F32
_TOP = 13  # exponent of the largest halves
_GUESSED_TOP = 9  # the same where they are guessed
_QUIET, _TINY = -6, -18  # exponents of channels beside the largest of their sample, where they are guessed
_RUN, _EVERY = 32, 32  # neighbours, and of how many such groups or rows one is looked at
_LEAST_EVERY = 8  # rows, of fewer than that there are none to choose from
_LEAST_SAMPLE = -126  # exponents of the scales of tiny numbers, so that what numbers are multiplied with is finite
_LEAST_CHANNEL = -100
_LEAST_POWER, _MOST_POWER = -126, 127  # exponents of normal numbers


Places = tuple[tuple[Axis, ...], tuple[Index, ...]]


def some_places(source: Buffer) -> Places | None:
    """Axes over some of the positions of `source`, and its spatial coordinates there; None where it has too few rows.

    Whole rows, a distance apart along the axis above, or along one further up; of a single axis groups of neighbours.
    """
    axes = [Axis(f"m{number + 2}", size) for number, size in enumerate(source.shape[2:])]
    places = [axis_index(axis) for axis in axes]
    if len(axes) == 1:
        apart = _RUN * _EVERY
        groups, near = Axis("m3", axes[0].size // apart), Axis("m4", _RUN)
        start = axis_index(groups) * apart + (apart // 2)
        return ((groups, near), (start + axis_index(near),)) if groups.size > 1 else None
    for number in reversed(range(len(axes) - 1)):
        size = axes[number].size
        apart = min(_EVERY, size // 2)
        if apart >= _LEAST_EVERY:
            axes[number] = Axis(axes[number].name, (size - apart // 2 - 1) // apart + 1)
            places[number] = axis_index(axes[number]) * apart + apart // 2
            return tuple(axes), tuple(places)
    return None


class Finder:
    """Makes the kernels that find scales, one after another; all that they write are exponents, but for the factors."""

    def __init__(self, builder: Builder, name: str, flag: Buffer | None = None) -> None:
        """With a `flag`, for an overflow flag, scales of the input are guesses."""
        self.builder, self.name, self.flag = builder, name, flag
        self.top = _TOP if flag is None else _GUESSED_TOP
        self.kernels: list[Kernel] = []
        self.buffers: list[Buffer] = []

    def source_exponents(
        self, source: Buffer, some: Places | None
    ) -> tuple[tuple[Buffer, Buffer], tuple[Buffer, Buffer]]:
        """The exponents of s and of t, and ``1 / s`` and ``1 / t``, from all numbers of the input or `some`."""
        samples, channels = source.shape[:2]
        planes = self.largest_of_planes(source, some)
        sample = self.sample_exponents(planes, samples, channels)
        return sample, self.channel_exponents(planes, sample[0], samples, channels)

    def largest_of_planes(self, source: Buffer, some: Places | None) -> Buffer:
        """The exponent of the largest finite number of each sample and channel; minus infinity where there is none but zero."""
        b = self.builder
        axes = tuple(Axis(f"m{number}", size) for number, size in enumerate(source.shape))
        places: tuple[Index, ...] = tuple(map(axis_index, axes[2:]))
        if some is not None:
            axes, places = (*axes[:2], *some[0]), some[1]
        at = linear([*map(axis_index, axes[:2]), *places], source.strides)
        value = _finite_magnitude(b, b.load(source.name, at, _F32))
        largest = Reduction("largest", ReduceOp.MAX, (value,), _F32)
        made = self._buffer("planes", source.shape[:2])
        exponent = b.apply(Op.FLOOR, b.apply(Op.LOG2, b.reduction_result("largest", 0, _F32)))
        self._kernel(axes[:2], axes[2:], largest, [_store(made, axes[:2], exponent)])
        return made

    def sample_exponents(self, planes: Buffer, samples: int, channels: int) -> tuple[Buffer, Buffer]:
        """The exponent of s, and ``1 / s``, which is finite."""
        b = self.builder
        sample, channel = Axis("s0", samples), Axis("s1", channels)
        value = b.load(planes.name, linear([axis_index(sample), axis_index(channel)], planes.strides), _F32)
        found = b.reduction_result("largest", 0, _F32)
        lowered = b.apply(Op.SUB, found, b.const(float(self.top), _F32))
        exponent = self._at_least(lowered, _LEAST_SAMPLE)
        if self.flag is None:
            exponent = _unless_nothing(b, found, exponent)
        return self._with_factors("sample", sample, channel, value, exponent)

    def channel_exponents(self, planes: Buffer, scale: Buffer, samples: int, channels: int) -> tuple[Buffer, Buffer]:
        """The same of t: the largest number of a channel beside that of its sample, in the sample where it is most.

        So a sample with a number that is far too large changes nothing for the others. Guesses of quiet channels leave room for
        numbers twice as large as the largest of the sample: behind a ReLU a channel may have next to none, and few of them large.
        """
        b = self.builder
        sample, channel = Axis("c0", samples), Axis("c1", channels)
        plane = b.load(planes.name, linear([axis_index(sample), axis_index(channel)], planes.strides), _F32)
        beside = b.apply(Op.SUB, plane, b.load(scale.name, axis_index(sample), _F32))
        found = b.reduction_result("largest", 0, _F32)
        lowered = b.apply(Op.SUB, found, b.const(float(self.top), _F32))
        exponent = self._at_least(lowered, _LEAST_CHANNEL)
        if self.flag is None:
            exponent = _unless_nothing(b, found, exponent)
        else:
            tiny = b.apply(Op.LT, lowered, b.const(float(_TINY), _F32), dtype=DType.BOOL)
            seen = b.apply(Op.GT, lowered, b.const(-inf, _F32), dtype=DType.BOOL)
            own = b.apply(Op.AND, tiny, seen, dtype=DType.BOOL)
            exponent = b.apply(Op.WHERE, own, exponent, self._at_least(lowered, _QUIET))
        return self._with_factors("channel", channel, sample, beside, exponent)

    def _at_least(self, exponent: Expr, least: int) -> Expr:
        return self.builder.apply(Op.MAXIMUM, exponent, self.builder.const(float(least), _F32))

    def _with_factors(self, what: str, row: Axis, column: Axis, value: Expr, exponent: Expr) -> tuple[Buffer, Buffer]:
        """Buffers of `exponent`, made of the largest `value`, and of ``2^-exponent``."""
        b = self.builder
        made, factor = self._buffer(what, (row.size,)), self._buffer(f"{what}_factor", (row.size,))
        stores = [
            _store(made, (row,), exponent),
            _store(factor, (row,), b.apply(Op.EXP2, b.apply(Op.NEG, exponent))),
        ]
        if self.flag is not None and what == "sample":
            stores.append(_store(self.flag, (row,), b.const(0.0, _F32)))
        self._kernel((row,), (column,), Reduction("largest", ReduceOp.MAX, (value,), _F32), stores)
        return made, factor

    def weight_exponents(self, weight: Buffer, *, transposed: bool) -> Buffer:
        """The exponent of t if it is one by the weights that a channel has."""
        b = self.builder
        axes, exponent = self._weights(weight)
        found = b.reduction_result("largest", 0, _F32)
        return self._of_largest("channel", axes, axes[0 if transposed else 1], exponent, b.apply(Op.NEG, found))

    def out_exponents(self, weight: Buffer, scale: Buffer, *, transposed: bool, finite: bool = True) -> Buffer:
        """The exponent of u; that of what is not `finite` is no number that an exponent may be."""
        b = self.builder
        axes, exponent = self._weights(weight, finite=finite)
        out, channel = (axes[1], axes[0]) if transposed else axes[:2]
        value = b.apply(Op.ADD, exponent, b.load(scale.name, axis_index(channel), _F32))
        lowered = b.apply(Op.SUB, b.reduction_result("largest", 0, _F32), b.const(float(_TOP), _F32))
        return self._of_largest("out", axes, out, value, lowered)

    def _weights(self, weight: Buffer, *, finite: bool = True) -> tuple[tuple[Axis, ...], Expr]:
        """Axes along the weight's dimensions, and the exponent of its element there, if that is `finite`."""
        b = self.builder
        axes = tuple(Axis(f"o{number}", size) for number, size in enumerate(weight.shape))
        at = linear([axis_index(axis) for axis in axes], weight.strides)
        number = b.load(weight.name, at, _F32)
        magnitude = _finite_magnitude(b, number) if finite else b.apply(Op.ABS, number)
        return axes, b.apply(Op.FLOOR, b.apply(Op.LOG2, magnitude))

    def _of_largest(self, what: str, axes: tuple[Axis, ...], row: Axis, value: Expr, made_of_it: Expr) -> Buffer:
        """A buffer of what is made of the largest `value` along `row`; of 0 where there is none."""
        b = self.builder
        made = self._buffer(what, (row.size,))
        largest = Reduction("largest", ReduceOp.MAX, (value,), _F32)
        columns = tuple(axis for axis in axes if axis is not row)
        exponent = _unless_nothing(b, b.reduction_result("largest", 0, _F32), made_of_it)
        self._kernel((row,), columns, largest, [_store(made, (row,), exponent)])
        return made

    def result_factors(self, sample: Buffer, out: Buffer, samples: int, outs: int) -> tuple[Buffer, Buffer]:
        b = self.builder
        axes = Axis("r0", samples), Axis("r1", outs)
        exponents = (b.load(each.name, axis_index(axis), _F32) for each, axis in zip((sample, out), axes, strict=True))
        factors = beyond_and_power(b, b.apply(Op.ADD, *exponents))
        made = self._buffer("result_beyond", (samples, outs)), self._buffer("result", (samples, outs))
        stores = [_store(buffer, axes, factor) for buffer, factor in zip(made, factors, strict=True)]
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
        reduction_loops = ((reduction,),) if reduction else ()
        self.kernels.append(Kernel(name, rows, columns, reduction_loops, tuple(row_stores), tuple(stores), ORIGIN))


def _store(buffer: Buffer, axes: Sequence[Axis], value: Expr) -> Store:
    return Store(buffer.name, linear([axis_index(axis) for axis in axes], buffer.strides), value)


def _finite_magnitude(b: Builder, value: Expr) -> Expr:
    """``|value|``, or 0 where that is not finite."""
    magnitude = b.apply(Op.ABS, value)
    finite = b.apply(Op.LE, magnitude, b.const(LARGEST, _F32), dtype=DType.BOOL)
    return b.apply(Op.WHERE, finite, magnitude, b.const(0.0, _F32))


def _unless_nothing(b: Builder, found: Expr, exponent: Expr) -> Expr:
    """`exponent`, or 0 where nothing but zeros was found."""
    nothing = b.apply(Op.EQ, found, b.const(-inf, _F32), dtype=DType.BOOL)
    return b.apply(Op.WHERE, nothing, b.const(0.0, _F32), exponent)


def powers(b: Builder, exponent: Expr) -> tuple[Expr, Expr]:
    """Two finite numbers whose product is 2^exponent; multiplied one after the other, neither is beyond 1 and the product."""
    half = b.apply(Op.FLOOR, b.apply(Op.MUL, exponent, b.const(0.5, _F32)))
    return b.apply(Op.EXP2, half), b.apply(Op.EXP2, b.apply(Op.SUB, exponent, half))


def beyond_and_power(b: Builder, exponent: Expr) -> tuple[Expr, Expr]:
    """Two powers of two whose product is 2^exponent: what a normal number cannot have of it, which is 1 where it can, and that number.

    A sum of products of halves is multiplied with them in this order; it stays finite and normal between them, if it does behind both.
    """
    least, most = (b.const(float(end), _F32) for end in (_LEAST_POWER, _MOST_POWER))
    near = b.apply(Op.MINIMUM, b.apply(Op.MAXIMUM, exponent, least), most)
    return b.apply(Op.EXP2, b.apply(Op.SUB, exponent, near)), b.apply(Op.EXP2, near)
