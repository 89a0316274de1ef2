"""A rewrite rule: a pattern, what takes its place, and why that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from fusepass.patterns.language import Call
from fusepass.patterns.matcher import Match


@dataclass(frozen=True)
class Rule:
    """Data for `fusepass.patterns.simplify.simplify`.

    A rule need not look at metadata or aliasing: a result whose shape, type, strides or device differ, or whose memory
    the caller could tell from the original's, is never put in place.

    Attributes:
        name: unique; ``FUSEPASS_DISABLE=name`` switches the rule off.
        pattern: what is replaced.
        rewrite: gives the node to put in place, a captured one or one made by `Match.call`.
        why: why both are equal, for every input, NaN and infinities included.
        guards: each gives the reason why a match is left alone, or None.
    """

    name: str
    pattern: Call
    rewrite: Callable[[Match], fx.Node]
    why: str
    guards: tuple[Callable[[Match], str | None], ...] = ()
