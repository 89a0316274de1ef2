"""Assignments through a mask, in a graph of Dynamo's that gradients will be taken of: they become a choice between old and new elements.

The gradient of what ``x[mask] = token`` assigns has as many rows as the mask has places, which AOTAutograd cannot trace, so that the graph would
end there. Where all places get the same, the gradient of a choice is the same, and its sizes are known.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx


def with_choices(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph` with choices in place of such assignments; `graph` itself is not changed."""
    if not torch.is_grad_enabled():
        return graph
    if not any(map(_is_choice, graph.graph.find_nodes(op="call_function", target=operator.setitem))):
        return graph
    whole = fx.Graph()
    whole.output(whole.graph_copy(graph.graph, {}))
    for node in filter(_is_choice, whole.find_nodes(op="call_function", target=operator.setitem)):
        with whole.inserting_before(node):
            _choose(whole, *node.args)
        whole.erase_node(node)
    return fx.GraphModule(graph, whole)


def _is_choice(node: fx.Node) -> bool:
    """Whether an assignment is of what asks for a gradient, through a mask, the same in all its places."""
    x, mask, new = map(_value, node.args)
    if not (isinstance(x, Tensor) and isinstance(mask, Tensor) and isinstance(new, Tensor)):
        return False
    if mask.dtype is not torch.bool or not mask.dim() or not new.requires_grad or new.dtype is not x.dtype:
        return False
    if not x.device == mask.device == new.device:
        return False
    places = (1, *x.shape[mask.dim() :])
    return new.dim() <= len(places) and all(
        here in (1, there) for here, there in zip(reversed(new.shape), reversed(places), strict=False)
    )


def _choose(whole: fx.Graph, x: Any, mask: Any, new: Any) -> None:
    """Add the choice to a graph, and write it to `x`."""
    given, rest = _value(mask).dim(), _value(x).dim() - _value(mask).dim()
    places = whole.call_function(operator.getitem, (mask, (slice(None),) * given + (None,) * rest))
    chosen = whole.call_function(torch.where, (places, new, x))
    whole.call_method("copy_", (x, chosen))


def _value(argument: Any) -> Any:
    """What an argument stands for, as Dynamo traced it."""
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument
