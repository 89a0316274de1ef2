"""Runs a captured graph operator by operator, as eager would, and shows what each region takes and gives on the way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusepass import measure
from fusepass.autotune.work import Work
from fusepass.compile.pipeline import CompiledGraph
from fusepass.numerics.agreement import as_tuple
from fusepass.patterns.ordering import execution_order
from fusepass.patterns.region import Region

Item = fx.Node | Region
Values = dict[fx.Node, Any]
Run = Callable[[Values], None]
Tensors = tuple[torch.Tensor, ...]


def walk(
    compiled: CompiledGraph,
    arguments: Sequence[torch.Tensor],
    written: frozenset[int],
    visit: Callable[[Work, Tensors, Tensors], None],
) -> Tensors:
    """The results of `compiled` by PyTorch's own operators, after all rewrites.

    Args:
        compiled: the graph and its regions.
        arguments: for the placeholders. They are read only.
        written: positions of those that the graph writes; copies are written instead.
        visit: is given each region with the tensors that its call takes, and what its operators made of them.
    """
    graph = compiled.before.graph
    works = {work.region: work for work in compiled.works}
    items = execution_order(graph, list(works))
    read_last = last_reads(items)
    device = torch.device(compiled.report.device)
    with measure.as_compiled_code_runs(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
        values = given(graph, arguments, written)
        for number, item in enumerate(items):
            if isinstance(item, fx.Node):
                if item.op == "output":
                    flat: Any = item.args[0]
                    results = tuple(values[node] for node in flat)
                node_run(item, compiled.before)(values)
            else:
                work = works[item]
                taken = tuple(values[node] for node in work.arguments)
                made = as_tuple(work.original()(*taken))
                visit(work, taken, made)
                values.update(zip(item.outputs, made, strict=True))
            for node in read_last.get(number, ()):
                values.pop(node, None)
    return results


def given(graph: fx.Graph, arguments: Sequence[torch.Tensor], written: frozenset[int]) -> Values:
    """The values of the placeholders; what the graph writes is a copy."""
    own = [tensor.clone() if number in written else tensor for number, tensor in enumerate(arguments)]
    return dict(zip(graph.find_nodes(op="placeholder"), own, strict=True))


def node_run(node: fx.Node, owner: fx.GraphModule) -> Run:
    """What computes a node from the values so far."""
    if node.op in ("placeholder", "output"):
        return lambda values: None
    if node.op == "get_attr":
        constant = operator.attrgetter(str(node.target))(owner)
        return lambda values: values.__setitem__(node, constant)

    def run(values: Values) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    return run


def nodes_of(item: Item) -> tuple[fx.Node, ...]:
    """The nodes of a region, or the one that is none."""
    return item.nodes if isinstance(item, Region) else (item,)


def last_reads(items: Sequence[Item]) -> dict[int, list[fx.Node]]:
    """The nodes whose values nobody reads any more behind the item of that number; those of results stay."""
    place = {node: number for number, item in enumerate(items) for node in nodes_of(item)}
    found: dict[int, list[fx.Node]] = {}
    for number, item in enumerate(items):
        for node in item.outputs if isinstance(item, Region) else (item,):
            last = max((place[user] for user in node.users), default=number)
            found.setdefault(last, []).append(node)
    return found
