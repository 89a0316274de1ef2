"""Draws that nothing uses: AOTAutograd drops them, and the generator would be elsewhere afterwards than eager leaves it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusepass.patterns.effects import is_random


def with_draws(graph: fx.GraphModule, compiled: Callable[[fx.GraphModule], Callable[..., Any]]) -> Callable[..., Any]:
    """What ``compiled`` makes of `graph`, as Dynamo traced it, with unused draws among its results; a call leaves these out."""
    unused = [node for node in _unused(graph.graph) if _draws(node)]
    if not unused:
        return compiled(graph)
    nodes: dict[fx.Node, fx.Node] = {}
    whole = fx.Graph()
    results = whole.graph_copy(graph.graph, nodes)
    assert isinstance(results, tuple | list)  # as Dynamo's graphs have them
    whole.output((*results, *(_detached(whole, nodes[node]) for node in unused)))
    run = compiled(fx.GraphModule(graph, whole))
    return lambda *arguments: run(*arguments)[: len(results)]


def _unused(graph: fx.Graph) -> Iterator[fx.Node]:
    """Calls that give tensors and that no output needs."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in needed:
            needed.update(node.all_input_nodes)
        elif node.op.startswith("call") and _mode(node) is not None:
            yield node


def _draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers, by a run of it over fake tensors that look like what it was traced with.

    They are new ones: those that Dynamo left are of several modes, and a call may write to what they look like.
    """
    mode, watch = FakeTensorMode(shape_env=_mode(node).shape_env), _Watch()  # type: ignore[no-untyped-call]
    with mode, torch.no_grad():
        arguments, keywords = fx.node.map_aggregate((node.args, node.kwargs), _value)
        call = node.target if callable(node.target) else getattr(arguments[0], str(node.target))
        with watch, contextlib.suppress(*_NEEDS_VALUES):
            call(*arguments[0 if callable(node.target) else 1 :], **keywords)
    return watch.drew


_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What operators raise that need to know elements; what they drew before that has been seen."""


class _Watch(TorchDispatchMode):
    """Sees whether an operator draws."""

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew |= is_random(func)
        return func(*args, **(kwargs or {}))


def _mode(node: fx.Node) -> Any:
    """The fake tensor mode of a call's results; None where they are no tensors but sizes, say, or cannot leave a `torch.func` transform."""
    results = pytree.tree_leaves(node.meta.get("example_value"))
    tensors = [each for each in results if isinstance(each, torch.Tensor)]
    if any(map(is_functorch_wrapped_tensor, tensors)):
        return None
    return detect_fake_mode(tensors) if tensors else None


def _value(argument: Any) -> Any:
    """What an argument stands for; of a tensor, one that looks like it."""
    value = argument.meta["example_value"] if isinstance(argument, fx.Node) else argument
    return pytree.tree_map_only(torch.Tensor, _like, value)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """An element of the first tensor among the results of a call: no view, which would be made anew of what it views when the graph has run."""
    value = node.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        number = next(number for number, each in enumerate(value) if isinstance(each, torch.Tensor))
        node = graph.call_function(operator.getitem, (node, number))
    flat = graph.call_method("reshape", (graph.call_method("detach", (node,)), -1))
    return graph.call_method("clone", (graph.call_function(operator.getitem, (flat, slice(1))),))
