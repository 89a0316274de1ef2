"""Reductions and normalisations over dimensions of size 1."""

from __future__ import annotations

import torch
from torch import fx

from fusepass.patterns.arguments import arguments
from fusepass.patterns.language import const, op, var
from fusepass.patterns.matcher import Match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.guards import floats
from fusepass.patterns.rules.reductions import dims, shaped

aten = torch.ops.aten

_x = var("x")
_same_type = const("half_to_float", lambda value: value is False)


def over_one(found: Match) -> str | None:
    shape = found.x.meta["val"].shape
    return None if all(shape[dim] == 1 for dim in dims(found.root)) else "more than one number is reduced"


def along_one(found: Match) -> str | None:
    shape = found.x.meta["val"].shape
    return None if shape and shape[found.dim] == 1 else "more than one number is normalised"


def of_population(found: Match) -> str | None:
    return None if arguments(found.root)["correction"] == 0 else "the variance of a sample of one is NaN"


def _zero(found: Match) -> fx.Node:
    """0 where x is finite, else NaN."""
    return found.call(aten.sub.Tensor, found.x, found.x)


RULES: tuple[Rule, ...] = (
    Rule(
        name="reduction-of-one",
        pattern=op(aten.sum, aten.mean, aten.amax, aten.amin, aten.prod, aten.logsumexp, open=True)(_x),
        guards=(floats, over_one),
        rewrite=lambda m: shaped(m, m.x),
        why="sum, mean, product, extremes and log-sum-exp of one number are that number, be it infinite or NaN",
        exact=True,
    ),
    Rule(
        name="variance-of-one",
        pattern=op(aten.var, open=True)(_x),
        guards=(floats, over_one, of_population),
        rewrite=lambda m: shaped(m, _zero(m)),
        why="the mean of one number is itself: x - x, which is 0 for finite x and NaN for the others",
        exact=True,
    ),
    Rule(
        name="softmax-of-one",
        pattern=op(aten._softmax)(_x, const("dim"), _same_type),
        guards=(floats, along_one),
        rewrite=lambda m: m.call(aten.add.Tensor, _zero(m), 1.0),
        why="x - x + 1: 1 for finite x, NaN for the others, as exp(x - x) divided by itself is",
        exact=True,
    ),
    Rule(
        name="log-softmax-of-one",
        pattern=op(aten._log_softmax)(_x, const("dim"), _same_type),
        guards=(floats, along_one),
        rewrite=_zero,
        why="x - x: 0 for finite x, NaN for the others",
        exact=True,
    ),
)
