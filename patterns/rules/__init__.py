"""The rewrite rules that fusepass comes with, each exact for every input."""

from __future__ import annotations

from fusepass.patterns.rule import Rule
from fusepass.patterns.rules import arithmetic, convolution, copies, linear, pooling, views

RULES: tuple[Rule, ...] = (
    *arithmetic.RULES,
    *copies.RULES,
    *views.RULES,
    *linear.RULES,
    *convolution.RULES,
    *pooling.RULES,
)
