"""Views and writes at the edges of regions are not made: a kernel reads and writes memory, so a region takes what a view is of, gives what one
would be, and writes over an argument what would be copied there.

Each takes the host a few microseconds, and a graph of these and one region is more than one call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fusepass.autotune.work import Work
from fusepass.codegen.lowering.registry import handler_of
from fusepass.codegen.lowering.tracer import meta_like
from fusepass.compile.writes import is_write
from fusepass.patterns.aliasing import is_view
from fusepass.runtime.meta import Meta
from fusepass.runtime.region import FusedRegion

aten = torch.ops.aten


@dataclass(frozen=True)
class Edges:
    """What a region takes and gives in its graph.

    Attributes:
        arguments: the nodes whose values its call takes.
        results: per output, the node whose value its call gives, or the write that it does itself.
    """

    arguments: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]

    def seen(self, region: FusedRegion) -> FusedRegion:
        """`region`, or the like of it that takes and gives these."""
        return region.seen(*([Meta.of(node.meta["val"]) for node in nodes] for nodes in (self.arguments, self.results)))

    @property
    def written(self) -> list[int]:
        """The numbers of the outputs that the call writes over arguments."""
        return [number for number, result in enumerate(self.results) if is_write(result)]

    def writing(self, region: FusedRegion, updates: Mapping[int, fx.Node]) -> Edges:
        """These, where `region` does itself what it may of `updates`, writes of its outputs by their numbers."""
        may_write = region.may_write if updates else {}
        own = {
            number: write
            for number, write in updates.items()
            if number in may_write and self.arguments[may_write[number]] is write.all_input_nodes[0]
        }
        return replace(self, results=tuple(own.get(number, result) for number, result in enumerate(self.results)))


def edges(works: Sequence[Work], regions: Mapping[str, FusedRegion]) -> dict[str, Edges]:
    """What each region may take and give, by its name.

    Args:
        works: the regions that are called, all of one graph.
        regions: what calls each, by its name.
    """
    inside = {node for work in works for node in work.region.nodes}
    results = {
        work.region.name: tuple(_last_view(node, frozenset(work.region.nodes), inside) for node in work.region.outputs)
        for work in works
    }
    given = {node for nodes in results.values() for node in nodes}  # in each call as the graph describes it

    def taken(work: Work, position: int, node: fx.Node) -> fx.Node:
        if not regions[work.region.name].reads_memory(position):
            return node
        known = (base for base in _bases(node, inside) if base in given or work.is_exact(base))
        return next(known, node)

    return {
        work.region.name: Edges(
            tuple(taken(work, position, node) for position, node in enumerate(work.arguments)),
            results[work.region.name],
        )
        for work in works
    }


def views_between(result: fx.Node, output: fx.Node) -> Iterator[fx.Node]:
    """The views that make `result` of `output`, the last one first."""
    while result is not output:
        yield result
        result = result.all_input_nodes[0]


def _bases(node: fx.Node, inside: Collection[fx.Node]) -> Iterator[fx.Node]:
    """`node`, and what it is a view of as long as regions alone read the views."""
    yield node
    reader = node
    while _is_whole(node) and all(user in inside or user is reader for user in node.users):
        reader, node = node, node.all_input_nodes[0]
        yield node


def _last_view(node: fx.Node, own: Collection[fx.Node], inside: Collection[fx.Node]) -> fx.Node:
    """The last of the views of `node`, each of which alone reads the one before it, but for the region's `own` operators."""
    while True:
        readers = [user for user in node.users if user not in own]
        if len(readers) != 1 or readers[0] in inside or not _is_whole(readers[0]):
            return node
        node = readers[0]


def _is_whole(node: fx.Node) -> bool:
    """Whether `node` is a view of all elements of a tensor that has no gaps, in any order."""
    if not is_view(node.target) or handler_of(node.target) is None or node.target is aten.as_strided.default:
        return False
    values: Sequence[torch.Tensor] = [node.meta["val"], node.all_input_nodes[0].meta["val"]]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    view, base = values
    dense = all(aten.is_non_overlapping_and_dense(meta_like(value)) for value in values)
    return dense and view.numel() == base.numel() and view.dtype is base.dtype
