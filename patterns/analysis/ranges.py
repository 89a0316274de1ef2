"""The interval of an operator's result from those of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


@dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`, both included, and perhaps NaN."""

    low: float = -inf
    high: float = inf
    nan: bool = True

    @property
    def bounded(self) -> bool:
        """Whether no element is infinite."""
        return -inf < self.low and self.high < inf

    def within(self, low: float, high: float) -> bool:
        """Whether every element that is a number lies between `low` and `high`."""
        return low <= self.low and self.high <= high

    def clamped(self, low: float, high: float) -> Interval:
        """The interval of ``clamp(x, low, high)``, which keeps NaN."""
        return replace(self, low=min(max(self.low, low), high), high=min(max(self.high, low), high))

    def or_else(self, other: Interval) -> Interval:
        """The least interval that holds both."""
        return Interval(min(self.low, other.low), max(self.high, other.high), self.nan or other.nan)


ANYTHING = Interval()
_SUMMABLE = 1e25
"""Magnitudes whose sum over any tensor float32 holds."""

_Given = Mapping[str, Any]
_Look = Callable[[Any], Interval]


def _clamp(given: _Given, look: _Look) -> Interval:
    bounds = [given.get("min", given.get("min_val")), given.get("max", given.get("max_val"))]
    operand = look(given["self"])
    if any(isinstance(bound, fx.Node) for bound in bounds):
        return ANYTHING
    low, high = bounds
    return operand.clamped(-inf if low is None else float(low), inf if high is None else float(high))


def _absolute(given: _Given, look: _Look) -> Interval:
    x = look(given["self"])
    least = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
    return Interval(least, max(abs(x.low), abs(x.high)), x.nan)


def _negative(given: _Given, look: _Look) -> Interval:
    x = look(given["self"])
    return Interval(-x.high, -x.low, x.nan)


def _increasing(function: Callable[[float], float], domain: float = -inf) -> Callable[[_Given, _Look], Interval]:
    """The rule of an increasing function; below `domain` it gives NaN."""

    def rule(given: _Given, look: _Look) -> Interval:
        x = look(given["self"])
        low, high = (function(max(bound, domain)) for bound in (x.low, x.high))
        return Interval(low, high, x.nan or x.low < domain)

    return rule


def _exponential(x: float) -> float:
    return math.exp(x) if x < 700 else inf


def _power(given: _Given, look: _Look) -> Interval:
    exponent = given["exponent"]
    x = look(given["self"])
    if isinstance(exponent, fx.Node) or exponent not in (2, 4):
        return ANYTHING
    most = max(abs(x.low), abs(x.high))
    return Interval(0.0, most**exponent if most < 1e70 else inf, x.nan)


def _sum_of(given: _Given, look: _Look) -> Interval:
    return _added(look(given["self"]), _scaled(look(given["other"]), given.get("alpha", 1)))


def _difference(given: _Given, look: _Look) -> Interval:
    return _added(look(given["self"]), _scaled(look(given["other"]), -given.get("alpha", 1)))


def _reversed_difference(given: _Given, look: _Look) -> Interval:
    return _added(look(given["other"]), _scaled(look(given["self"]), -given.get("alpha", 1)))


def _added(x: Interval, y: Interval) -> Interval:
    opposite = (x.low == -inf and y.high == inf) or (x.high == inf and y.low == -inf)
    low = -inf if -inf in (x.low, y.low) else x.low + y.low
    high = inf if inf in (x.high, y.high) else x.high + y.high
    return Interval(low, high, x.nan or y.nan or opposite)


def _scaled(x: Interval, factor: float) -> Interval:
    return _multiplied(x, Interval(float(factor), float(factor), nan=False))


def _product_of(given: _Given, look: _Look) -> Interval:
    if given["self"] is given["other"]:
        x = look(given["self"])
        most = max(abs(x.low), abs(x.high))
        return Interval(0.0, most * most, x.nan)
    return _multiplied(look(given["self"]), look(given["other"]))


def _multiplied(x: Interval, y: Interval) -> Interval:
    corners = [0.0 if 0 in (a, b) else a * b for a, b in product((x.low, x.high), (y.low, y.high))]
    zero_by_infinity = (not x.bounded and y.low <= 0 <= y.high) or (not y.bounded and x.low <= 0 <= x.high)
    return Interval(min(corners), max(corners), x.nan or y.nan or zero_by_infinity)


def _quotient(given: _Given, look: _Look) -> Interval:
    if given.get("rounding_mode") is not None:
        return ANYTHING
    x, y = look(given["self"]), look(given["other"])
    if y.low <= 0 <= y.high:
        return ANYTHING
    inverse = Interval(1 / y.high, 1 / y.low, nan=y.nan or not (x.bounded or y.bounded))
    return _multiplied(x, inverse)


def _larger(given: _Given, look: _Look) -> Interval:
    x, y = look(given["self"]), look(given["other"])
    return Interval(max(x.low, y.low), max(x.high, y.high), x.nan or y.nan)


def _smaller(given: _Given, look: _Look) -> Interval:
    x, y = look(given["self"]), look(given["other"])
    return Interval(min(x.low, y.low), min(x.high, y.high), x.nan or y.nan)


def _choice(given: _Given, look: _Look) -> Interval:
    return look(given["self"]).or_else(look(given["other"]))


def _joined(given: _Given, look: _Look) -> Interval:
    parts: Sequence[fx.Node] = given["tensors"]
    found = look(parts[0])
    for part in parts[1:]:
        found = found.or_else(look(part))
    return found


def _padded(given: _Given, look: _Look) -> Interval:
    return look(given["self"]).or_else(look(given["value"]))


def _average(given: _Given, look: _Look) -> Interval:
    """The mean lies between the extremes; padding counts as zero."""
    if given.get("divisor_override") is not None:
        return ANYTHING
    x = look(given["self"])
    both = x.low == -inf and x.high == inf
    low, high = (bound if abs(bound) < _SUMMABLE else math.copysign(inf, bound) for bound in (x.low, x.high))
    found = Interval(low, high, x.nan or both)
    padded = given.get("padding") not in (None, 0) and any(given["padding"])
    return found.or_else(Interval(0.0, 0.0, nan=False)) if padded else found


def _total(given: _Given, look: _Look) -> Interval:
    """Of a sum no more than the sign is known."""
    x = look(given["self"])
    both = x.low < 0 < x.high
    return Interval(0.0 if x.low >= 0 else -inf, 0.0 if x.high <= 0 else inf, x.nan or both)


def _spread(given: _Given, look: _Look) -> Interval:
    return Interval(0.0, inf, nan=True)


RULES: Mapping[Any, Callable[[_Given, _Look], Interval]] = {
    aten.relu: lambda given, look: look(given["self"]).clamped(0, inf),
    aten.clamp: _clamp,
    aten.clamp_min: _clamp,
    aten.clamp_max: _clamp,
    aten.hardtanh: _clamp,
    aten.abs: _absolute,
    aten.neg: _negative,
    aten.exp: _increasing(_exponential),
    aten.sqrt: _increasing(lambda x: math.sqrt(x) if x < inf else inf, domain=0.0),
    aten.pow: _power,
    aten.add: _sum_of,
    aten.sub: _difference,
    aten.rsub: _reversed_difference,
    aten.mul: _product_of,
    aten.div: _quotient,
    aten.maximum: _larger,
    aten.minimum: _smaller,
    aten.where: _choice,
    aten.cat: _joined,
    aten.constant_pad_nd: _padded,
    aten.mean: _average,
    aten.avg_pool1d: _average,
    aten.avg_pool2d: _average,
    aten.avg_pool3d: _average,
    aten._adaptive_avg_pool2d: _average,
    aten._adaptive_avg_pool3d: _average,
    aten.sum: _total,
    aten.var: _spread,
}
"""By operator, given its arguments by name and what to ask for the interval of one; roundings are not in it."""
