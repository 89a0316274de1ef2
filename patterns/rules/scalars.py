"""Chains of additions and multiplications with numbers become one of each."""

from __future__ import annotations

import torch

from fusepass.config import Algebra
from fusepass.patterns.analysis.affine import Affine, chain
from fusepass.patterns.language import op, var
from fusepass.patterns.matcher import Match
from fusepass.patterns.rule import Rule

aten = torch.ops.aten

_STEPS = (aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg)
_SMALL = 1e-3
"""Of the largest number of a type: what may be added without a word about overflow."""


def _line(found: Match) -> Affine | None:
    return chain(found.root)


def shorter(found: Match) -> str | None:
    line = _line(found)
    return None if line is not None and line.terms < line.steps else "no chain that can be shorter"


def representable(found: Match) -> str | None:
    """Scale and shift must be ordinary numbers of the type: neither overflown nor, unless meant, vanished."""
    line = _line(found)
    assert line is not None
    facts = torch.finfo(line.source.meta["val"].dtype)
    fits = facts.tiny <= abs(line.scale) <= facts.max and line.offsets <= _SMALL * facts.max
    vanished = 0 < abs(line.shift) < facts.tiny
    return None if fits and not vanished else f"{line.scale} and {line.shift} are out of the range of the type"


def never_larger(found: Match) -> str | None:
    """No intermediate result may be infinite where the last one is not."""
    line = _line(found)
    assert line is not None
    return None if line.growth <= max(1.0, abs(line.scale)) else "an intermediate result may overflow"


def _collapse(found: Match) -> torch.fx.Node:
    line = _line(found)
    assert line is not None
    node = line.source
    if line.scale == -1:
        node = found.call(aten.neg.default, node)
    elif line.scale != 1:
        node = found.call(aten.mul.Tensor, node, line.scale)
    return found.call(aten.add.Tensor, node, line.shift) if line.shift != 0 else node


RULES: tuple[Rule, ...] = (
    Rule(
        name="affine-chain",
        pattern=op(*_STEPS, open=True)(var("x")),
        guards=(shorter, representable, never_larger),
        rewrite=_collapse,
        why="(x * a + b) * c is x * (a * c) + b * c; no intermediate result is larger than both x and the result",
    ),
    Rule(
        name="affine-chain-that-shrinks",
        pattern=op(*_STEPS, open=True)(var("x")),
        guards=(shorter, representable),
        rewrite=_collapse,
        why="(x * a) * b is x * (a * b); where x * a overflows, the result here does not",
        level=Algebra.FINITE,
    ),
)
