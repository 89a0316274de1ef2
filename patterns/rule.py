"""A rewrite rule: a pattern, what takes its place, and why that is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from fusepass.config import Algebra
from fusepass.patterns.language import Call
from fusepass.patterns.matcher import Match


@dataclass(frozen=True)
class Rule:
    """Data for `fusepass.patterns.simplify.simplify`.

    A rule need not look at metadata, aliasing or cost: a result whose shape, type, strides or device differ, whose memory
    the caller could tell from the original's, or that costs as much as what it replaces, is never put in place.

    Attributes:
        name: unique; ``FUSEPASS_DISABLE=name`` switches the rule off.
        pattern: what is replaced.
        rewrite: gives the node to put in place, a captured one or one made by `Match.call`; for an operator with several
            results a node for each that is used, by its number.
        why: why both are equal; for every input, NaN and infinities included, unless `level` is FINITE.
        guards: each gives the reason why a match is left alone, or None.
        level: the least option ``algebra`` under which the rule is applied.
        exact: whether not a bit changes, in 16-bit types neither: only then is it applied where each value has the bits that eager rounds it to.
        early: whether the whole graph is tried before the other rules are, which would move what this one looks for.
    """

    name: str
    pattern: Call
    rewrite: Callable[[Match], fx.Node | Mapping[int, fx.Node]]
    why: str
    guards: tuple[Callable[[Match], str | None], ...] = ()
    level: Algebra = Algebra.SAFE
    exact: bool = False
    early: bool = False
