"""Turns the graph that AOTAutograd exports into ours: readable names, mutation as trailing ``copy_``, true aliases.

AOTAutograd returns the new value of each mutated input before the user's outputs. Here they become
``copy_(placeholder, value)`` nodes at the end of the graph. An output that aliases a mutated input (the input itself
or a view of it) is taken from the placeholder after its ``copy_``, so that it aliases here too.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fusepass.capture.branches import Condition, condition
from fusepass.errors import CaptureError

aten = torch.ops.aten


@dataclass(frozen=True)
class Exported:
    """What the export of a model yields.

    Attributes:
        graph: functional ATen; the new values of mutated placeholders come first among its outputs.
        names: a readable name for each placeholder.
        states: how many of the placeholders, the first ones, are the model's own tensors.
        mutated: the index of the placeholder that each leading output is the new value of.
        aliases: for each of the user's outputs the indices of the placeholders whose memory it shares.
        branches: tensors of one bool that forward branched on, with their values.
    """

    graph: fx.GraphModule
    names: Sequence[str]
    states: int
    mutated: Sequence[int]
    aliases: Sequence[frozenset[int]]
    branches: Sequence[tuple[fx.Node, bool]] = ()


@dataclass(frozen=True)
class Finished:
    """A graph that writes its mutations itself.

    Attributes:
        graph: flat placeholders, a flat tuple of the user's outputs.
        used_states: which of the model's tensors it takes; its first placeholders, in this order.
        mutated: indices (among `Exported.names`) of the placeholders that it writes.
        conditions: what must hold of a call's arguments for the graph to be right.
    """

    graph: fx.GraphModule
    used_states: tuple[int, ...]
    mutated: tuple[int, ...]
    conditions: tuple[Condition, ...] = ()


def finish(exported: Exported) -> Finished:
    """`exported` with its mutations written at the end.

    Raises:
        CaptureError: an output aliases a mutated input in a way that this graph cannot express, or a branch depends
            on too much.
    """
    source = exported.graph.graph
    placeholders = source.find_nodes(op="placeholder")
    results: Sequence[fx.Node | None] = source.output_node().args[0]  # type: ignore[assignment]
    if len(results) != len(exported.mutated) + len(exported.aliases):
        raise CaptureError("the export returned another number of values than the model")
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    used = []
    asked = {node for node, _ in exported.branches}
    for index, (node, name) in enumerate(zip(placeholders, exported.names, strict=True)):
        if index < exported.states and not node.users and node not in asked and index not in exported.mutated:
            continue
        copied[node] = graph.placeholder(name)
        copied[node].meta = node.meta.copy()
        used.append(index)
    names = {node: copied[node].name for node in placeholders if node in copied}
    found = (condition(exported.graph, node, answer, names) for node, answer in exported.branches)
    conditions = tuple(each for each in found if each is not None)
    returned = {node for node in results if isinstance(node, fx.Node)}
    for node in source.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _is_baked_constant(node, exported.graph) and node not in returned:
            copied[node] = copied[node.args[0]]
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    _finish_outputs(graph, exported, placeholders, results, copied)
    graph.eliminate_dead_code()
    graph.lint()
    states = tuple(index for index in used if index < exported.states)
    mutated = tuple(dict.fromkeys(exported.mutated))
    return Finished(fx.GraphModule(exported.graph, graph), states, mutated, conditions)


def _finish_outputs(
    graph: fx.Graph,
    exported: Exported,
    placeholders: Sequence[fx.Node],
    results: Sequence[fx.Node | None],
    copied: Mapping[fx.Node, fx.Node],
) -> None:
    """Append the ``copy_`` nodes and the output node."""
    values = dict(zip(exported.mutated, results, strict=False))
    written = {placeholders[index] for index in values}
    for index, value in values.items():
        if not isinstance(value, fx.Node) or _base(value) in written - {placeholders[index]}:
            raise CaptureError(f"forward swaps the memory of {exported.names[index]} with another input's")
        target = copied[placeholders[index]]
        copy = graph.call_function(aten.copy_.default, (target, copied[_copied_value(value, placeholders[index])]))
        copy.meta["val"] = target.meta["val"]
    outputs: list[fx.Node | None] = []
    for node, aliases in zip(results[len(exported.mutated) :], exported.aliases, strict=True):
        mutated = aliases & values.keys()
        if mutated:
            index = min(mutated)
            outputs.append(_alias(graph, node, placeholders[index], values[index], copied, exported.names[index]))
        else:
            outputs.append(copied[node] if isinstance(node, fx.Node) else node)
    graph.output(tuple(outputs))


def _copied_value(value: fx.Node, placeholder: fx.Node) -> fx.Node:
    """What `value` writes over `placeholder`: ``copy(placeholder, new)`` is ``new``, cast and expanded by ``copy_``."""
    if value.target is aten.copy.default and value.args[0] is placeholder and isinstance(value.args[1], fx.Node):
        return value.args[1]
    return value


def _alias(
    graph: fx.Graph,
    output: fx.Node | None,
    placeholder: fx.Node,
    value: fx.Node | None,
    copied: Mapping[fx.Node, fx.Node],
    name: str,
) -> fx.Node:
    """`output`, a view of the new `value` of `placeholder`, as the same view of the placeholder itself."""
    chain = []
    node = output
    while node is not value and node is not placeholder:
        if not isinstance(node, fx.Node) or (viewed := _viewed(node)) is None:
            raise CaptureError(f"an output shares memory with {name}, which forward changes in place")
        chain.append(node)
        node = viewed
    result = copied[placeholder]
    for view in reversed(chain):
        inputs = {_viewed(view): result}
        result = graph.node_copy(view, lambda n, inputs=inputs: inputs.get(n) or copied[n])  # type: ignore[misc]
    return result


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory the view `node` shows; `node` itself where it is no view."""
    while (viewed := _viewed(node)) is not None:
        node = viewed
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    """The argument that `node` is a view of, if it is a view."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return node.args[0] if _viewed(node.args[0]) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    first = node.target._schema.arguments[0].alias_info
    return node.args[0] if first is not None and not first.is_write else None


def _is_baked_constant(node: fx.Node, graph: fx.GraphModule) -> bool:
    """Whether `node` copies a constant that nobody else can change; memory of a NumPy array is another matter."""
    if node.target is not aten.lift_fresh_copy.default:
        return False
    constant = getattr(graph, str(node.args[0].target), None) if isinstance(node.args[0], fx.Node) else None
    return isinstance(constant, torch.Tensor) and constant.untyped_storage().resizable()
