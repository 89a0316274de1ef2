"""Convolutional networks on a CPU compute with images channels last where PyTorch's operators are quicker so.

Between blocked and plain layouts the library of a CPU copies each image; channels last it reads and writes as they are. Operators
hand that layout on, so it is enough to convert what the first convolutions read, and what layouts that a caller sees are made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fusepass.codegen.lowering.interpreter import Interpreter
from fusepass.patterns.effects import may_be_repeated
from fusepass.patterns.relaid import Relaid, Unusual, channels_last, described, is_channels_last, strides

aten = torch.ops.aten

CHANNELS_LAST = "channels-last"
"""The name by which it is reported and disabled."""


def wanted(graph: fx.Graph) -> bool:
    """Whether images that are not channels last are convolved on a CPU, in a graph that may be laid out otherwise."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not may_be_repeated(graph) or not on_cpu(graph):
        return False
    return any(_is_image_convolution(node) and not is_channels_last(node.args[0]) for node in calls)


def on_cpu(graph: fx.Graph) -> bool:
    """Whether all values of `graph` are tensors of known sizes on a CPU."""
    values = [value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val")) if value is not None]
    return all(isinstance(value, torch.Tensor) and value.device.type == "cpu" and _is_static(value) for value in values)


def laid_out(graph: fx.GraphModule) -> fx.GraphModule | None:
    """What computes the same as `graph`, which is `wanted`, with images channels last inside; its results lie as they did.

    Gives None where that cannot be: a value of another layout than the usual one would have to be made again.
    """
    relaid = Relaid(graph.graph)
    try:
        for node in relaid.calls:
            if _is_image_convolution(node):
                _convolve(relaid, node)
            else:
                relaid.follow(node, described)
        relaid.results_as_before()
    except Unusual:
        return None
    return fx.GraphModule(graph, relaid.graph)


def _convolve(relaid: Relaid, node: fx.Node) -> None:
    image, *others = node.args
    value = channels_last(node.meta["val"])
    with relaid.graph.inserting_before(node):
        others = fx.map_arg(others, relaid.as_before)
        last = image if is_channels_last(image) else relaid.clone(image, torch.channels_last)  # type: ignore[arg-type]
    relaid.lay_out(node, (last, *others), value)


class Followed(Interpreter):
    """Runs a graph and raises `RuntimeError` where a result lies otherwise than its description says."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and strides(result) != strides(n.meta["val"]):
            raise RuntimeError(f"{n.name} lies otherwise than described")
        return result


def _is_image_convolution(node: fx.Node) -> bool:
    if node.target is not aten.convolution.default:
        return False
    value = node.meta["val"]
    return bool(value.dim() == 4 and value.dtype in (torch.float32, torch.bfloat16))


def _is_static(value: torch.Tensor) -> bool:
    return not any(not isinstance(size, int) for size in (*value.shape, *value.stride()))
