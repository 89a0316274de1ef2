"""Attention that is written out: two batches of matrix products with a softmax between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import fx

from fusepass.patterns.analysis.constants import Constant, number
from fusepass.patterns.arguments import arguments

aten = torch.ops.aten

_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})
_SAME = frozenset({aten.clone.default, aten._to_copy.default, aten.expand.default})
"""What keeps an element's value and place, but for rounding; an `expand` that is met here has nothing to expand."""


_LOWEST = -5e4
"""A number from which on down the place of a score has no weight, beside any score of 16 or 32 bits that is not as low itself."""


@dataclass(frozen=True)
class Added:
    """What is added to the scores.

    Attributes:
        node: a tensor that broadcasts with the scores, as they are seen there.
        rank: the number of dimensions that the scores are seen with.
        factor: what it is multiplied with.
        hides: the tensor is bool, and `value` takes the place of scores where it has this value; None where it is
            a number that is added.
        value: minus infinity, or a number so low that the place has no weight, unless all places of the row have it.
    """

    node: fx.Node
    rank: int
    factor: float = 1.0
    hides: bool | None = None
    value: float = -math.inf


@dataclass(frozen=True)
class Scores:
    """``scale * (queries @ keys)`` and what is added.

    Attributes:
        left: queries, ``[N, L, D]``.
        right: keys, ``[N, D, S]``.
        shape: that of the scores where most dimensions of the batch are seen, ``[*lead, L, S]``.
        scale: one number.
        added: one after another. What hides takes the place of what was added before.
    """

    left: fx.Node
    right: fx.Node
    shape: tuple[int, ...]
    scale: float = 1.0
    added: tuple[Added, ...] = ()

    @staticmethod
    def of(node: Any) -> Scores | None:
        """The scores that `node` is, which nobody else reads; None where it is something else, such as a number."""
        if not isinstance(node, fx.Node) or len(node.users) != 1:
            return None
        if node.target in _INNER:
            return _product(node)
        step = _STEPS.get(node.target)
        found = None if step is None else step(node, arguments(node))
        if found is None or not math.isfinite(found.scale) or found.scale <= 0:
            return None
        if not all(each.value <= _LOWEST for each in found.added):
            return None
        shape = _shape(node)
        if shape[-2:] != found.shape[-2:] or prod(shape) != prod(found.shape):
            return None
        return replace(found, shape=max(shape, found.shape, key=len))


@dataclass(frozen=True)
class Attention:
    """``softmax(scores) @ values``, the result of a batch of products.

    Attributes:
        scores: before the softmax over the last dimension.
        values: ``[N, S, E]``.
    """

    scores: Scores
    values: fx.Node

    @staticmethod
    def of(root: fx.Node) -> Attention | None:
        """The attention that `root`, a call of ``aten.bmm``, is the last operator of."""
        weights, values = root.args
        assert isinstance(weights, fx.Node)
        assert isinstance(values, fx.Node)
        node = weights
        while node.target in _RESHAPES | _SAME and _keeps_rows(node) and len(node.users) == 1:
            node = node.all_input_nodes[0]
        if node.target is not aten._softmax.default or len(node.users) != 1:
            return None
        given = arguments(node)
        if given["dim"] % len(_shape(node)) != len(_shape(node)) - 1:
            return None
        found = Scores.of(given["self"])
        return None if found is None else Attention(found, values)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _keeps_rows(node: fx.Node) -> bool:
    """Whether `node` shows all elements of its floating-point input, and the same ones in a row."""
    source = node.all_input_nodes[0]
    value = source.meta["val"]
    return bool(
        value.is_floating_point()
        and node.meta["val"].is_floating_point()
        and value.numel() == prod(_shape(node))
        and _shape(source)[-2:] == _shape(node)[-2:]
    )


_Given = Mapping[str, Any]


def _product(node: fx.Node) -> Scores | None:
    given = arguments(node)
    if node.target is aten.bmm.default:
        return Scores(given["self"], given["mat2"], _shape(node))
    beta, alpha = given["beta"], given["alpha"]
    if not isinstance(beta, int | float) or not isinstance(alpha, int | float) or alpha <= 0:
        return None
    found = Scores(given["batch1"], given["batch2"], _shape(node), float(alpha))
    # With 0 it is a workspace of which nothing is taken.
    return replace(found, added=(Added(given["self"], 3, float(beta)),)) if beta else found


def _same(node: fx.Node, given: _Given) -> Scores | None:
    return Scores.of(given["self"]) if _keeps_rows(node) else None


def multiple(node: fx.Node) -> tuple[fx.Node, float] | None:
    """The tensor that `node` is a positive multiple of, and how many times that it is; None where it is no such product."""
    if node.target not in _MULTIPLES:
        return None
    value, by = node.args
    if not isinstance(value, fx.Node) or not isinstance(by, int | float) or not 0 < by < math.inf:
        return None
    return value, 1 / by if node.target in _QUOTIENTS else by


def _scaled(node: fx.Node, given: _Given) -> Scores | None:
    value, by = multiple(node) or (None, 1.0)
    found = None if value is None else Scores.of(value)
    if found is None:
        return None
    added = tuple(
        replace(each, factor=each.factor * by) if each.hides is None else replace(each, value=each.value * by)
        for each in found.added
    )
    return replace(found, scale=found.scale * by, added=added)


def _plus(node: fx.Node, given: _Given) -> Scores | None:
    first, second, alpha = given["self"], given["other"], given["alpha"]
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or not isinstance(alpha, int | float):
        return None
    if (found := Scores.of(first)) is not None:
        return _with(found, node, second, factor=float(alpha))
    found = Scores.of(second) if alpha == 1 else None
    return _with(found, node, first)


def _hidden(node: fx.Node, given: _Given) -> Scores | None:
    """``masked_fill`` by minus infinity, or a low number, where the mask is True."""
    value = _number(given["value"])
    return None if value is None else _with(Scores.of(given["self"]), node, given["mask"], hides=True, value=value)


def _chosen(node: fx.Node, given: _Given) -> Scores | None:
    """``where``, with minus infinity, or a low number, on one side."""
    for name, other, hides in (("self", "other", False), ("other", "self", True)):
        value = _number(given[other])
        if isinstance(given[name], fx.Node) and value is not None:
            return _with(Scores.of(given[name]), node, given["condition"], hides=hides, value=value)
    return None


def _with(
    found: Scores | None,
    node: fx.Node,
    operand: fx.Node,
    *,
    factor: float = 1.0,
    hides: bool | None = None,
    value: float = -math.inf,
) -> Scores | None:
    """`found`, if there are any, with what `node` adds to them."""
    added = Added(operand, len(_shape(node)), factor, hides, value)
    return None if found is None else replace(found, added=(*found.added, added))


def _number(value: Any) -> float | None:
    return number(value) if isinstance(value, fx.Node) else value if isinstance(value, int | float) else None


_INNER = frozenset({aten.bmm.default, aten.baddbmm.default})
_QUOTIENTS = frozenset({aten.div.Tensor, aten.div.Scalar})
_MULTIPLES = _QUOTIENTS | {aten.mul.Tensor, aten.mul.Scalar}
_STEPS: dict[Any, Callable[[fx.Node, _Given], Scores | None]] = {
    **dict.fromkeys(_RESHAPES | _SAME, _same),
    **dict.fromkeys(_MULTIPLES, _scaled),
    aten.add.Tensor: _plus,
    aten.masked_fill.Scalar: _hidden,
    aten.masked_fill.Tensor: _hidden,
    aten.where.self: _chosen,
    aten.where.ScalarOther: _chosen,
    aten.where.ScalarSelf: _chosen,
}


def looks_back(added: Added, rows: int, columns: int) -> bool:
    """Whether `added` is a constant that hides, of each row, the columns behind its own number, and does nothing else."""
    node = added.node
    if _shape(node)[-2:] != (rows, columns) or prod(_shape(node)) != rows * columns or added.factor <= 0:
        return False
    constant = Constant.of(node)
    return constant is not None and _hides_ahead(constant, rows, columns, added.hides, added.factor)


@lru_cache(64)
def _hides_ahead(constant: Constant, rows: int, columns: int, hides: bool | None, factor: float) -> bool:
    """The same of what is added; remembered, as each layer of a network has the same."""
    ahead = torch.ones(rows, columns, dtype=torch.bool, device="cpu").triu(1)
    value = constant.value().reshape(rows, columns)
    if hides is not None:
        return torch.equal(value == hides, ahead)
    lowest = value.min().item()
    return lowest * factor <= _LOWEST and torch.equal(value, torch.zeros_like(value).masked_fill(ahead, lowest))
