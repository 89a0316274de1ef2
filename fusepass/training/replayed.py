"""Inference graphs of the torch.compile backend as CUDA graphs: what ``mode="reduce-overhead"`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusepass.compile.pipeline import CompiledGraph
from fusepass.runtime.replay import CudaGraphs, Graphs, Replay, obstacle


def replayed(
    compiled: CompiledGraph,
    static: Sequence[int],
    name: str,
    graphs: Callable[[torch.device], Graphs] = CudaGraphs,
) -> Callable[[list[Any]], Any]:
    """``compiled.call``, replayed from its second call on where that can be: no random numbers, everything on one GPU.

    Args:
        compiled: made with ``emptying``, of an inference graph of constant shapes.
        static: positions of the arguments that lie in the same memory at each call, as parameters do.
        name: what warnings call it.
        graphs: what captures on a device.
    """
    graph = compiled.before.graph
    nodes = graph.find_nodes(op="placeholder")
    described = [node.meta.get("val") for node in nodes]
    if not all(isinstance(value, torch.Tensor) for value in described) or obstacle(graph, described) is not None:
        return compiled.call
    states = sorted(static)
    order = [*states, *(number for number in range(len(nodes)) if number not in {*states})]
    written = frozenset(order.index(nodes.index(target)) for target in _written(graph))

    def call(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values: list[Any] = [None] * len(order)
        for place, argument in zip(order, arguments, strict=True):
            values[place] = argument
        return tuple(compiled.call(values))

    replay = Replay(call, len(states), written, graphs(described[0].device), name)

    def run(arguments: list[Any]) -> Any:
        ordered = [arguments[place] for place in order]
        arguments.clear()
        return replay(*ordered)

    return run


def _written(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders that the graph writes."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [copy.args[0] for copy in copies if isinstance(copy.args[0], fx.Node) and copy.args[0].op == "placeholder"]
