"""A matrix product inside a kernel: where its operands lie, and with what arithmetic it is computed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import ceil

from fusepass.codegen.ir.dtype import DType, Precision


class Arithmetic(enum.Enum):
    """How a tensor core computes a product; sums are float32."""

    TF32_THREE = "TF32 x 3"  # float32 accuracy: each number in two TF32 parts, three products
    TF32 = "TF32"  # float32 numbers rounded to TF32
    HALVES = "halves"  # 16-bit numbers as they are


@dataclass(frozen=True)
class Operand:
    """A stored operand, a view of a buffer from its beginning; strides in elements along (batch, row, inner).

    The right operand's rows are the result's columns. A stride is 0 where the operand is the same along the axis.
    """

    buffer: str
    batch: int
    row: int
    inner: int


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
    """

    name: str
    left: Operand
    right: Operand
    inner: int
    length: int
    dtype: DType
    precision: Precision = Precision.FLOAT32

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
        return self.left.buffer, self.right.buffer

    @property
    def description(self) -> str:
        """It in words, for the text form of a program."""
        split = f", {self.pieces} pieces of {self.length}" if self.pieces > 1 else ""
        return (
            f"product of {_text(self.left)} by {_text(self.right)}, {self.inner} terms{split}, {self.arithmetic.value}"
        )


def _text(operand: Operand) -> str:
    return f"{operand.buffer} strides ({operand.batch},{operand.row},{operand.inner})"
