"""Follows through a graph what lies otherwise than it did, where one value after another is laid out anew."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass.codegen.lowering.formats import channels_last_strides
from fusepass.codegen.lowering.tracer import Spec
from fusepass.patterns.analysis.layout import BATCH_NORMALISATIONS
from fusepass.patterns.infer import infer

aten = torch.ops.aten

_BY_STRIDES = frozenset(
    {aten.as_strided, aten._reshape_alias, aten.view_as_real, aten.view_as_complex, aten._unsafe_view}
)


class Unusual(Exception):
    """A layout that is not made again."""


class Relaid:
    """A copy of a graph in which values lie otherwise.

    Attributes:
        graph: the copy.
        calls: its calls as they were copied, in order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self._output = self.graph.output(self.graph.graph_copy(graph, copies))
        self._was = {copy: node.meta.get("val") for node, copy in copies.items()}
        self._changed: set[fx.Node] = set()
        self._copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
        self.calls = [copy for copy in copies.values() if copy.op == "call_function"]

    def lay_out(self, node: fx.Node, args: tuple[Any, ...], value: Any) -> None:
        """Let a call take `args`, and describe its result as `value`."""
        node.args = args
        if strides(value) != strides(self._was[node]):
            node.meta["val"] = value
            self._changed.add(node)

    def follow(self, node: fx.Node, describe: Callable[[fx.Node], Any]) -> None:
        """Say how the result of a call lies that reads what changed, as `describe` has it; where that gives None, the call reads it as it was."""
        if not self._changed.intersection(node.all_input_nodes):
            return
        value = describe(node)
        with self.graph.inserting_before(node):
            if value is None:
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self.as_before)
            else:
                self.lay_out(node, node.args, value)

    def as_before(self, node: fx.Node) -> fx.Node:
        """The value of `node`, lying as it did.

        Raises:
            Unusual: that is not the usual layout.
        """
        if node not in self._changed:
            return node
        was = self._was[node]
        if not isinstance(was, torch.Tensor) or not was.is_contiguous():
            raise Unusual
        return self.clone(node, torch.contiguous_format)

    def clone(self, node: fx.Node, memory_format: torch.memory_format) -> fx.Node:
        """A copy of `node` that lies so, where new nodes are inserted; there is one of each."""
        if (node, memory_format) not in self._copies:
            made = self.graph.call_function(aten.clone.default, (node,), {"memory_format": memory_format})
            made.meta["val"] = infer(made.target, made.args, made.kwargs, node.meta["val"].device)  # type: ignore[arg-type]
            self._copies[node, memory_format] = made
        return self._copies[node, memory_format]

    def described(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        """What a call would give if it took `args`."""
        return infer(node.target, args, node.kwargs, node.meta["val"].device)  # type: ignore[arg-type]

    @property
    def changes_results(self) -> bool:
        """Whether a result of the graph lies otherwise than it did."""
        return not self._changed.isdisjoint(self._output.all_input_nodes)

    def results_as_before(self) -> None:
        """Let the graph's results lie as they did; `Unusual` is raised as `as_before` says."""
        with self.graph.inserting_before(self._output):
            self._output.args = fx.map_arg(self._output.args, self.as_before)


def described(node: fx.Node) -> Any:
    """What a call gives, described; None where it needs what it reads as it was."""
    if node.target is operator.getitem:
        return node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr]
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target.overloadpacket in _BY_STRIDES:
        return None
    if target in BATCH_NORMALISATIONS and is_channels_last(node.args[0]):
        result, *statistics = node.meta["val"]  # meta kernels give another layout, and import Dynamo
        return channels_last(result), *statistics
    device = next(each.device for each in pytree.tree_leaves(node.meta["val"]) if isinstance(each, torch.Tensor))
    try:
        return infer(target, node.args, node.kwargs, device)
    except (RuntimeError, IndexError, ValueError):  # a view that there is not, in this layout
        return None


def is_channels_last(node: Any) -> bool:
    """Whether the image that `node` gives lies channels last."""
    return bool(node.meta["val"].is_contiguous(memory_format=torch.channels_last))


def channels_last(value: torch.Tensor) -> torch.Tensor:
    """The description of `value` if its channels were neighbours."""
    shape = tuple(value.shape)
    return Spec.described(shape, channels_last_strides(shape), value.dtype, value.device)


def strides(value: Any) -> list[tuple[int, ...]]:
    """Those by which memory is addressed."""
    return list(_addressing(value))


def _addressing(value: Any) -> Iterator[tuple[int, ...]]:
    for each in pytree.tree_leaves(value):
        if isinstance(each, torch.Tensor):
            steps = zip(each.shape, each.stride(), strict=True)
            yield tuple(stride for size, stride in steps if size > 1) if each.numel() else ()
