"""Functions that do nothing the second time, undo each other, or forget the sign."""

from __future__ import annotations

import torch

from fusepass.config import Algebra
from fusepass.patterns.language import Call, const, op, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.guards import floats

aten = torch.ops.aten

_x, _y = var("x"), var("y")
_ROUNDINGS = (aten.floor, aten.ceil, aten.trunc, aten.round)
_EVEN = (aten.abs, aten.cos, aten.cosh)


def _neg(operand: object) -> Call:
    return op(aten.neg)(operand)


def keeps_sign(found: Match) -> str | None:
    """Minus an integer may wrap before it becomes a float."""
    value = found.y.meta["val"]
    return None if value.is_floating_point() else f"y is {value.dtype}"


def _filled(value: float) -> object:
    """The rewrite that gives `value` everywhere."""

    def rewrite(found: Match) -> torch.fx.Node:
        if found.x.meta["val"].stride() != found.root.meta["val"].stride():
            raise Declined("the result is laid out in another way")
        return found.call(aten.full_like.default, found.x, value, like=found.root)

    return rewrite


RULES: tuple[Rule, ...] = (
    Rule(
        name="rounding-of-rounding",
        pattern=op(*_ROUNDINGS)(op(*_ROUNDINGS)(_x)["inner"]),
        guards=(floats,),
        rewrite=lambda m: m.inner,
        why="whole numbers, infinities and NaN stay what they are, however they are rounded",
        exact=True,
    ),
    Rule(
        name="sign-of-sign",
        pattern=op(aten.sign)(op(aten.sign)(_x)["inner"]),
        rewrite=lambda m: m.inner,
        why="-1, 0 and 1 are their own signs",
        exact=True,
    ),
    Rule(
        name="even-function-of-negation",
        pattern=op(*_EVEN)(_neg(_x)),
        guards=(floats,),
        rewrite=lambda m: m.call(m.root.target, m.x, like=m.root),
        why="f(-x) is f(x) for every number, infinities and NaN",
        exact=True,
    ),
    Rule(
        name="square-of-negation",
        pattern=op(aten.pow)(_neg(_x), const("exponent", lambda value: value in (2, 4, 6))),
        guards=(floats,),
        rewrite=lambda m: m.call(aten.pow.Tensor_Scalar, m.x, m.exponent, like=m.root),
        why="an even power forgets the sign",
        exact=True,
    ),
    Rule(
        name="product-of-negations",
        pattern=op(aten.mul)(_neg(_x), _neg(_y)),
        guards=(floats, keeps_sign),
        rewrite=lambda m: m.call(aten.mul.Tensor, m.x, m.y, like=m.root),
        why="two signs cancel",
        exact=True,
    ),
    Rule(
        name="add-negation",
        pattern=op(aten.add, commutative=True)(_x, _neg(_y)),
        guards=(floats, keeps_sign),
        rewrite=lambda m: m.call(aten.sub.Tensor, m.x, m.y, like=m.root),
        why="x + -y is x - y, bit by bit",
        exact=True,
    ),
    Rule(
        name="subtract-negation",
        pattern=op(aten.sub)(_x, _neg(_y)),
        guards=(floats, keeps_sign),
        rewrite=lambda m: m.call(aten.add.Tensor, m.x, m.y, like=m.root),
        why="x - -y is x + y, bit by bit",
        exact=True,
    ),
    Rule(
        name="extreme-of-one",
        pattern=op(aten.maximum, aten.minimum)(_x, _x),
        rewrite=lambda m: m.x,
        why="the larger and the smaller of x and x are x, for NaN too",
        exact=True,
    ),
    Rule(
        name="logarithm-of-exponential",
        pattern=op(aten.log)(op(aten.exp)(_x)),
        guards=(floats,),
        rewrite=lambda m: m.x,
        why="log undoes exp where exp does not overflow",
        level=Algebra.FINITE,
    ),
    Rule(
        name="exponential-of-logarithm",
        pattern=op(aten.exp)(op(aten.log)(_x)),
        guards=(floats,),
        rewrite=lambda m: m.x,
        why="exp undoes log, which is NaN for what is negative",
        level=Algebra.FINITE,
    ),
    Rule(
        name="square-of-root",
        pattern=op(aten.pow)(op(aten.sqrt)(_x), const("exponent", lambda value: value == 2)),
        guards=(floats,),
        rewrite=lambda m: m.x,
        why="a square undoes a root, which is NaN for what is negative",
        level=Algebra.FINITE,
    ),
    Rule(
        name="root-of-square",
        pattern=op(aten.sqrt)(op(aten.pow)(_x, const("exponent", lambda value: value == 2))),
        guards=(floats,),
        rewrite=lambda m: m.call(aten.abs.default, m.x, like=m.root),
        why="the root of a square is the magnitude, where the square does not overflow",
        level=Algebra.FINITE,
    ),
    Rule(
        name="difference-of-one",
        pattern=op(aten.sub)(_x, _x),
        guards=(floats,),
        rewrite=_filled(0.0),  # type: ignore[arg-type]
        why="x - x is 0 for finite x",
        level=Algebra.FINITE,
        exact=True,
    ),
    Rule(
        name="quotient-of-one",
        pattern=op(aten.div)(_x, _x),
        guards=(floats,),
        rewrite=_filled(1.0),  # type: ignore[arg-type]
        why="x / x is 1 where it is not NaN",
        level=Algebra.FINITE,
        exact=True,
    ),
    Rule(
        name="multiply-by-zero",
        pattern=op(aten.mul, commutative=True)(
            _x, const("zero", lambda value: type(value) in (int, float) and value == 0)
        ),
        guards=(floats,),
        rewrite=_filled(0.0),  # type: ignore[arg-type]
        why="x * 0 is 0 for finite x",
        level=Algebra.FINITE,
        exact=True,
    ),
)
