"""Clamps and their kin that do nothing, or nothing more than another one beside them."""

from __future__ import annotations

from math import inf

import torch
from torch import fx

from fusepass.patterns.analysis.interval import interval
from fusepass.patterns.analysis.ranges import Interval
from fusepass.patterns.arguments import arguments
from fusepass.patterns.language import Call, op, var
from fusepass.patterns.matcher import Match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.guards import floats

aten = torch.ops.aten

_x, _y = var("x"), var("y")
_CLAMPS = (aten.clamp, aten.clamp_min, aten.clamp_max, aten.hardtanh, aten.relu)


def _clamp(operand: Call | object) -> Call:
    return op(*_CLAMPS, open=True)(operand)


def limits(node: fx.Node) -> tuple[float, float] | None:
    """Between which numbers a clamp brings its argument; None where they are tensors, NaN, or in the wrong order."""
    if node.target.overloadpacket is aten.relu:  # type: ignore[union-attr]
        return 0.0, inf
    given = arguments(node)
    low, high = given.get("min", given.get("min_val")), given.get("max", given.get("max_val"))
    if isinstance(low, fx.Node) or isinstance(high, fx.Node):
        return None
    found = (-inf if low is None else float(low), inf if high is None else float(high))
    return found if found[0] <= found[1] else None


def clamped_already(found: Match) -> str | None:
    bounds, known = limits(found.root), interval(found.x)
    idle = bounds is not None and known.within(*bounds)
    return None if idle else f"its argument lies between {known.low} and {known.high}"


def not_negative(found: Match) -> str | None:
    known = interval(found.x)
    return None if known.low >= 0 else f"its argument may be {known.low}"


def never_above(found: Match) -> str | None:
    return _dropped(found, interval(found.y).high <= interval(found.x).low)


def never_below(found: Match) -> str | None:
    return _dropped(found, interval(found.y).low >= interval(found.x).high)


def _dropped(found: Match, idle: bool) -> str | None:
    """Why the second operand may not be left out."""
    if interval(found.y).nan:
        return f"{found.y.name} may be NaN"
    return None if idle else f"{found.y.name} may be what is chosen"


def numbers(found: Match) -> str | None:
    given = (limits(found.root), limits(found.inner))
    return "a limit is a tensor, or the limits are in the wrong order" if None in given else None


def _once(found: Match) -> fx.Node:
    (low, high), (first, last) = limits(found.root) or (0, 0), limits(found.inner) or (0, 0)
    outer = Interval(first, last).clamped(low, high)
    bounds = [None if abs(bound) == inf else bound for bound in (outer.low, outer.high)]
    return found.call(aten.clamp.default, found.x, *bounds)


RULES: tuple[Rule, ...] = (
    Rule(
        name="idle-clamp",
        pattern=_clamp(_x),
        guards=(floats, clamped_already),
        rewrite=lambda m: m.x,
        why="numbers that lie between the limits, and NaN, stay what they are",
        exact=True,
    ),
    Rule(
        name="clamp-of-clamp",
        pattern=_clamp(_clamp(_x)["inner"]),
        guards=(floats, numbers),
        rewrite=_once,
        why="two clamps are one, between the inner limits clamped by the outer ones; NaN passes through each",
        exact=True,
    ),
    Rule(
        name="abs-of-not-negative",
        pattern=op(aten.abs)(_x),
        guards=(floats, not_negative),
        rewrite=lambda m: m.x,
        why="abs leaves what is not negative, and NaN, as it is",
        exact=True,
    ),
    Rule(
        name="idle-maximum",
        pattern=op(aten.maximum, commutative=True)(_x, _y),
        guards=(floats, never_above),
        rewrite=lambda m: m.x,
        why="the other operand is never NaN and never above",
        exact=True,
    ),
    Rule(
        name="idle-minimum",
        pattern=op(aten.minimum, commutative=True)(_x, _y),
        guards=(floats, never_below),
        rewrite=lambda m: m.x,
        why="the other operand is never NaN and never below",
        exact=True,
    ),
)
