"""The rewritten graph: each region's nodes give way to one call."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen

from fusepass.compile.boundary_views import Edges, views_between
from fusepass.compile.writes import is_write
from fusepass.patterns.dataflow import WRITES, remove_dead
from fusepass.patterns.ordering import execution_order
from fusepass.patterns.partition import Region


class Part(Protocol):
    """Nodes of a graph that may be taken out of it, as those of a region."""

    @property
    def inputs(self) -> Sequence[fx.Node]: ...
    @property
    def nodes(self) -> Sequence[fx.Node]: ...
    @property
    def outputs(self) -> Sequence[fx.Node]: ...


def subgraph(owner: fx.GraphModule, region: Part) -> fx.GraphModule:
    """The region's own graph: a placeholder per input, in order, and a tuple of its outputs. Its code is made when it first runs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in region.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in region.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in region.outputs))
    return _LazyGraphModule(owner, graph)


def splice(
    owner: fx.GraphModule,
    regions: Sequence[Region],
    ways: Mapping[str, Edges],
    targets: Mapping[str, Callable[..., Any]],
) -> _LazyGraphModule:
    """`owner` with a call of ``targets[region.name]`` in place of each region; `owner` itself is not changed.

    Its function is generated once it is asked for: edits of the graph come first.

    Args:
        owner: the captured graph.
        regions: disjoint; contracting each leaves the graph acyclic.
        ways: per region name, what its call takes and gives.
        targets: per region name, what to call; gives a tensor, or a tuple of them for several results.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for item in execution_order(owner.graph, regions):
        if isinstance(item, fx.Node):
            if item not in copies:
                copies[item] = graph.node_copy(item, copies.__getitem__)
            continue
        way = ways[item.name]
        call = graph.call_function(targets[item.name], tuple(copies[node] for node in way.arguments))
        call.name = graph._graph_namespace.create_name(item.name, None)
        _give_results(graph, item.outputs, way.results, call, copies)
    remove_dead(graph)  # views that regions read through
    graph.lint()
    return _LazyGraphModule(owner, graph)


def empty_arguments(graph: fx.Graph) -> None:
    """Let the function that is generated take a list that it empties: each argument is let go of where it is used last, as other values are."""
    graph.set_codegen(_BoxedCodeGen())


def keep_code(module: fx.GraphModule) -> None:
    """Let go of the graph of a module that only runs from now on: nodes are most of the memory that a signature takes."""
    del module._graph


def only_call(graph: fx.Graph) -> tuple[Callable[..., Any], tuple[int, ...]] | None:
    """What a flat graph calls with some of its arguments, and which, where that gives the graph's results; else None."""
    arguments = list(graph.find_nodes(op="placeholder"))
    others = [node for node in graph.nodes if node.op != "placeholder"]
    if not others or others[0].op != "call_function" or others[0].kwargs:
        return None
    call, *parts, output = others
    if any(part.op != "call_function" or part.target is not operator.getitem for part in parts):
        return None
    if any(part.args != (call, number) for number, part in enumerate(parts)):
        return None
    if output.args != (tuple(parts or [call]),) or (parts and len(call.meta["val"]) != len(parts)):
        return None
    if any(argument not in arguments for argument in call.args):
        return None
    return call.target, tuple(map(arguments.index, call.args))


def with_targets(
    module: fx.GraphModule, targets: Mapping[Callable[..., Any], Callable[..., Any]]
) -> Callable[..., tuple[Any, ...]]:
    """The function that `module` is, calling ``targets[f]`` where it calls ``f``."""
    forward = module.forward.__func__  # type: ignore[attr-defined]
    others = {id(before): after for before, after in targets.items()}
    names = {name: others.get(id(value), value) for name, value in forward.__globals__.items()}
    return types.MethodType(types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__), module)


def _give_results(
    graph: fx.Graph,
    outputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
    call: fx.Node,
    copies: dict[fx.Node, fx.Node],
) -> None:
    pairs = [pair for pair in zip(outputs, results, strict=True) if not is_write(pair[1])]
    copies.update({result: copies[result.all_input_nodes[0]] for result in results if is_write(result)})
    values = tuple(result.meta["val"] for _, result in pairs)
    many = len(pairs) > 1
    call.meta["val"] = values[0] if len(pairs) == 1 else values
    call.meta[WRITES] = len(pairs) < len(results)
    for number, (output, result) in enumerate(pairs):
        made = call
        if many:
            made = graph.call_function(operator.getitem, (call, number))
            made.meta["val"] = values[number]
        copies[output] = made
        copies.update(dict.fromkeys(views_between(result, output), made))
