"""Which nodes of a graph are worth another trial: those around what has changed since the last one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from torch import fx

from fusepass.patterns.effects import writes

REACH = 12
"""Steps from a change to what may notice it: as far as the analysis of intervals looks."""

MOST = 64
"""Behind a change no further steps are taken once so many nodes are found."""


class Worklist:
    """The nodes to try in passes over a graph; in the first these are all.

    A node that comes after a change in a pass is tried with the change in place. So a later pass has to try again only
    what comes before the change and may notice it.

    Attributes:
        trials: how many nodes were tried so far.
        unwritten: whether no node before the one that is tried writes to memory.
    """

    def __init__(self) -> None:
        self.trials = 0
        self.unwritten = True
        self._now: set[fx.Node] | None = None
        self._next: set[fx.Node] = set()
        self._order: dict[fx.Node, int] = {}
        self._place = _BEFORE
        self._writers: list[fx.Node] | None = None

    def nodes(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """The calls to try in this pass, in the order of the graph, without those that are removed meanwhile."""
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        first_write = self._first_write()
        for node, place in self._order.items():
            self._place = place
            if (self._now is None or node in self._now) and node.op == "call_function" and not node._erased:
                self.unwritten = place < first_write
                self.trials += 1
                yield node

    def _first_write(self) -> int:
        """The place of the first operator that writes to memory. Rules replace some, and add none."""
        if self._writers is None or any(node._erased for node in self._writers):
            self._writers = [node for node in self._order if writes(node.target)]
        return min(map(self._order.__getitem__, self._writers), default=len(self._order))

    def end_pass(self) -> bool:
        """Go on to the next pass; False if there is nothing to try in it."""
        self._now, self._next, self._order, self._place = self._next, set(), {}, _BEFORE
        return bool(self._now)

    def notice(self, nodes: Set[fx.Node]) -> None:
        """These nodes are near a change."""
        order, place = self._order, self._place
        passed = {node for node in nodes if order.get(node, _NEW) <= place} if order else set[fx.Node]()
        self._next |= passed
        if self._now is not None:
            self._now |= nodes - passed


class Worklists:
    """Several worklists of one graph, which all hear of its changes."""

    def __init__(self, *worklists: Worklist) -> None:
        self._worklists = worklists

    def changed(self, nodes: Iterable[fx.Node]) -> None:
        """These nodes are new, or have other users than before."""
        changed = set(nodes)
        near = changed.union(_descendants(changed), *(node.all_input_nodes for node in changed))
        for worklist in self._worklists:
            worklist.notice(near)


_NEW, _BEFORE = -1, -2
"""The place of a node that is not in the order of a pass, and the place of a pass that has not begun."""


def _descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What reads `nodes`, directly or not."""
    found, ring = set[fx.Node](), set(nodes)
    for _ in range(REACH):
        ring = {user for node in ring for user in node.users} - found
        found |= ring
        if not ring or len(found) > MOST:
            break
    return found
