"""How much forward may save for backward: PyTorch's ``activation_memory_budget``, by which only what is the same the second time is computed again.

PyTorch takes the budget for advice to its own backend, whose random numbers are functions of a seed. Here operators draw as eager does, so what
they give is saved; so is what `fusepass.training.compared` marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch import config, partitioners
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from fusepass.capture.threads import replaced
from fusepass.config import current
from fusepass.patterns.arguments import arguments
from fusepass.patterns.effects import is_random
from fusepass.training.compared import is_saved

_LEAST = 1e-9  # at 0 PyTorch would compute again what has to be saved
_KNOWN = ("aten", "prims", "fusepass")


def budget() -> float:
    """The share in force: the option's, or PyTorch's own where that is smaller."""
    return float(min(current().memory_budget, config.activation_memory_budget))


@contextmanager
def within_budget(graph: fx.Graph) -> Iterator[None]:
    """Have PyTorch's minimum cut of `graph` save no more than the budget allows, but all that may be another value the second time."""
    for node in graph.nodes:
        if "recompute" not in node.meta and _differs_each_time(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with (
        config.patch(activation_memory_budget=max(budget(), _LEAST)),
        replaced(partitioners, "solve_min_cut", _cut),
        replaced(partitioners, "choose_saved_values_set", _chosen),
    ):
        yield


_solve_min_cut = partitioners.solve_min_cut
_choose = partitioners.choose_saved_values_set


def _cut(graph: fx.Graph, info: Any, options: Any, dont_ban: Any = None) -> Any:
    """PyTorch's minimum cut, which computes nothing again that has to be saved, whatever the budget asks for."""
    free = None if dont_ban is None else type(dont_ban)(node for node in dont_ban if not is_saved(node))
    return _solve_min_cut(graph, info, options, free)


def _chosen(graph: fx.Graph, info: Any, memory_budget: float = 1) -> list[fx.Node]:
    """What PyTorch saves, and what has to be saved, which it forgets if nothing else is left to choose from; what nobody reads falls away."""
    found = _choose(graph, info, memory_budget)
    if memory_budget < 1:
        found = [*found, *(node for node in graph.nodes if is_saved(node) and info.is_required_fw(node))]
    return list(dict.fromkeys(tensor for node in found for tensor in _tensors(node)))


def _tensors(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, or the parts of it where it gives several."""
    if isinstance(node.meta.get("val"), tuple | list):
        yield from (part for part in node.users if isinstance(part.meta.get("val"), torch.Tensor))
    else:
        yield node


def _differs_each_time(node: fx.Node) -> bool:
    """Whether `node` may give another value when it is run again: it draws, or nobody here knows it."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target.namespace not in _KNOWN:
        return True
    return is_random(node.target) and arguments(node).get("dropout_p") != 0
