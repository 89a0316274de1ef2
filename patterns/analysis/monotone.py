"""Which functions of one tensor, element by element, keep the order of numbers or turn it round."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.analysis.affine import step
from fusepass.patterns.analysis.interval import interval
from fusepass.patterns.arguments import arguments

aten = torch.ops.aten


class Direction(enum.Enum):
    """How f(x) goes as x grows; it may stay where it is."""

    INCREASING = "increasing"
    DECREASING = "decreasing"


_Given = Mapping[str, Any]

_INCREASING: Mapping[Any, Callable[[_Given], bool]] = {
    **dict.fromkeys(
        (
            aten.relu, aten.sigmoid, aten.tanh, aten.exp, aten.expm1, aten.erf, aten.atan, aten.asinh, aten.sinh,
            aten.hardsigmoid, aten.hardtanh, aten.floor, aten.ceil, aten.trunc, aten.round,
            aten.clamp_min, aten.clamp_max, aten.clamp,
        ),
        lambda given: True,
    ),
    aten.celu: lambda given: given["alpha"] > 0,
    aten.leaky_relu: lambda given: given["negative_slope"] > 0,
    aten.elu: lambda given: min(given["alpha"], given["scale"], given["input_scale"]) > 0,
}  # fmt: skip
"""Functions that increase where their arguments pass the test. All are defined everywhere; NaN gives NaN."""

_FROM = {aten.sqrt: 0.0, aten.log: 0.0, aten.log1p: -1.0, aten.log2: 0.0, aten.log10: 0.0}
"""Increasing functions that give NaN below a number."""


def _has_no_step(given: _Given, dtype: torch.dtype) -> bool:
    """Whether softplus becomes the identity at its threshold without a step down that the type shows."""
    threshold = float(given["threshold"])
    return threshold > 0 and math.log1p(math.exp(-threshold)) <= threshold * torch.finfo(dtype).eps / 2


def direction(node: fx.Node) -> Direction | None:
    """How `node` follows its first operand, the only tensor that it may read; None where it does not keep an order.

    Infinite operands, too, have the order that numbers have, and only NaN gives NaN.
    """
    if not isinstance(node.target, OpOverload) or len(node.all_input_nodes) != 1:
        return None
    (source,) = node.all_input_nodes
    given, packet = arguments(node), node.target.overloadpacket
    if sum(isinstance(value, fx.Node) for value in given.values()) != 1:
        return None  # it reads the same tensor twice
    numbers = [value for value in given.values() if isinstance(value, int | float)]
    if not all(map(math.isfinite, numbers)):
        return None
    if packet in _FROM:
        return Direction.INCREASING if interval(source).low >= _FROM[packet] else None
    if packet is aten.softplus:
        return Direction.INCREASING if _has_no_step(given, source.meta["val"].dtype) else None
    if packet in _INCREASING:
        return Direction.INCREASING if _INCREASING[packet](given) else None
    line = step(node)
    if line is None or line.scale == 0:
        return None
    return Direction.INCREASING if line.scale > 0 else Direction.DECREASING
