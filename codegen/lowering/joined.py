"""Which piece of a concatenation an element lies in, and what that gives: functions that pieces have in common are computed once behind the choice.

A warp whose elements lie in many short pieces goes through the code of each. ``cat([x, sin(x), cos(x), sin(2 * x), cos(2 * x)], -1)`` so
becomes a sine and a cosine of chosen arguments, and a choice between these.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Builder, Const, Expr, Op, children
from fusepass.codegen.ir.index import Bound, Index
from fusepass.codegen.ir.ops import CHEAP


@dataclass(frozen=True)
class Piece:
    """What elements from `start` on are, up to where the next piece starts."""

    start: int
    value: Expr


def chosen(builder: Builder, index: Index, pieces: Sequence[Piece]) -> Expr:
    """The value of the piece that `index` lies in; `pieces` follow each other, all of one type."""
    functions = [_function(piece.value) for piece in pieces]
    common = [each for each in dict.fromkeys(functions) if each is not None and functions.count(each) > 1]
    value = _in_iteration(builder, index, _only(builder, pieces, [each not in common for each in functions]))
    for function in common:
        inside = [each == function for each in functions]
        applied = _applied_to_chosen(builder, index, pieces, inside)
        truths = [Piece(piece.start, builder.const(own, DType.BOOL)) for piece, own in zip(pieces, inside, strict=True)]
        value = (
            applied if all(inside) else builder.apply(Op.WHERE, _in_iteration(builder, index, truths), applied, value)
        )
    return value


def _applied_to_chosen(builder: Builder, index: Index, pieces: Sequence[Piece], inside: Sequence[bool]) -> Expr:
    """The function that the values of the pieces `inside` have in common, of the argument at `index`; of zero elsewhere."""
    first = pieces[inside.index(True)].value
    place = _place(first)
    assert isinstance(first, Apply)
    assert place is not None
    arguments = [
        Piece(piece.start, children(piece.value if own else first)[place])
        for piece, own in zip(pieces, inside, strict=True)
    ]
    args = [*first.args]
    args[place] = chosen(builder, index, _only(builder, arguments, inside))
    return builder.apply(first.op, *args, dtype=first.dtype)


def _only(builder: Builder, pieces: Sequence[Piece], inside: Sequence[bool]) -> list[Piece]:
    """`pieces` with zero in those that are not `inside`."""
    zero = _zero(builder, pieces[0].value)
    return [piece if own else replace(piece, value=zero) for piece, own in zip(pieces, inside, strict=True)]


def _in_iteration(builder: Builder, index: Index, pieces: Sequence[Piece]) -> Expr:
    """The same by one condition after another; nothing is computed of pieces in which `index` does not lie."""
    alike = [next(group) for _, group in groupby(pieces, lambda piece: id(piece.value))]
    ends = [*(piece.start for piece in alike[1:]), index.bounds[1] + 1]
    result = zero = _zero(builder, alike[0].value)
    for piece, end in reversed(list(zip(alike, ends, strict=True))):
        if piece.value is not zero:
            result = builder.masked((Bound(index, piece.start, end),), piece.value, result)
    return result


def _zero(builder: Builder, like: Expr) -> Expr:
    return builder.const(0, like.dtype)


def _function(value: Expr) -> Hashable | None:
    """The function that `value` is of its one argument, if that is worth a choice between arguments; else None."""
    place = _place(value)
    if place is None or not isinstance(value, Apply):
        return None
    argument = value.args[place]
    if value.op in CHEAP and _function(argument) is None:
        return None
    numbers = tuple(id(arg) for number, arg in enumerate(value.args) if number != place)
    return value.op, value.dtype, argument.dtype, place, numbers


def _place(value: Expr) -> int | None:
    """Which argument of a function is no number, if it is the only one."""
    places = [number for number, arg in enumerate(children(value)) if not isinstance(arg, Const)]
    return places[0] if isinstance(value, Apply) and len(places) == 1 else None
