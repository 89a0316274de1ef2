"""The arguments of a call by name, defaults included."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.memo import remembered


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of `node`, defaults included, by their names in the operator's schema and in its order."""
    return bound(node.target, node.args, node.kwargs)


def bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the operator `target`, as `arguments` gives them."""
    known = defaults(target)
    return {**known, **dict(zip(known, args, strict=False)), **kwargs}


@remembered
def defaults(target: OpOverload) -> Mapping[str, Any]:
    """The defaults of an operator's arguments in the order of its schema; None for those that have none."""
    return {argument.name: argument.default_value for argument in target._schema.arguments}


@remembered
def optional(target: OpOverload) -> frozenset[str]:
    """The arguments of an operator that have a default."""
    return frozenset(argument.name for argument in target._schema.arguments if argument.has_default_value())


def key_of(value: Any) -> Hashable:
    """Equal for equal arguments of a call; 1, 1.0 and True differ, and -0.0 and 0.0."""
    kind = type(value)
    if kind is fx.Node:
        return value  # type: ignore[no-any-return]
    if kind is int or value is None:
        return (kind, value)
    if isinstance(value, tuple | list):
        return tuple([key_of(part) for part in value])
    if isinstance(value, dict):
        return tuple([(name, key_of(part)) for name, part in value.items()])
    return (kind, repr(value))
