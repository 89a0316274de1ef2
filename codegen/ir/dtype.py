"""Element types of the kernel IR."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """Arithmetic family of an element type."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"


@dataclass(frozen=True)
class _Info:
    text: str
    nbytes: int
    kind: Kind


class Precision(enum.Enum):
    """In what the products of float32 numbers are computed."""

    FLOAT32 = "float32"  # as exact as float32 arithmetic
    TF32 = "TF32"  # of operands rounded to 10 bits of mantissa, to nearest


class DType(enum.Enum):
    """An element type. Its value carries the short name, the size in bytes and the kind."""

    BOOL = _Info("b8", 1, Kind.BOOL)
    U8 = _Info("u8", 1, Kind.INT)
    I8 = _Info("i8", 1, Kind.INT)
    I16 = _Info("i16", 2, Kind.INT)
    I32 = _Info("i32", 4, Kind.INT)
    I64 = _Info("i64", 8, Kind.INT)
    F16 = _Info("f16", 2, Kind.FLOAT)
    BF16 = _Info("bf16", 2, Kind.FLOAT)
    F32 = _Info("f32", 4, Kind.FLOAT)
    F64 = _Info("f64", 8, Kind.FLOAT)

    def __init__(self, info: _Info) -> None:
        self.nbytes = info.nbytes

    @property
    def is_float(self) -> bool:
        return self.value.kind is Kind.FLOAT

    @property
    def is_int(self) -> bool:
        return self.value.kind is Kind.INT

    @property
    def is_half(self) -> bool:
        """Whether it is a floating-point number of 16 bits, float16 or bfloat16."""
        return self.is_float and self.nbytes == 2

    @property
    def compute(self) -> DType:
        """The type arithmetic on values of this type runs in: halves compute in float32."""
        return DType.F32 if self in (DType.F16, DType.BF16) else self

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest value of an integer type."""
        bits = 8 * self.nbytes
        return (0, 2**bits - 1) if self is DType.U8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    def wrap(self, value: int) -> int:
        """`value` as an integer type keeps it: modulo a power of two."""
        low, high = self.limits
        return (value - low) % (high - low + 1) + low

    def __str__(self) -> str:
        return self.value.text
