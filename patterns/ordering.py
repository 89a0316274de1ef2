"""An order in which regions, as one call each, and the other operators of a graph may run."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import fx

from fusepass.patterns.aliasing import base, readers, viewed, written
from fusepass.patterns.dataflow import has_effect
from fusepass.patterns.region import Region


def execution_order(graph: fx.Graph, regions: Sequence[Region]) -> list[fx.Node | Region]:
    """The nodes of `graph`, with each region in place of its nodes, so that everything comes after what it needs.

    Random numbers are drawn in the graph's order, memory is written after its earlier and before its later readers, and
    what is free to move keeps its place.

    Args:
        graph: as `fusepass.patterns.partition.partition` left it.
        regions: of that partition, all or some.
    """
    owner: dict[fx.Node, Item] = {node: region for region in regions for node in region.nodes}
    items = list(dict.fromkeys(owner.setdefault(node, node) for node in graph.nodes))
    after: defaultdict[Item, set[Item]] = defaultdict(set)
    for first, then in _constraints(graph):
        if owner[first] is not owner[then]:
            after[owner[first]].add(owner[then])
    return _sorted(items, after)


Item = fx.Node | Region


def _constraints(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes of which the first must come before the second."""
    for node in graph.nodes:
        yield from ((source, node) for source in node.all_input_nodes)
    effects = [node for node in graph.nodes if has_effect(node)]
    yield from pairwise([*effects, graph.output_node()])
    position = {node: number for number, node in enumerate(graph.nodes)}
    for effect in effects:
        for memory in map(base, written(effect)):
            for reader in readers(memory):
                if viewed(reader) is None:  # a view by itself reads nothing
                    first, then = sorted((reader, effect), key=position.__getitem__)
                    yield first, then


def _sorted(items: Sequence[Item], after: Mapping[Item, set[Item]]) -> list[Item]:
    """`items` in a topological order that keeps to theirs where it can (Kahn, 1962, with a heap).

    networkx has the same, but takes a third of a second to import.
    """
    position = {item: number for number, item in enumerate(items)}
    waiting = dict.fromkeys(items, 0)
    for then in (item for later in after.values() for item in later):
        waiting[then] += 1
    ready = [position[item] for item in items if not waiting[item]]
    order: list[Item] = []
    while ready:
        item = items[heapq.heappop(ready)]
        order.append(item)
        for then in after.get(item, ()):
            waiting[then] -= 1
            if not waiting[then]:
                heapq.heappush(ready, position[then])
    assert len(order) == len(items), "legality lets no region depend on itself"
    return order
