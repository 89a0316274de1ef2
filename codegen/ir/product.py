"""A matrix product inside a kernel: where its operands lie, and with what arithmetic it is computed."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from operator import mul

from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.index import Index, delinearize, linear


class Arithmetic(enum.Enum):
    """How a tensor core computes a product; sums are float32."""

    TF32_THREE = "TF32 x 3"  # float32 accuracy: each number in two TF32 parts, three products
    TF32 = "TF32"  # float32 numbers rounded to TF32
    HALVES = "halves"  # 16-bit numbers as they are


@dataclass(frozen=True)
class Nested:
    """A dimension of an operand that is made of several, slowest first; strides in elements, of which the same may be met twice."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return " + ".join(f"{size} by {stride}" for size, stride in zip(self.sizes, self.strides, strict=True))


PLACE = 8
"""Numbers of a place of `Runs`."""

Stride = int | Nested
"""How an operand goes on along one of its dimensions, in elements."""


def nested(sizes: Sequence[int], strides: Sequence[int]) -> Stride:
    """Dimensions one below the other as one, slowest first, in as few parts as can be."""
    parts: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if parts and parts[-1][1] == size * stride:
            parts[-1] = (parts[-1][0] * size, stride)
        else:
            parts.append((size, stride))
    if len(parts) < 2:
        return parts[0][1] if parts else 1
    return Nested(*map(tuple, zip(*parts, strict=True)))


def parts_of(stride: Stride, count: int) -> tuple[tuple[int, int], ...]:
    """(size, stride) of the parts of a dimension of `count` elements, slowest first."""
    return tuple(zip(stride.sizes, stride.strides, strict=True)) if isinstance(stride, Nested) else ((count, stride),)


@dataclass(frozen=True)
class Border:
    """An axis of a stored tensor beyond whose ends an operand has zeros.

    Row r and term k are at place ``r // below % rows * step + k // deeper % terms * apart - before`` of it.

    Attributes:
        size, stride: of the axis.
        before: places that the first row and term are before the axis' first.
        rows, below, step: points of rows along the axis, how many rows make one, and places from one to the next.
        terms, deeper, apart: the same of terms.
    """

    size: int
    stride: int
    before: int
    rows: int
    below: int
    step: int
    terms: int
    deeper: int
    apart: int

    @property
    def is_met(self) -> bool:
        """Whether a row and a term are beyond an end."""
        last = (self.rows - 1) * self.step + (self.terms - 1) * self.apart - self.before
        return self.before > 0 or last >= self.size


@dataclass(frozen=True)
class Operand:
    """A stored operand, a view of a buffer from element `offset` on; strides in elements along (batch, row, inner).

    The right operand's rows are the result's columns. A stride is 0 where the operand is the same along the axis.
    Where there is a `border`, it names all axes of a tensor but those of samples, `batch` apart, which are slower than all rows, and of
    channels, which are neighbours.
    """

    buffer: str
    batch: int
    row: Stride
    inner: Stride
    offset: int = 0
    border: tuple[Border, ...] = ()

    def place(self, batch: Index, row: Index, inner: Index) -> Index:
        """Where the element at a point stands in the buffer."""
        return batch * self.batch + _along(self.row, row) + _along(self.inner, inner) + self.offset

    def extent(self, batches: int, rows: int, inner: int) -> int:
        """Elements from the buffer's first to one past the last, where there are any."""
        if self.border:
            samples = batches * rows // prod(axis.rows for axis in self.border)
            channels = inner // prod(axis.terms for axis in self.border)
            last = sum((axis.size - 1) * axis.stride for axis in self.border)
            return (samples - 1) * self.batch + last + channels
        steps = ((batches, self.batch), *parts_of(self.row, rows), *parts_of(self.inner, inner))
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)


def reach(stride: Stride, count: int) -> int:
    """No place before element `count` of a dimension, which may lie past its end, is further on than this."""
    (_, first), *inner = parts_of(stride, count)
    return ceil(count / prod(size for size, _ in inner)) * first + sum(size * step for size, step in inner)


def _along(stride: Stride, index: Index) -> Index:
    return linear(delinearize(index, stride.sizes), stride.strides) if isinstance(stride, Nested) else index * stride


@dataclass(frozen=True)
class Runs:
    """A right operand whose columns are neighbours: *places* of some numbers, of which a term says how many places on, in which plane.

    Terms are, slowest first, by (*outer, taps, planes, numbers of a place). For all taps a column and its neighbours read places that
    overlap, which are a *run* for each point of `outer`.

    Attributes:
        outer: (size, stride) of each, in places.
        taps, apart: their number, and how many places one is from the next.
        planes: of places; numbers of a place stand for themselves in no other.
        plane: places of each.
    """

    outer: tuple[tuple[int, int], ...]
    taps: int
    apart: int
    planes: int
    plane: int

    @property
    def count(self) -> int:
        """Runs."""
        return prod(size for size, _ in self.outer)

    @property
    def are_parted(self) -> bool:
        """Whether runs have some of the channels each: what `outer` has of whole planes leads to others."""
        return any(stride >= self.plane for _, stride in self.outer)

    @property
    def terms(self) -> int:
        """Of a run."""
        return self.taps * self.planes * PLACE

    def chain(self, columns: int) -> Chain:
        """The segments of tiles of so many columns."""
        sizes, strides = zip(*self.outer, strict=True) if self.outer else ((), ())
        places = [sum(map(mul, point, strides)) for point in itertools.product(*map(range, sizes))]
        return Chain(1 + max(place // columns for place in places), max(place % columns for place in places))

    @property
    def inner(self) -> Stride:
        """Along the terms."""
        parts = [*self.outer, (self.taps, self.apart), (self.planes, self.plane)]
        sizes, strides = zip(*parts, strict=True)
        return nested([*sizes, PLACE], [*(PLACE * stride for stride in strides), 1])


@dataclass(frozen=True)
class Chain:
    """What tiles that follow each other take of a right operand in `Runs`: segments, each of which begins where a tile does.

    Attributes:
        depth: segments of a tile.
        more: places that a segment has more than a run.
    """

    depth: int
    more: int


@dataclass(frozen=True)
class Filling:
    """What a right operand in `Runs` is made of where a product makes it itself: a float32 tensor whose numbers become scaled halves, with a
    border of zeros around each channel's image.

    Attributes:
        source: the tensor; the elements of a channel's image follow each other.
        sample, channel: its strides along these.
        image: (size, places before, places in all) of each spatial axis.
        factors: buffers of what numbers are multiplied with, by sample and by channel.
        overflow_flag: the buffer whose first number becomes 1 where a product is beyond all halves; what is nearer to zero than any is zero.
    """

    source: str
    sample: int
    channel: int
    image: tuple[tuple[int, int, int], ...]
    factors: tuple[str, str]
    overflow_flag: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The buffers that it reads."""
        return self.source, *self.factors


@dataclass(frozen=True)
class Product:
    """What a kernel computes before its stores: a product of matrices, for each element of its rows.

    The kernel's rows are (piece, batch, row, column); its expressions have the result as ``Stat(name, 0)``, a float32.

    Attributes:
        name: what stats call it.
        left, right: the operands.
        inner: terms of a sum.
        length: terms that one piece of a sum has, the last maybe fewer; `inner` where sums are whole.
        dtype: of the operands.
        precision: of the products, where they are float32.
        apart: where the kernel's columns are rows of the product, how far one is from the next: so many rows of the kernel lie between
            each other. 0 where they are columns of the product, neighbours of each other.
        runs: how the right operand lies, where its columns are neighbours.
        filling: what the right operand could be made of.
        fills: whether it is, and not read from its buffer.
    """

    name: str
    left: Operand
    right: Operand
    inner: int
    length: int
    dtype: DType
    precision: Precision = Precision.FLOAT32
    apart: int = 0
    runs: Runs | None = None
    filling: Filling | None = None
    fills: bool = False

    @property
    def arithmetic(self) -> Arithmetic:
        """How it is computed."""
        if self.dtype is not DType.F32:
            return Arithmetic.HALVES
        return Arithmetic.TF32 if self.precision is Precision.TF32 else Arithmetic.TF32_THREE

    @property
    def pieces(self) -> int:
        """Parts of each sum, which are added afterwards."""
        return ceil(self.inner / self.length)

    @property
    def reads(self) -> tuple[str, ...]:
        """The buffers that it reads."""
        return (self.left.buffer, *(self.filling.reads if self.fills and self.filling else (self.right.buffer,)))

    @property
    def description(self) -> str:
        """It in words, for the text form of a program."""
        split = f", {self.pieces} pieces of {self.length}" if self.pieces > 1 else ""
        split += f", columns are rows {self.apart} apart" if self.apart else ""
        split += f", {self.runs.count} runs of {self.runs.taps} taps" if self.runs else ""
        split += f", made of {self.filling.source}" if self.fills and self.filling else ""
        return (
            f"product of {_text(self.left)} by {_text(self.right)}, {self.inner} terms{split}, {self.arithmetic.value}"
        )


def _text(operand: Operand) -> str:
    start = f" from {operand.offset}" if operand.offset else ""
    border = ", bordered" if operand.border else ""
    return f"{operand.buffer}{start} strides ({operand.batch},{operand.row},{operand.inner}){border}"
