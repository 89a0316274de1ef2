"""Between which numbers the elements of a tensor lie, and whether one may be NaN.

Bounds hold for what is computed, not only for what is meant: they are widened by the rounding of the tensor's type, and
a bound that the type cannot hold is infinite. An interval without infinite bounds holds finite numbers, or NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.analysis.ranges import ANYTHING, RULES, Interval
from fusepass.patterns.arguments import arguments
from fusepass.patterns.memo import remembered

aten = torch.ops.aten

DEPTH = 12
"""Operators that are looked through."""


def interval(node: fx.Node, depth: int = DEPTH) -> Interval:
    """What is known of the elements of `node`, a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype.is_complex or value.is_quantized:
        return ANYTHING
    known = _computed(node, depth) if depth > 0 and node.op == "call_function" else ANYTHING
    return _held(known, value.dtype, _rounds(node.target))


@remembered
def _rounds(target: object) -> bool:
    return isinstance(target, OpOverload) and target.overloadpacket in _ROUNDING


def _held(known: Interval, dtype: torch.dtype, rounded: bool) -> Interval:
    """`known`, as elements of type `dtype` hold it, when they are `rounded`."""
    if dtype is torch.bool:
        return Interval(0.0, 1.0, nan=False)  # 1 for whatever is not 0
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return Interval(float(limits.min), float(limits.max), nan=False)  # integers wrap
    facts = torch.finfo(dtype)
    low, high = known.low, known.high
    if rounded:
        low -= 2 * facts.eps * abs(low) if low > -inf else 0.0
        high += 2 * facts.eps * abs(high) if high < inf else 0.0
    else:  # a limit such as 0.3 may be rounded away from zero
        low, high = min(low, _nearest(low, dtype)), max(high, _nearest(high, dtype))
    return Interval(low if low >= -facts.max else -inf, high if high <= facts.max else inf, known.nan)


@lru_cache(maxsize=4096)
def _nearest(number: float, dtype: torch.dtype) -> float:
    """`number` as `dtype` holds it."""
    return number if number in (0.0, 1.0, -1.0, inf, -inf) else float(torch.tensor(number, dtype=dtype))


def _computed(node: fx.Node, depth: int) -> Interval:
    """The interval of a call from those of its operands."""
    target = node.target
    if target is operator.getitem:
        producer, number = node.args
        assert isinstance(producer, fx.Node)
        known = _shows_same(producer) or (number == 0 and _first_chooses(producer))
        return interval(producer.all_input_nodes[0], depth - 1) if known else ANYTHING
    if not isinstance(target, OpOverload):
        return ANYTHING
    return _way(target)(node, depth)


_Way = Callable[[fx.Node, int], Interval]


@remembered
def _way(target: OpOverload) -> _Way:
    """How the interval of a call of `target` comes from those of its operands."""
    packet = target.overloadpacket
    if packet in _FIXED:
        return _fixed
    if packet in RULES:
        rule = RULES[packet]
        return lambda node, depth: rule(arguments(node), lambda value: _of(value, depth - 1))
    if packet in _SAME or (packet in _VIEWS and target is not _REINTERPRET):
        return _chosen
    return lambda node, depth: ANYTHING


def _chosen(node: fx.Node, depth: int) -> Interval:
    """The elements of the one operand, some or all of them."""
    return interval(node.all_input_nodes[0], depth - 1) if len(node.all_input_nodes) == 1 else ANYTHING


def _first_chooses(node: fx.Node) -> bool:
    """Whether the first result of `node` holds elements of its argument; a dilated window may see nothing but padding."""
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket not in _FIRST:
        return False
    return all(step == 1 for step in arguments(node).get("dilation", ()))


def _shows_same(node: fx.Node) -> bool:
    """Whether `node` is a view whose elements are elements of its input, with their bits as they are."""
    return (
        isinstance(node.target, OpOverload) and node.target.overloadpacket in _VIEWS and node.target is not _REINTERPRET
    )


def _of(value: Any, depth: int) -> Interval:
    """The interval of an argument: a node or a number."""
    if isinstance(value, fx.Node):
        return interval(value, depth)
    return Interval(float(value), float(value), nan=math.isnan(value))


def _fixed(node: fx.Node, depth: int) -> Interval:
    """Functions whose range is known, whatever they are given."""
    low, high, infinite_gives_nan = _FIXED[node.target.overloadpacket]  # type: ignore[union-attr]
    operand = interval(node.all_input_nodes[0], depth - 1)
    return Interval(low, high, nan=operand.nan or (infinite_gives_nan and not operand.bounded))


_FIXED: Mapping[Any, tuple[float, float, bool]] = {
    aten.sigmoid: (0, 1, False),
    aten.hardsigmoid: (0, 1, False),
    aten._softmax: (0, 1, True),
    aten._log_softmax: (-inf, 0, True),
    aten.tanh: (-1, 1, False),
    aten.erf: (-1, 1, False),
    aten.erfc: (0, 2, False),
    aten.atan: (-1.5708, 1.5708, False),
    aten.sin: (-1, 1, True),
    aten.cos: (-1, 1, True),
    aten.sign: (-1, 1, False),
    aten.softplus: (0, inf, False),
    aten.gelu: (-0.18, inf, True),
    aten.silu: (-0.28, inf, True),
    aten.hardswish: (-0.375, inf, True),
    aten.mish: (-0.31, inf, True),
}
"""Least and greatest value, and whether an infinite argument may give NaN."""

_SAME = frozenset(
    {
        aten.clone, aten._to_copy, aten.amax, aten.amin, aten.flip, aten.roll, aten.lift_fresh_copy,
        aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d, aten.repeat, aten.max, aten.min,
    }
)  # fmt: skip
"""Operators whose results are elements of their argument."""

_VIEWS = frozenset(
    {
        aten.view, aten._unsafe_view, aten.permute, aten.transpose, aten.t, aten.expand, aten.slice, aten.select,
        aten.unsqueeze, aten.squeeze, aten.alias, aten.detach, aten.split, aten.split_with_sizes, aten.unbind,
        aten.unfold, aten.diagonal,
    }
)  # fmt: skip
_REINTERPRET = aten.view.dtype
_FIRST = frozenset(
    {aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.max, aten.min, aten.sort, aten.topk}
)
"""Operators whose first result holds elements of their argument."""

_ROUNDING = frozenset(
    {aten._to_copy, aten.exp, aten.sqrt, aten.pow, aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.mean}
    | {aten.avg_pool2d, aten.avg_pool3d, aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d}
)
"""Operators whose results are rounded when they are computed; the others choose among given numbers."""
