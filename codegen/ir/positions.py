"""Arithmetic on positions: what is computed from where an element stands is an index again, or is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.index import Index
from fusepass.codegen.ir.ops import Op

_SIDES = {
    Op.LT: lambda low, high: (high < 0, low >= 0),
    Op.LE: lambda low, high: (high <= 0, low > 0),
    Op.GT: lambda low, high: (low > 0, high <= 0),
    Op.GE: lambda low, high: (low >= 0, high < 0),
    Op.EQ: lambda low, high: (low == high == 0, low > 0 or high < 0),
    Op.NE: lambda low, high: (low > 0 or high < 0, low == high == 0),
}
"""By the bounds of a difference: whether a comparison is always true, and whether it is always false."""


def combined(op: Op, args: Sequence[Index]) -> Index | bool | None:
    """`op` on integers that are `args`, as an index or a truth value; None where it is neither."""
    if op in _SIDES:
        true, false = _SIDES[op](*(args[0] - args[1]).bounds)
        return True if true else False if false else None
    first, constant = args[0], args[-1].constant if not args[-1].terms else None
    match op:
        case Op.CAST:
            return first
        case Op.NEG:
            return first * -1
        case Op.ADD:
            return first + args[1]
        case Op.SUB:
            return first - args[1]
        case Op.MAXIMUM | Op.MINIMUM:
            low, high = (first - args[1]).bounds
            greater = first if low >= 0 else args[1] if high <= 0 else None
            lesser = args[1] if low >= 0 else first if high <= 0 else None
            return greater if op is Op.MAXIMUM else lesser
        case Op.MUL if constant is not None:
            return first * constant
        case Op.MUL if not first.terms:
            return args[1] * first.constant
        case Op.FLOOR_DIV if constant is not None and constant > 0:
            return first // constant
        case Op.REMAINDER if constant is not None and constant > 0:
            return first % constant
        case _:
            return None
