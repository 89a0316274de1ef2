"""Casts of a graph's inputs that no region took, as under autocast those of weights: one call makes all of a type, on CUDA in a few kernels."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fusepass.runtime.operators import cast_all

aten = torch.ops.aten


def gather_casts(graph_module: fx.GraphModule) -> None:
    """Let casts of inputs from one type to another become one call, in place.

    Args:
        graph_module: flat; every node has a tensor in ``meta["val"]``.
    """
    graph = graph_module.graph
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        (source,) = node.all_input_nodes
        before, after = source.meta["val"], node.meta["val"]
        plain = {*node.kwargs} == {"dtype"} and before.stride() == after.stride()
        if source.op == "placeholder" and plain and before.dtype is not after.dtype:
            groups.setdefault((before.device, before.dtype, after.dtype), []).append(node)
    several = {key: nodes for key, nodes in groups.items() if len(nodes) > 1}
    for (_, _, dtype), nodes in several.items():
        _replace(graph, nodes, dtype)
    if several:
        graph.lint()
        graph_module.recompile()


def _replace(graph: fx.Graph, nodes: list[fx.Node], dtype: torch.dtype) -> None:
    """One call in place of `nodes`, before the first of them."""
    with graph.inserting_before(nodes[0]):
        layouts = tuple((tuple(node.meta["val"].shape), node.meta["val"].stride()) for node in nodes)
        made = graph.call_function(cast_all, ([node.args[0] for node in nodes], dtype, layouts))
        for number, node in enumerate(nodes):
            item = graph.call_function(operator.getitem, (made, number))
            item.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(item)
    for node in nodes:
        graph.erase_node(node)
