"""What the graph alone says of a tensor: one number everywhere, or what operators make of nothing but numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.aliasing import written
from fusepass.patterns.arguments import arguments
from fusepass.patterns.effects import is_constant_number, is_random, writes
from fusepass.patterns.memo import remembered

aten = torch.ops.aten

MOST_COMPUTED = 2**22
"""Elements of a tensor that is computed to look at it."""

_FILLED = {aten.full: "fill_value", aten.full_like: "fill_value", aten.new_full: "fill_value", aten.scalar_tensor: "s"}
_FIXED = {
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), 0),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), 1),
}


def number(node: fx.Node) -> float | None:
    """What every element of `node` is, where the graph says it: a filled tensor, or a 0-dim constant of the CPU."""
    value = _constant(node) if node.op == "get_attr" or node.target is aten.lift_fresh_copy.default else _filled(node)
    if value is None or any(node is target for user in node.users for target in written(user)):
        return None
    return value


def _filled(node: fx.Node) -> float | None:
    if not isinstance(node.target, OpOverload):
        return None
    given = _given(node.target)
    value = arguments(node)[given] if isinstance(given, str) else given
    return value if isinstance(value, int | float) else None


@remembered
def _given(target: OpOverload) -> str | int | None:
    """The argument that is what an operator fills a tensor with, or that number itself; None of another operator."""
    packet = target.overloadpacket
    return _FILLED.get(packet, _FIXED.get(packet))


def _constant(node: fx.Node) -> float | None:
    if not is_constant_number(node):
        return None
    while node.op != "get_attr":
        (node,) = node.all_input_nodes
    value = getattr(node.graph.owning_module, str(node.target), None)
    return value.item() if isinstance(value, torch.Tensor) and not value.is_complex() else None


def computed(node: fx.Node) -> torch.Tensor | None:
    """What `node` computes of nothing but numbers, on the CPU; None where it reads anything, or is larger than is looked at."""
    order: dict[fx.Node, None] = {}
    if not all(_pure(each) for each in _sources(node, order)):
        return None
    values: dict[fx.Node, Any] = {}
    for each in order:
        args, kwargs = fx.map_arg((each.args, dict(each.kwargs)), values.__getitem__)
        here = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
        values[each] = each.target(*args, **kwargs | here)  # type: ignore[operator]
    value: torch.Tensor = values[node]
    return value


def _sources(node: fx.Node, order: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """`node` behind what it is computed of, which `order` collects."""
    for source in node.all_input_nodes:
        if source not in order:
            yield from _sources(source, order)
    order[node] = None
    yield node


def _pure(node: fx.Node) -> bool:
    value = node.meta.get("val")
    known = isinstance(node.target, OpOverload) and isinstance(value, torch.Tensor) and value.numel() <= MOST_COMPUTED
    return known and not is_random(node.target) and not writes(node.target)
