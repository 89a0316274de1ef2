"""What values of a graph are made of."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import fx


def ancestors(nodes: Iterable[fx.Node], among: Container[fx.Node] | None = None) -> set[fx.Node]:
    """`nodes` and all that they are made of; where `among` is given, by way of its nodes alone."""
    found, waiting = set[fx.Node](), [*nodes]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [source for source in node.all_input_nodes if among is None or source in among]
    return found
