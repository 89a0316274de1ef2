"""Where the result of a kernel's matrix product is wanted: a mask, such as a triangle's, may leave nothing of whole tiles."""

from __future__ import annotations

from dataclasses import dataclass

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Const, Expr, Position, ReductionResult, children, walk
from fusepass.codegen.ir.index import Axis, Index
from fusepass.codegen.ir.ops import Op
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel

_AT_LEAST = {Op.GE: 0, Op.GT: 1}  # by how much more than a number an integer is at least
_AT_MOST = {Op.LE: 0, Op.LT: 1}
_OPPOSITE = {Op.GE: Op.LT, Op.GT: Op.LE, Op.LE: Op.GT, Op.LT: Op.GE}
_MIRRORED = {Op.GE: Op.LE, Op.GT: Op.LT, Op.LE: Op.GE, Op.LT: Op.GT}


@dataclass(frozen=True)
class Wanted:
    """Points at which `index` is `least` or more; at others nothing depends on the product."""

    index: Index
    least: int


def wanted(kernel: Kernel) -> Wanted | None:
    """The points of a product's rows and columns at which its result is wanted; None where that is all of them, as far as is known."""
    assert isinstance(kernel.anchor, Product)
    if kernel.cols or kernel.anchor.apart:
        return None
    found = [_wanted(root, kernel.anchor.name) for root in kernel.roots if _uses(root, kernel.anchor.name)]
    first = found[0] if found else None
    if first is None or any(each != first for each in found):
        return None
    linear = all(isinstance(atom, Axis) and atom in kernel.rows[2:] for atom, _ in first.index.terms)
    return first if linear else None


def _uses(value: Expr, product: str) -> bool:
    return any(isinstance(node, ReductionResult) and node.reduction == product for node in walk(value))


def _wanted(value: Expr, product: str) -> Wanted | None:
    """Where `value`, which uses the product, depends on it."""
    users = [child for child in children(value) if _uses(child, product)]
    if isinstance(value, Apply) and value.op is Op.WHERE and len(users) == 1 and users[0] is not value.args[0]:
        found = _implied(value.args[0], truth=users[0] is value.args[1])
        if found is not None:
            return found
    inside = [_wanted(user, product) for user in users]
    return inside[0] if inside and all(each == inside[0] for each in inside) else None


def _implied(condition: Expr, *, truth: bool) -> Wanted | None:
    """What holds of an index wherever `condition` is `truth`."""
    if not isinstance(condition, Apply) or condition.dtype is not DType.BOOL:
        return None
    op, args = condition.op, condition.args
    if op is Op.WHERE:
        return _of_choice(condition, truth, equal=True)
    if op in (Op.NOT, Op.BIT_NOT):
        return _implied(args[0], truth=not truth)
    if op in ((Op.AND, Op.BIT_AND) if truth else (Op.OR, Op.BIT_OR)):
        return next(filter(None, (_implied(each, truth=truth) for each in args)), None)
    if op in (Op.EQ, Op.NE) and isinstance(args[1], Const):
        return _of_choice(args[0], args[1].value, equal=truth is (op is Op.EQ))
    if op not in _OPPOSITE:
        return None
    if isinstance(args[0], Const):
        op, args = _MIRRORED[op], args[::-1]
    place, number = args
    if not isinstance(place, Position) or not isinstance(number, Const) or not number.dtype.is_int:
        return None
    op, edge = op if truth else _OPPOSITE[op], int(number.value)
    if op in _AT_LEAST:
        return Wanted(place.index, edge + _AT_LEAST[op])
    return Wanted(place.index * -1, _AT_MOST[op] - edge)


def _of_choice(choice: Expr, number: float, *, equal: bool) -> Wanted | None:
    """What holds wherever one of two numbers, as a condition chooses, is the same as `number`, or is not, if not `equal`."""
    if not isinstance(choice, Apply) or choice.op is not Op.WHERE:
        return None
    condition, *numbers = choice.args
    same = [isinstance(each, Const) and each.value == number for each in numbers]
    if same[0] is same[1] or not all(isinstance(each, Const) for each in numbers):
        return None
    return _implied(condition, truth=same[0] is equal)
