"""What values of a graph are made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and all that they are made of."""
    found, waiting = set[fx.Node](), [*nodes]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
