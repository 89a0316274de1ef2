"""A region: the operators that become one fused call, and what goes in and out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from fusepass.patterns import traffic
from fusepass.patterns.dataflow import Candidate, bits
from fusepass.patterns.naming import location, region_name
from fusepass.patterns.opclass import OpClass
from fusepass.patterns.pattern import Pattern


@dataclass(frozen=True, eq=False)
class Region:
    """Operators that run as one fused call.

    Attributes:
        name: readable, an identifier, unique within the graph.
        pattern: the name of the pattern that it grew from.
        nodes: the operators, their ``getitem`` nodes and the views between them, in graph order; in no other region.
        inputs: the nodes outside that `nodes` read, in order of first use; each is one tensor.
        outputs: those of `nodes` that others read, in graph order; each is one tensor and none is a view.
        anchor: its convolution or matrix product, if it has one.
        bytes_before: bytes that the operators move when each runs by itself.
        bytes_after: bytes that the region moves at least: each input read once, each output written once; and what it
            moves to give the result of a biased product once more.
        locations: for each of `nodes`, where the model has it: ``"net.py:12 in forward"``, a module's path, or "".
        members: of a list (`fusepass.patterns.lists`), the operators of each of its members, in one order; of other regions none.
    """

    name: str
    pattern: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    anchor: fx.Node | None
    bytes_before: int
    bytes_after: int
    locations: tuple[str, ...]
    members: tuple[tuple[fx.Node, ...], ...] = ()

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic that fusing saves per call."""
        return self.bytes_before - self.bytes_after


def make_region(candidate: Candidate, pattern: Pattern) -> Region:
    """The region of the units of `candidate`. Its name says what it does and need not be unique yet."""
    flow, units = candidate.flow, candidate.units
    inside = {node for unit in units for node in (unit.node, *unit.values)}
    inside |= set(_inner_views(candidate))
    nodes = tuple(sorted(inside, key=flow.position.__getitem__))
    inputs = tuple(dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside))
    escaping = (value for unit in units for value in unit.values if candidate.escapes(value))
    outputs = tuple(sorted(escaping, key=flow.position.__getitem__))
    anchors = _anchors(candidate)
    return Region(
        name=region_name([unit.node for unit in units]),
        pattern=pattern.name,
        nodes=nodes,
        inputs=inputs,
        outputs=outputs,
        anchor=anchors[0] if anchors else None,
        bytes_before=sum(map(traffic.bytes_alone, units)),
        bytes_after=traffic.bytes_fused(inside, inputs, outputs, flow.views) + traffic.bytes_of_bias(anchors, outputs),
        locations=tuple(map(location, nodes)),
    )


def _inner_views(candidate: Candidate) -> Iterator[fx.Node]:
    """The views that the region makes itself: those that its operators look through, up to what its anchor reads.

    A library call reads memory. So a view that the anchor reads comes from outside, for the anchor's neighbours as well.
    """
    flow = candidate.flow
    given = {
        source
        for anchor in _anchors(candidate)
        for source in anchor.all_input_nodes
        if not flow.inner_views(source, anchor, OpClass.ANCHOR)
    }
    for unit in candidate.units:
        for source in unit.node.all_input_nodes:
            views = flow.inner_views(source, unit.node, unit.op_class)
            yield from itertools.takewhile(lambda view: view not in given, views)


def _anchors(candidate: Candidate) -> list[fx.Node]:
    return [candidate.flow.units[index].node for index in bits(candidate.anchors)]
