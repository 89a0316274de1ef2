"""Chains of additions and multiplications with numbers become one of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fusepass.config import Algebra
from fusepass.patterns.analysis.affine import Affine, chains
from fusepass.patterns.language import op, var
from fusepass.patterns.matcher import Match
from fusepass.patterns.rule import Rule

aten = torch.ops.aten

_STEPS = (aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg)
_SMALL = 1e-3
"""Of the largest number of a type: what may be added without a word about overflow."""


def _representable(line: Affine) -> bool:
    """Whether scale and shift are ordinary numbers of the type: neither overflown nor, unless meant, vanished.

    What is added to a half is rounded to one, the same way for every element, which sums would gather. So there it is to be one.
    """
    dtype = line.source.meta["val"].dtype
    facts = torch.finfo(dtype)
    fits = facts.tiny <= abs(line.scale) <= facts.max and line.offsets <= _SMALL * facts.max
    added = line.lead if line.adds_first else line.shift
    rounded = dtype.itemsize <= 2 and float(torch.tensor(added, dtype=dtype)) != added
    return fits and not rounded and not 0 < abs(added) < facts.tiny


def _exact(line: Affine) -> bool:
    """Whether no difference of numbers that may be nearly equal becomes one of their multiples."""
    return not line.adds_first or line.rest == 0


def _never_larger(line: Affine) -> bool:
    """Whether no intermediate result can be infinite where the last one is not."""
    return line.growth <= max(1.0, abs(line.scale))


def _longest(found: Match, *conditions: Callable[[Affine], bool]) -> Affine | None:
    """The longest chain that ends in the root, can be shorter, and meets `conditions`."""
    longest = None
    for line in chains(found.root):  # shorter ones first
        if line.terms < line.steps and all(holds(line) for holds in conditions):
            longest = line
    return longest


def _safe(found: Match) -> Affine | None:
    return _longest(found, _representable, _exact, _never_larger)


def _finite(found: Match) -> Affine | None:
    return _longest(found, _representable, _exact)


def _exists(line: Callable[[Match], Affine | None]) -> Callable[[Match], str | None]:
    return lambda found: None if line(found) is not None else "no chain that can be shorter without overflow"


def _collapsed(line: Callable[[Match], Affine | None]) -> Callable[[Match], fx.Node]:
    """The rewrite that computes scale times source plus shift."""

    def rewrite(found: Match) -> fx.Node:
        short = line(found)
        assert short is not None
        node = short.source
        if short.adds_first:
            return found.call(aten.mul.Tensor, found.call(aten.add.Tensor, node, short.lead), short.scale)
        if short.scale == -1:
            node = found.call(aten.neg.default, node)
        elif short.scale != 1:
            node = found.call(aten.mul.Tensor, node, short.scale)
        return found.call(aten.add.Tensor, node, short.shift) if short.shift != 0 else node

    return rewrite


RULES: tuple[Rule, ...] = (
    Rule(
        name="affine-chain",
        pattern=op(*_STEPS, open=True)(var("x")),
        guards=(_exists(_safe),),
        rewrite=_collapsed(_safe),
        why="(x * a + b) * c is x * (a * c) + b * c, and (x + b) * a * c is (x + b) * (a * c); no intermediate result is larger than both x and the result",
    ),
    Rule(
        name="affine-chain-that-shrinks",
        pattern=op(*_STEPS, open=True)(var("x")),
        guards=(_exists(_finite),),
        rewrite=_collapsed(_finite),
        why="(x * a) * b is x * (a * b); where x * a overflows, the result here does not",
        level=Algebra.FINITE,
    ),
)
