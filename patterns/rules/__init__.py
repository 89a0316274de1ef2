"""The rewrite rules that fusepass comes with, each exact for every input.

Rules about anchors come first: they look through what others would move.
"""

from __future__ import annotations

from fusepass.patterns.rule import Rule
from fusepass.patterns.rules import (
    arithmetic,
    attention,
    bounds,
    cancelling,
    constants,
    convolution,
    copies,
    folding,
    identities,
    linear,
    pooling,
    pools,
    preceding,
    reductions,
    scalars,
    single,
    spelling,
    views,
)

RULES: tuple[Rule, ...] = (
    *attention.RULES,
    *linear.RULES,
    *convolution.RULES,
    *pooling.RULES,
    *folding.RULES,
    *preceding.RULES,
    *cancelling.RULES,
    *constants.RULES,
    *arithmetic.RULES,
    *identities.RULES,
    *bounds.RULES,
    *scalars.RULES,
    *single.RULES,
    *reductions.RULES,
    *pools.RULES,
    *copies.RULES,
    *views.RULES,
    *spelling.RULES,
)
