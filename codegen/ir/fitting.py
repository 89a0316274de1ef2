"""Which values a narrower type holds as they are: rounding them to it changes no bit."""

from __future__ import annotations

import math
import struct

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Const, Expr, Masked, Op, ReduceOp, Window

_CHOOSING = frozenset({Op.MAXIMUM, Op.MINIMUM, Op.FMAX, Op.FMIN, Op.NEG, Op.ABS, Op.COPYSIGN})
"""Operations that give one of their operands, or that with another sign."""

_WHOLE = frozenset({Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC})
"""Those that give a whole number near the operand, which has no more digits than it."""


def fits(value: Expr, dtype: DType) -> bool:
    """Whether `value`, a float, is always a number of the narrower floating-point type `dtype`, as far as is seen at once."""
    seen, stack = set[int](), [value]
    while stack:
        node = stack.pop()
        if id(node) in seen or node.dtype is dtype:
            continue
        seen.add(id(node))
        match node:
            case Const(number):
                if not _holds(dtype, float(number)):
                    return False
            case Apply(Op.CAST, (source,)) if source.dtype is DType.BOOL or source.dtype.is_float:
                stack += () if source.dtype is DType.BOOL else (source,)
            case Apply(Op.WHERE, (_, *chosen)):
                stack += chosen
            case Apply(op, args) if op in _CHOOSING or op in _WHOLE:
                stack += args
            case Apply(Op.SIGN):
                pass  # -1, 0 or 1
            case Masked(_, inside, other):
                stack += (inside, other)
            case Window(ReduceOp.MAX | ReduceOp.MIN, _, inside):
                stack.append(inside)
            case _:
                return False
    return True


def _holds(dtype: DType, number: float) -> bool:
    if not math.isfinite(number):
        return True
    try:
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        wide: float = struct.unpack("<f", struct.pack("<f", number))[0]
        if dtype is DType.BF16:
            return wide == number and not bits & 0xFFFF
        return bool(struct.unpack("<e", struct.pack("<e", number))[0] == number)
    except OverflowError:
        return False
