"""The graphs of a report for networkx: before, an operator is a node; after, a region is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusepass.report.records import GraphNode

if TYPE_CHECKING:
    import networkx as nx


def to_networkx(graphs: Sequence[Sequence[GraphNode]], *, fused: bool) -> nx.MultiDiGraph[str]:
    """`graphs` side by side. Where there are several, names begin with the number of their graph, as in ``"1.gelu"``.

    Nodes have the attributes ``kind`` (``"input"``, ``"operator"``, ``"region"``, ``"output"``), ``target`` and ``region``; a region
    has ``ops``, the names of its operators. An edge is a tensor, with ``type`` and ``bytes``; a tensor that a region reads several
    times is one edge.

    Args:
        graphs: the captured graphs.
        fused: whether the operators of a region are one node, as they run.
    """
    import networkx as nx

    made: nx.MultiDiGraph[str] = nx.MultiDiGraph()
    for number, graph in enumerate(graphs):
        prefix = f"{number}." if len(graphs) > 1 else ""
        owner = {node.name: prefix + ((fused and node.region) or node.name) for node in graph}
        for node in graph:
            if fused and node.region:
                made.add_node(owner[node.name], kind="region", target="", region=node.region)
                made.nodes[owner[node.name]].setdefault("ops", []).append(node.name)
            else:
                made.add_node(owner[node.name], kind=node.kind, target=node.target, region=node.region)
            for number_of_tensor, tensor in enumerate(node.reads):
                source, reader = owner[tensor.source], owner[node.name]
                key = f"{tensor.source}: {tensor.type}" if fused and node.region else str(number_of_tensor)
                if source != reader:
                    made.add_edge(source, reader, key=key, type=tensor.type, bytes=tensor.bytes)
    return made
