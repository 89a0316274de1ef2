"""Convolutional networks on a CPU compute with images channels last where PyTorch's operators are quicker so.

Between blocked and plain layouts the library of a CPU copies each image; channels last it reads and writes as they are. Operators
hand that layout on, so it is enough to convert what the first convolutions read, and what layouts that a caller sees are made of.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass.codegen.lowering.formats import channels_last_strides
from fusepass.codegen.lowering.interpreter import Interpreter
from fusepass.codegen.lowering.tracer import Spec
from fusepass.patterns.analysis.layout import BATCH_NORMALISATIONS
from fusepass.patterns.effects import may_be_repeated
from fusepass.patterns.infer import infer

aten = torch.ops.aten

CHANNELS_LAST = "channels-last"
"""The name by which it is reported and disabled."""

_BY_STRIDES = frozenset(
    {aten.as_strided, aten._reshape_alias, aten.view_as_real, aten.view_as_complex, aten._unsafe_view}
)


def wanted(graph: fx.Graph) -> bool:
    """Whether images that are not channels last are convolved on a CPU, in a graph that may be laid out otherwise."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not may_be_repeated(graph) or not on_cpu(graph):
        return False
    return any(_is_image_convolution(node) and not _is_last(node.args[0]) for node in calls)


def on_cpu(graph: fx.Graph) -> bool:
    """Whether all values of `graph` are tensors of known sizes on a CPU."""
    values = [value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val")) if value is not None]
    return all(isinstance(value, torch.Tensor) and value.device.type == "cpu" and _is_static(value) for value in values)


def laid_out(graph: fx.GraphModule) -> fx.GraphModule | None:
    """What computes the same as `graph`, which is `wanted`, with images channels last inside; its results lie as they did.

    Gives None where that cannot be: a value of another layout than the usual one would have to be made again.
    """
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = made.output(made.graph_copy(graph.graph, copies))
    layouts = _Layouts({copy: node.meta.get("val") for node, copy in copies.items()})
    try:
        for node in copies.values():
            if node.op == "call_function":
                layouts.call(node)
        with made.inserting_before(output):
            output.args = fx.map_arg(output.args, layouts.as_before)
    except _Unusual:
        return None
    return fx.GraphModule(graph, made)


class _Layouts:
    """Follows through a graph what lies otherwise than it did."""

    def __init__(self, was: dict[fx.Node, Any]) -> None:
        self._was = was
        self._changed: set[fx.Node] = set()
        self._copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}

    def call(self, node: fx.Node) -> None:
        """Lay out what a call reads and say how its result lies."""
        with node.graph.inserting_before(node):
            if _is_image_convolution(node):
                image, *others = node.args
                others = fx.map_arg(others, self.as_before)
                node.args = (image if _is_last(image) else self._clone(image, torch.channels_last), *others)  # type: ignore[arg-type]
                self._set(node, channels_last(self._was[node]))
            elif self._changed.intersection(node.all_input_nodes):
                value = _value(node)
                if value is None:
                    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self.as_before)
                else:
                    self._set(node, value)

    def as_before(self, node: fx.Node) -> fx.Node:
        """The value of `node`, lying as it did.

        Raises:
            _Unusual: that is not the usual layout.
        """
        if node not in self._changed:
            return node
        was = self._was[node]
        if not isinstance(was, torch.Tensor) or not was.is_contiguous():
            raise _Unusual
        return self._clone(node, torch.contiguous_format)

    def _clone(self, node: fx.Node, memory_format: torch.memory_format) -> fx.Node:
        if (node, memory_format) not in self._copies:
            made = node.graph.call_function(aten.clone.default, (node,), {"memory_format": memory_format})
            made.meta["val"] = _value(made)
            self._copies[node, memory_format] = made
        return self._copies[node, memory_format]

    def _set(self, node: fx.Node, value: Any) -> None:
        if _strides(value) != _strides(self._was[node]):
            node.meta["val"] = value
            self._changed.add(node)


class Followed(Interpreter):
    """Runs a graph and raises `RuntimeError` where a result lies otherwise than its description says."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and _strides(result) != _strides(n.meta["val"]):
            raise RuntimeError(f"{n.name} lies otherwise than described")
        return result


class _Unusual(Exception):
    """A layout that is not made again."""


def _value(node: fx.Node) -> Any:
    """What a call gives, described; None where it needs what it reads as it was."""
    if node.target is operator.getitem:
        return node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr]
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target.overloadpacket in _BY_STRIDES:
        return None
    if target in BATCH_NORMALISATIONS and _is_last(node.args[0]):
        result, *statistics = node.meta["val"]  # meta kernels give another layout, and import Dynamo
        return channels_last(result), *statistics
    try:
        return infer(target, node.args, node.kwargs, torch.device("cpu"))
    except (RuntimeError, IndexError, ValueError):  # a view that there is not, in this layout
        return None


def _is_image_convolution(node: fx.Node) -> bool:
    if node.target is not aten.convolution.default:
        return False
    value = node.meta["val"]
    return bool(value.dim() == 4 and value.dtype in (torch.float32, torch.bfloat16))


def _is_last(node: Any) -> bool:
    return bool(node.meta["val"].is_contiguous(memory_format=torch.channels_last))


def channels_last(value: torch.Tensor) -> torch.Tensor:
    """The description of `value` if its channels were neighbours."""
    shape = tuple(value.shape)
    return Spec.described(shape, channels_last_strides(shape), value.dtype, value.device)


def _is_static(value: torch.Tensor) -> bool:
    return not any(not isinstance(size, int) for size in (*value.shape, *value.stride()))


def _strides(value: Any) -> list[tuple[int, ...]]:
    """Those by which memory is addressed."""
    return list(_addressing(value))


def _addressing(value: Any) -> Iterator[tuple[int, ...]]:
    for each in pytree.tree_leaves(value):
        if isinstance(each, torch.Tensor):
            steps = zip(each.shape, each.stride(), strict=True)
            yield tuple(stride for size, stride in steps if size > 1) if each.numel() else ()
