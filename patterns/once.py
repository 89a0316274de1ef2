"""Values that are made of parameters alone: what keeps them from call to call pays for them once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fusepass.codegen.lowering.rounding import is_half
from fusepass.patterns.ancestors import ancestors
from fusepass.patterns.effects import is_random, writes
from fusepass.patterns.infer import called

aten = torch.ops.aten

ONCE = "once"
"""In ``meta`` of a node: its value is made of parameters alone."""

_EXACT = frozenset(
    {aten.view, aten.t, aten.permute, aten.transpose, aten.reshape, aten.expand, aten.unsqueeze, aten.squeeze}
)
_ROUNDED = frozenset({aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.rsqrt, aten.sqrt, aten.reciprocal})


def note_once(graph: fx.Graph, parameters: Collection[fx.Node]) -> None:
    """Say in ``meta`` of each node of `graph` whether its value is made of `parameters` alone; nothing writes to these."""
    for node in graph.nodes:
        if node in parameters:
            node.meta[ONCE] = True
        elif node.op == "call_function":
            _note(node)


def each_call(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of `nodes`, the last one first, that each call computes."""
    for node in reversed(nodes):
        _note(node)
    return [node for node in nodes if ONCE not in node.meta]


def _note(node: fx.Node) -> None:
    sources = node.all_input_nodes
    if (
        sources
        and all(ONCE in source.meta for source in sources)
        and not (is_random(node.target) or writes(node.target))
    ):
        node.meta[ONCE] = True


def made_of(values: Collection[fx.Node]) -> list[fx.Node]:
    """`values` and all that they are made of, in the order of their graph."""
    found = ancestors(values)
    return [node for node in _graph_of(values).nodes if node in found] if values else []


def _graph_of(values: Collection[fx.Node]) -> fx.Graph:
    return next(iter(values)).graph


def widen(graph: fx.Graph, values: Collection[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Compute halves among `values`, which are made once, in float32, and round them once; gives each with what takes its place.

    What is made by other operators than arithmetic and views stays as it is.
    """
    halves = [node for node in values if is_half(node.meta["val"])]
    wide: dict[fx.Node, fx.Node | None] = {}
    for node in made_of(halves):
        wide[node] = _widened(graph, node, wide)
    for node in halves:
        source = wide[node]
        if source is None or not any(_packet(each) in _ROUNDED for each in made_of([node])):
            continue
        with graph.inserting_after(max(source, node)):
            narrow = _call(graph, aten._to_copy.default, (source,), {"dtype": node.meta["val"].dtype})
        yield node, narrow


def _widened(graph: fx.Graph, node: fx.Node, wide: dict[fx.Node, fx.Node | None]) -> fx.Node | None:
    """`node` in float32; None where that is not known."""
    if node.op == "placeholder":
        with graph.inserting_after(list(graph.find_nodes(op="placeholder"))[-1]):
            return (
                _call(graph, aten._to_copy.default, (node,), {"dtype": torch.float32})
                if is_half(node.meta["val"])
                else node
            )
    if _packet(node) not in _EXACT | _ROUNDED or any(wide[source] is None for source in node.all_input_nodes):
        return None
    with graph.inserting_after(node):
        args, kwargs = fx.map_arg((node.args, node.kwargs), wide.__getitem__)
        return _call(graph, node.target, args, kwargs)


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


def _call(graph: fx.Graph, target: Any, args: Any, kwargs: Any) -> fx.Node:
    made = called(graph, target, args, kwargs, torch.device("cpu"))
    made.meta[ONCE] = True
    return made
