"""Arithmetic that changes nothing, or nothing the second time."""

from __future__ import annotations

import torch

from fusepass.patterns.language import const, equals, op, var
from fusepass.patterns.matcher import Match
from fusepass.patterns.rule import Rule

aten = torch.ops.aten

_x = var("x")


def integers(found: Match) -> str | None:
    dtype = found.x.meta["val"].dtype
    return f"-0.0 + 0.0 is 0.0 in {dtype}" if dtype.is_floating_point or dtype.is_complex else None


RULES: tuple[Rule, ...] = (
    Rule(
        name="multiply-by-one",
        pattern=op(aten.mul, commutative=True)(_x, const("one", equals(1))),
        rewrite=lambda m: m.x,
        why="x * 1 is x, for NaN, infinities and both zeros too",
        exact=True,
    ),
    Rule(
        name="divide-by-one",
        pattern=op(aten.div, aten.true_divide)(_x, const("one", equals(1))),
        rewrite=lambda m: m.x,
        why="x / 1 is x, for NaN, infinities and both zeros too; an integer x would change its type",
        exact=True,
    ),
    Rule(
        name="subtract-zero",
        pattern=op(aten.sub)(_x, const("zero", equals(0.0)), alpha=const("alpha", equals(1))),
        rewrite=lambda m: m.x,
        why="x - 0.0 is x, for -0.0 too",
        exact=True,
    ),
    Rule(
        name="add-negative-zero",
        pattern=op(aten.add, commutative=True)(_x, const("zero", equals(-0.0))),
        rewrite=lambda m: m.x,
        why="x + -0.0 is x, for both zeros",
        exact=True,
    ),
    Rule(
        name="add-zero-to-integers",
        pattern=op(aten.add, commutative=True)(_x, const("zero", equals(0.0))),
        guards=(integers,),
        rewrite=lambda m: m.x,
        why="integers have one zero",
        exact=True,
    ),
    Rule(
        name="power-of-one",
        pattern=op(aten.pow)(_x, const("one", equals(1))),
        rewrite=lambda m: m.x,
        why="pow(x, 1) is x, for NaN too",
        exact=True,
    ),
    Rule(
        name="double-negation",
        pattern=op(aten.neg)(op(aten.neg)(_x)),
        rewrite=lambda m: m.x,
        why="negation flips the sign bit, in integers it wraps both times",
        exact=True,
    ),
    Rule(
        name="relu-of-relu",
        pattern=op(aten.relu)(op(aten.relu)(_x)["inner"]),
        rewrite=lambda m: m.inner,
        why="relu leaves what is not negative, and NaN, as it is",
        exact=True,
    ),
    Rule(
        name="abs-of-abs",
        pattern=op(aten.abs)(op(aten.abs)(_x)["inner"]),
        rewrite=lambda m: m.inner,
        why="abs leaves what is not negative, and the integer that has no opposite, as it is",
        exact=True,
    ),
)
