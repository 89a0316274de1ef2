"""Calls of the CPU's library with weights that it has laid out before, and what else is made of parameters once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fusepass import measure
from fusepass.patterns.arguments import arguments
from fusepass.patterns.dataflow import remove_dead
from fusepass.patterns.once import made_of
from fusepass.patterns.packing import Call, kept_values, packed_calls
from fusepass.runtime.kept import Kept

aten, library = torch.ops.aten, torch.ops.mkldnn


class Packed:
    """What a graph on a CPU keeps from call to call.

    Args:
        graph_module: as `fusepass.patterns.packing.pack` left it.

    Attributes:
        make: makes it of parameters.
        sizes: the bytes of each of these.

    Raises:
        BuildError: there is no compiler, or it failed.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        graph, calls, others = fx.Graph(), [*packed_calls(graph_module.graph)], [*kept_values(graph_module.graph)]
        made = [value for call in calls for value in (call.weight, call.bias) if value is not None]
        nodes = made_of([*made, *others])
        parameters = [node for node in nodes if node.op == "placeholder"]
        copies = {node: graph.placeholder(node.name) for node in parameters}
        for node, copy in copies.items():
            copy.meta = dict(node.meta)
        for node in nodes:
            if node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        self._places: list[tuple[int, int | None]] = []
        results: list[fx.Node] = []
        for call in calls:
            weight, bias = len(results), None
            results.append(_laid_out(graph, call, copies[call.weight]))
            if call.bias is not None and call.bias.op != "placeholder":
                bias = len(results)
                results.append(copies[call.bias])
            self._places.append((weight, bias))
        self._first_other = len(results)
        graph.output((*results, *(copies[node] for node in others)))
        self._numbers = [
            number for number, node in enumerate(graph_module.graph.find_nodes(op="placeholder")) if node in copies
        ]
        self.make = fx.GraphModule(graph_module, graph)
        self.sizes = [_bytes(node.meta["val"]) for node in parameters]
        self._kept = Kept(self.make.forward, self.sizes)

    @property
    def call(self) -> Callable[..., Any]:
        """What a graph calls for what is kept, with the parameters."""
        return self._kept.of

    def use(self, graph_module: fx.GraphModule) -> None:
        """Let `graph_module`, which has the arguments and the nodes of the first one, call the library so, in place."""
        graph = graph_module.graph
        given = list(graph.find_nodes(op="placeholder"))
        with graph.inserting_after(given[-1]):
            kept = graph.call_function(self.call, tuple(given[number] for number in self._numbers))
        for number, node in enumerate([*kept_values(graph)], self._first_other):
            with graph.inserting_after(kept):
                value = graph.call_function(operator.getitem, (kept, number))
            value.meta = {"val": node.meta["val"]}
            node.replace_all_uses_with(value)
        for call, (weight, bias) in zip(packed_calls(graph), self._places, strict=True):
            with graph.inserting_before(call.result):
                packed = graph.call_function(operator.getitem, (kept, weight))
                own = call.bias if bias is None else graph.call_function(operator.getitem, (kept, bias))
                target, args = _of_library(call, packed, own)
                made = graph.call_function(target, args)
            made.meta = dict(call.result.meta)
            call.result.replace_all_uses_with(made)
        remove_dead(graph)
        graph.lint()
        graph_module.recompile()


def _laid_out(graph: fx.Graph, call: Call, weight: fx.Node) -> fx.Node:
    """The node of the weight as the library wants it for `call`."""
    shape = list(call.anchor.args[call.anchor.target is aten.addmm.default].meta["val"].shape)  # type: ignore[union-attr]
    if call.anchor.target is aten.convolution.default:
        return graph.call_function(library._reorder_convolution_weight.default, (weight, *_geometry(call), shape))
    rows = graph.call_function(aten.t.default, (weight,))
    rows = graph.call_function(aten.contiguous.default, (rows,))
    return graph.call_function(library._reorder_linear_weight.default, (rows, shape[0]))


def _geometry(call: Call) -> tuple[Any, ...]:
    given = arguments(call.anchor)
    return given["padding"], given["stride"], given["dilation"], given["groups"]


def _of_library(call: Call, weight: fx.Node, bias: fx.Node | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The library's operator for `call` and its arguments."""
    function = call.function
    if call.anchor.target is aten.addmm.default or call.anchor.target is aten.mm.default:
        rows = call.anchor.args[call.anchor.target is aten.addmm.default]
        return library._linear_pointwise.default, (rows, weight, bias, function.name, list(function.scalars), "")
    x, geometry = call.anchor.args[0], _geometry(call)
    if call.other is None:
        ends = (function.name, list(function.scalars), "")
        return library._convolution_pointwise.default, (x, weight, bias, *geometry, *ends)
    last = None if function.name == "none" else function.name
    return library._convolution_pointwise.binary, (x, call.other, weight, bias, *geometry, "add", 1.0, last, [], "")


def _bytes(value: torch.Tensor) -> int:
    """From the first element in memory to the last."""
    return measure.extent(value) * value.dtype.itemsize
