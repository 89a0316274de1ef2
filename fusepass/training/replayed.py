"""Inference graphs of the torch.compile backend as CUDA graphs: by themselves where that pays, always with ``mode="reduce-overhead"``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from fusepass.compile.pipeline import CompiledGraph
from fusepass.patterns.aliasing import written
from fusepass.runtime.cuda_graphs import CudaGraphs, Graphs
from fusepass.runtime.replay import Replay
from fusepass.runtime.replay_trial import ReplayTrial
from fusepass.runtime.replayable import obstacle, unasked_obstacle
from fusepass.training.calls import Call, Run


def replayed(
    compiled: CompiledGraph,
    static: Collection[int],
    name: str,
    *,
    asked: bool,
    graphs: Callable[[torch.device], Graphs] = CudaGraphs,
) -> Run:
    """Calls of `compiled` through a CUDA graph; plain ones where there can be none: random numbers are drawn, not all lies on one GPU.

    Args:
        compiled: made with ``emptying``, of an inference graph of constant shapes.
        static: positions of the arguments that lie in the same memory at each call, as parameters do.
        name: what warnings call it.
        asked: replay it from the second call on; else once its first calls show that this is quicker.
        graphs: what captures on a device.
    """
    described = [node.meta.get("val") for node in compiled.before.graph.find_nodes(op="placeholder")]
    if not all(isinstance(value, torch.Tensor) for value in described):
        return Run(compiled)
    if (obstacle if asked else unasked_obstacle)(compiled.before.graph, described) is not None:
        return Run(compiled)
    return _Replayed(compiled, static, name, asked, graphs(described[0].device))


class _Replayed(Run):
    """As `Run`, through a CUDA graph as long as that is known to be the quicker way or is being tried."""

    def __init__(
        self, compiled: CompiledGraph, static: Collection[int], name: str, asked: bool, graphs: Graphs
    ) -> None:
        super().__init__(compiled)
        nodes = compiled.before.graph.find_nodes(op="placeholder")
        states = sorted(static)
        self._order = [*states, *(number for number in range(len(nodes)) if number not in {*states})]
        places = frozenset(self._order.index(nodes.index(target)) for target in _written(compiled.before.graph))
        trial = None if asked else ReplayTrial.of(compiled.calls)
        launch = self._with(lambda values: super(_Replayed, self).best()[0](values))
        self._replay = Replay(self._with(compiled.call), len(states), places, graphs, name, trial, launch)

    def best(self) -> tuple[Call, bool]:
        if self._replay.settled and not self._replay.used:
            return super().best()
        return self._ordered, self._replay.settled

    def _with(self, call: Call) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`call`, for arguments in the order of the replay."""

        def run(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values: list[Any] = [None] * len(self._order)
            for place, argument in zip(self._order, arguments, strict=True):
                values[place] = argument
            return tuple(call(values))

        return run

    def _ordered(self, arguments: list[Any]) -> Any:
        given = [arguments[place] for place in self._order]
        arguments.clear()
        return self._replay(*given)


def _written(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders that the graph writes."""
    return [target for node in graph.nodes for target in written(node) if target.op == "placeholder"]
