"""A graph of a training step in segments, for CUDA graphs: what a caller gives and gets of large tensors is launched around the replay.

A replay reads and writes memory of its own, to and from which such tensors would be copied. So the last operators of forward, which
give logits, say, and the first ones of backward, which read their gradient, stay outside.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from fusepass.compile.splice import empty_arguments, keep_code
from fusepass.patterns.aliasing import is_view
from fusepass.patterns.dataflow import has_effect
from fusepass.patterns.traffic import nbytes
from fusepass.runtime.operators import reinterpret
from fusepass.runtime.region import FusedRegion

Call = Callable[[list[Any]], Sequence[Any]]
"""Takes a list, which it empties."""

LARGE = 1 << 24
"""Bytes of a tensor from which it is worth a launch."""

_MOST_BEFORE = 16
"""Operators before the replay, which the device would wait for."""

_SAVED = 2
"""Times as many bytes as operators before the replay must give it at most."""


@dataclass(frozen=True)
class Cut:
    """Nodes of a graph that are run before all others, or behind them."""

    head: frozenset[fx.Node] = frozenset()
    tail: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True)
class Segments:
    """A graph as up to three functions, one after another.

    Attributes:
        head: of the graph's arguments: values for `body`, then the results in the places `early`.
        body: of the arguments and these values: the results, None in place of others' ones, then `asked` values for `tail`.
        tail: of the arguments and these values: the results in the places `late`.
        unread: places of arguments that `head` alone reads.
    """

    head: Call | None
    body: Call
    tail: Call | None
    early: Sequence[int]
    late: Sequence[int]
    asked: int
    unread: Sequence[int]

    def begin(self, arguments: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        """The arguments of `body`, and what of the results is there already."""
        given = [*arguments]
        if self.head is None:
            return given, ()
        made = self.head([*arguments])
        for place in self.unread:
            given[place] = arguments[place].new_empty(0)
        count = len(made) - len(self.early)
        return [*given, *made[:count]], made[count:]

    def end(self, arguments: Sequence[Any], early: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """All results, of `begin`'s and those of `body`; the `arguments` are the graph's."""
        count = len(results) - self.asked
        whole = [*results[:count]]
        late = () if self.tail is None else self.tail([*arguments, *results[count:]])
        for place, result in itertools.chain(zip(self.early, early, strict=True), zip(self.late, late, strict=True)):
            whole[place] = result
        return whole


def find_cut(graph: fx.Graph, visible: int) -> Cut | None:
    """Where to cut a graph of forward, whose first `visible` results are not for backward alone, or one of backward; None where nothing is won.

    Args:
        graph: what a call runs, operators as PyTorch has them; nodes that make tensors have these in ``meta["val"]``.
    """
    gradients = [node for node in graph.find_nodes(op="placeholder") if str(node.target).startswith("tangents")]
    head = _readers(graph, {node for node in gradients if _nbytes(node) >= LARGE})
    if head:
        return Cut(head=head) if _may_move(graph, head) else None
    results: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    saved = {node for node in results[visible:] if isinstance(node, fx.Node)}
    makers = {
        _maker(node) for node in results[:visible] if saved and isinstance(node, fx.Node) and _nbytes(node) >= LARGE
    }
    made = [frozenset({maker, *_parts(maker)}) for maker in makers]
    alone = [each for each in made if not each & saved and _are_results(each) and _may_move(graph, each)]
    return Cut(tail=frozenset().union(*alone)) if alone else None


def _readers(graph: fx.Graph, large: Collection[fx.Node]) -> frozenset[fx.Node] | None:
    """What reads `large` arguments, or copies and views of them, with all that it needs; None where something else comes before it, or
    its results are large, too."""
    heavy, head = set(large), set[fx.Node]()
    least = min(map(_nbytes, large), default=0)
    for node in graph.nodes:
        if node.op == "call_function" and not heavy.isdisjoint(node.all_input_nodes):
            head.add(node)
            heavy |= {node} if _is_part(node) or _nbytes(node) >= least else set()
    needed = [*head]
    for node in needed:  # and all results of a call that gives several
        items = {user for user in node.users if user.target is operator.getitem}
        new = ({each for each in node.all_input_nodes if each.op != "placeholder"} | items) - head
        needed += new
        head |= new
    given = [node for node in head if any(user not in head and user.op != "output" for user in node.users)]
    few = len(head) <= _MOST_BEFORE and _SAVED * sum(map(_nbytes, given)) <= sum(map(_nbytes, large))
    return frozenset(head) if few else None


def _maker(node: fx.Node) -> fx.Node:
    """What gives the memory of `node`."""
    while _is_part(node):
        node = node.all_input_nodes[0]
    return node


def _parts(node: fx.Node) -> Iterator[fx.Node]:
    """Results of a call that gives several, and views of them."""
    for user in node.users:
        if _is_part(user):
            yield user
            yield from _parts(user)


def _is_part(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in (operator.getitem, reinterpret) or is_view(node.target))


def _are_results(nodes: Collection[fx.Node]) -> bool:
    """Whether nobody but the caller reads `nodes`."""
    return all(user in nodes or user.op == "output" for node in nodes for user in node.users)


def _may_move(graph: fx.Graph, nodes: Collection[fx.Node]) -> bool:
    """Whether `nodes` do nothing but give results, of arguments that nobody writes and of what calls make."""
    read = {_maker(each) for node in nodes for each in node.all_input_nodes}
    touched = {_maker(each) for node in graph.nodes if has_effect(node) for each in node.all_input_nodes}
    return all(map(_is_pure, nodes)) and read.isdisjoint(touched) and all(each.op != "get_attr" for each in read)


def _is_pure(node: fx.Node) -> bool:
    known = isinstance(node.target, OpOverload) or isinstance(getattr(node.target, "__self__", None), FusedRegion)
    return node.op == "call_function" and not has_effect(node) and (known or _is_part(node))


def _nbytes(node: fx.Node) -> int:
    """Bytes of what `node` gives, all results together."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return sum(nbytes(value) for value in values if isinstance(value, torch.Tensor))


def segments_of(module: fx.GraphModule, cut: Cut) -> Segments:
    """The functions of a graph that was `cut`."""
    graph = module.graph
    arguments = graph.find_nodes(op="placeholder")
    results: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    order = {node: number for number, node in enumerate(graph.nodes)}
    launched = cut.head | cut.tail
    beside = {*arguments, graph.output_node(), *launched}
    body = [node for node in graph.nodes if node not in beside]

    def passed(nodes: Iterable[fx.Node], readers: AbstractSet[fx.Node]) -> list[fx.Node]:
        return sorted((node for node in nodes if not readers.isdisjoint(node.users)), key=order.__getitem__)

    early, late = ([n for n, result in enumerate(results) if result in part] for part in (cut.head, cut.tail))
    for_body, for_tail = passed(cut.head, {*body}), passed(body, cut.tail)
    own = [None if result in launched else result for result in results]
    function = partial(_function, module, order)
    return Segments(
        head=function(arguments, cut.head, [*for_body, *(results[place] for place in early)]) if cut.head else None,
        body=function([*arguments, *for_body], body, [*own, *for_tail]),
        tail=function([*arguments, *for_tail], cut.tail, [results[place] for place in late]) if cut.tail else None,
        early=early,
        late=late,
        asked=len(for_tail),
        unread=[n for n, node in enumerate(arguments) if node.users and cut.head.issuperset(node.users)],
    )


def _function(
    module: fx.GraphModule,
    order: Mapping[fx.Node, int],
    given: Sequence[fx.Node],
    nodes: Iterable[fx.Node],
    results: Sequence[Any],
) -> Call:
    """`nodes` of a module's graph as a function of those that are `given`."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in given:
        copies[node] = graph.placeholder(node.name)
    for node in sorted(nodes, key=order.__getitem__):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.map_arg(tuple(results), copies.__getitem__))
    empty_arguments(graph)
    made = _LazyGraphModule(module, graph)
    made.real_recompile()
    keep_code(made)
    return made.forward
