"""What a forward that branches on tensors asked of them, so that a later call can be asked the same.

``if mask.all(): mask = None``: the graph of one run is right for all calls that take the same branches. A `Condition` finds that
out with the operators that forward itself would run, before anything else runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusepass.errors import CaptureError
from fusepass.patterns.ancestors import ancestors
from fusepass.patterns.deciding import note_operands
from fusepass.patterns.effects import is_random

MOST_BRANCHES = 8
"""Questions of one forward; loops until a condition holds ask more."""
_MOST_OPS = 32
_MOST_ELEMENTS = 2**16
"""Limits of one condition: it is computed in addition to the graph, so it has to cost next to nothing."""


@dataclass(frozen=True)
class Condition:
    """A question to the arguments of a graph, and the answer that the graph is right for.

    Attributes:
        graph: takes the arguments of the graph, gives a tensor of one bool.
        answer: what it gave in the run that was recorded.
    """

    graph: fx.GraphModule
    answer: bool

    def holds(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the answer is the same for `arguments`; waits for the device, as forward does."""
        return bool(self.graph(*arguments)) is self.answer


def condition(
    owner: fx.GraphModule, asked: fx.Node, answer: bool, arguments: Mapping[fx.Node, str]
) -> Condition | None:
    """What `asked`, a node of `owner`, needs to be computed from `arguments`: placeholders of `owner`, in order, with names. None where it is
    computed from constants alone, so that no call answers it in another way.

    Raises:
        CaptureError: that would cost too much, or draws random numbers.
    """
    needed = ancestors([asked])
    random = any(is_random(node.target) for node in needed)
    if not random and not any(node in arguments or node.op == "get_attr" for node in needed):
        return None
    if len(needed) > _MOST_OPS or any(map(_is_large, needed)):
        raise CaptureError("forward depends on the values of a tensor that takes long to compute")
    if random:
        raise CaptureError("forward depends on the values of random numbers")
    graph = fx.Graph()
    copied = {node: graph.placeholder(name) for node, name in arguments.items()}
    for node in owner.graph.nodes:
        if node in needed and node not in copied:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(copied[asked])
    note_operands(needed)
    return Condition(fx.GraphModule(owner, graph), answer)


def _is_large(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() > _MOST_ELEMENTS
