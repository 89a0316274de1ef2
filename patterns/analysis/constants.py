"""What the graph alone says of a tensor: one number everywhere, or what operators make of nothing but numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.aliasing import written
from fusepass.patterns.arguments import arguments
from fusepass.patterns.effects import is_constant_number, is_random, writes
from fusepass.patterns.memo import remembered

aten = torch.ops.aten

MOST_COMPUTED = 2**24
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
    return _held(value, node.meta["val"].dtype) if isinstance(value, int | float) else None


def _held(value: float, dtype: torch.dtype) -> float | None:
    """`value` as an element of `dtype`: rounded, cut, or wrapped as `torch.full` does."""
    if dtype is torch.bool:
        return bool(value)
    if dtype.is_floating_point:
        return float(torch.tensor(value, dtype=dtype))
    if dtype.is_complex:
        return None
    limits = torch.iinfo(dtype)
    return (int(value) - limits.min) % (limits.max - limits.min + 1) + limits.min


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


class _Step(NamedTuple):
    """The result of an earlier call of a `Constant`."""

    number: int


@dataclass(frozen=True)
class Constant:
    """Calls of operators on nothing but numbers; equal ones give equal tensors.

    Attributes:
        calls: operators with their arguments, by position and by name, where a `_Step` stands for a tensor.
    """

    calls: tuple[tuple[OpOverload, Any, Any], ...]

    @staticmethod
    def of(node: fx.Node) -> Constant | None:
        """What computes `node`; None where it reads anything, or something on the way is larger than is looked at."""
        order: dict[fx.Node, None] = {}
        if not all(_pure(each) for each in _sources(node, order)):
            return None
        numbers = {each: _Step(number) for number, each in enumerate(order)}
        calls: list[Any] = []
        for each in order:
            kwargs = {name: value for name, value in each.kwargs.items() if name != "device"}
            args, kwargs = fx.map_arg((each.args, kwargs), numbers.__getitem__)
            calls.append(
                (each.target, _hashable(args), tuple((name, _hashable(value)) for name, value in kwargs.items()))
            )
        return Constant(tuple(calls))

    def value(self) -> torch.Tensor:
        """The tensor, on the CPU."""
        values: list[torch.Tensor] = []

        def known(value: Any) -> Any:
            if isinstance(value, _Step):
                return values[value.number]
            return [known(part) for part in value] if isinstance(value, tuple) else value

        for target, args, kwargs in self.calls:
            values.append(target(*known(args), **{name: known(value) for name, value in kwargs}))
        return values[-1]


def _hashable(value: Any) -> Any:
    if isinstance(value, tuple | list) and not isinstance(value, _Step):
        return tuple(_hashable(part) for part in value)
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
