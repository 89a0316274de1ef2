"""Writes by PyTorch's operators on lists of tensors, as optimisers, clipping and moving averages have them: they stay in place.

Tracing makes ``_foreach_add_(parameters, ...)`` a new list, which is copied to the parameters at the graph's end. Where nothing reads a parameter's
old value behind the operator, that one writes there itself, as in eager mode: the memory of neither list is needed, nor the copies. And Dynamo
takes ``_foreach_lerp_`` apart, with a tensor full of the weight for each of the list, which a number stands for as well.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.compile.writes import trailing
from fusepass.patterns.aliasing import readers
from fusepass.patterns.arguments import arguments
from fusepass.runtime.meta import Meta

aten = torch.ops.aten


def write_lists_in_place(graph_module: fx.GraphModule) -> None:
    """Let operators on lists write to inputs of the graph what is copied there at its end, in place.

    Args:
        graph_module: flat; every node that stands for a tensor has it in ``meta["val"]``.
    """
    graph = graph_module.graph
    changed = False
    for node in graph.find_nodes(op="call_function", target=aten._foreach_addcmul.Scalar):
        changed |= _add_number(node)
    for node in graph.find_nodes(op="call_function", target=aten.full_like.default):
        if not node.users:
            graph.erase_node(node)
    if any(_in_place(node) for node in graph.nodes):
        for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
            # A write gives what it wrote to, which the graph may return.
            write.replace_all_uses_with(write.args[0], delete_user_cb=lambda user: user.op == "output")
    last = list(trailing(graph))
    writes = {write.args[1]: write for write in last}
    to: dict[fx.Node, fx.Node] = {value: write.args[0] for value, write in writes.items()}  # type: ignore[misc]
    if len({*to.values()}) < len(last):
        to = {}
    order = {node: number for number, node in enumerate(graph.nodes)}
    behind = {target: max(map(order.__getitem__, _of_old(target)), default=-1) for target in to.values()}
    for node in reversed(list(graph.nodes)):
        targets = _targets(node, to)
        if targets is None or any(behind[target] > order[node] for target in targets):
            continue
        changed = True
        for part in list(node.users):
            target = targets[_number(part)]
            if part in writes:
                graph.erase_node(writes.pop(part))
            part.replace_all_uses_with(target)
            graph.erase_node(part)
        to |= dict(zip(_nodes(node.args[0]), targets, strict=True))
        node.target = _in_place(node)
        node.args = (list(targets), *node.args[1:])
    if changed:
        graph.lint()
        graph_module.recompile()


def _add_number(node: fx.Node) -> bool:
    """Let ``inputs + factors * others`` be ``inputs + number * others`` where each of `factors` is full of one number; tells whether it is."""
    given = arguments(node)
    factors, others, value = _nodes(given["tensor1"]), _nodes(given["tensor2"]), given["value"]
    full = [each for each in factors if each.target is aten.full_like.default]
    numbers = {each.args[1] for each in full}
    number = next(iter(numbers), None)
    if (
        len(full) < len(factors)
        or len(numbers) > 1
        or not isinstance(number, float)
        or not isinstance(value, int | float)
    ):
        return False
    if len(factors) != len(others) or not all(map(_is_like, factors, others)):
        return False
    node.target, node.args, node.kwargs = aten._foreach_add.List, (given["self"], others), {"alpha": number * value}
    return True


def _is_like(factor: fx.Node, other: fx.Node) -> bool:
    """Whether the product of two tensors has the second one's shape and type."""
    values: Sequence[torch.Tensor] = [factor.meta["val"], other.meta["val"]]
    return values[0].shape == values[1].shape and values[0].dtype is values[1].dtype and values[1].is_floating_point()


def _of_old(target: fx.Node) -> list[fx.Node]:
    """What reads an input before it is written, views included: results of the graph are given when all is written."""
    return [
        reader
        for reader in readers(target)
        if reader.op != "output" and (reader.target is not aten.copy_.default or reader.args[0] is not target)
    ]


def _in_place(node: fx.Node) -> OpOverload | None:
    """The operator that does as `node` and writes its results over its first list; None where there is none."""
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.name.startswith("aten::_foreach_"):
        return None
    packet = getattr(aten, f"{target.overloadpacket.__name__}_", None)
    found = getattr(packet, target._overloadname, None)
    return found if isinstance(found, OpOverload) else None


def _targets(node: fx.Node, to: Mapping[fx.Node, fx.Node]) -> list[fx.Node] | None:
    """The inputs that `node` may write over, one for each of its results; `to` has where results, and what later ones are made of, go."""
    if _in_place(node) is None:
        return None
    sources = _nodes(node.args[0])
    parts = {_number(part): part for part in node.users if part.target is operator.getitem}
    if not len(sources) == len(parts) == len(node.users):
        return None
    targets = [to[part] for _, part in sorted(parts.items()) if part in to]
    others = {other for argument in (*node.args[1:], *node.kwargs.values()) for other in _nodes(argument)}
    if len(sources) != len({*targets}) or others & {*targets}:
        return None
    fits = all(
        Meta.of(parts[number].meta["val"]) == Meta.of(target.meta["val"])
        and (source is target or (source.target is operator.getitem and list(source.users) == [node]))
        for number, (source, target) in enumerate(zip(sources, targets, strict=True))
    )
    return targets if fits else None


def _number(part: fx.Node) -> int:
    """Which result of an operator on lists `part` takes."""
    return cast(int, part.args[1])


def _nodes(argument: Any) -> list[fx.Node]:
    """The nodes of an argument, in order."""
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found
