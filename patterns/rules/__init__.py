"""The rewrite rules that fusepass comes with."""

from __future__ import annotations

from fusepass.patterns.rule import Rule
from fusepass.patterns.rules import (
    arithmetic,
    bounds,
    constants,
    copies,
    identities,
    pools,
    reductions,
    scalars,
    single,
    views,
)

RULES: tuple[Rule, ...] = (
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
)
