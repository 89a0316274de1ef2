"""Draws of one call of a graph: what each finds of the generator is told to the device at once; see `fusepass.runtime.draws`."""

from __future__ import annotations

from typing import Any, cast

from torch import fx

from fusepass.compile.dropout import draw
from fusepass.runtime.draws import draws


def gather_draws(graph: fx.Graph) -> None:
    """Let several draws from one generator begin with one launch, in place."""
    found: dict[Any, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=draw):
        found.setdefault(node.kwargs["device"], []).append(node)
    for device, nodes in found.items():
        if len(nodes) < 2:
            continue
        begin, drawn = draws([cast(list[int], node.args[0]) for node in nodes], device)
        with graph.inserting_before(nodes[0]):
            foreseen = graph.call_function(begin)
        for number, node in enumerate(nodes):
            node.target, node.args, node.kwargs = drawn, (foreseen, number), {}
