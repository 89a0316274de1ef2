"""Memory that results of regions may take: that of arguments which nobody reads any more, as `torch.compile` does.

Which inputs of a region die in it is told before it is generated, so that the kernels that read them promise nothing about their memory; and once more in
the rewritten graph, whose calls then write there. Trials run between the two, on memory of their own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.aliasing import base, is_view, readers
from fusepass.patterns.ancestors import ancestors
from fusepass.patterns.effects import writes
from fusepass.patterns.region import Region
from fusepass.runtime.region import FusedRegion


def dying_inputs(regions: Sequence[Region]) -> Mapping[Region, Sequence[int]]:
    """The numbers of the inputs of each of `regions` that die in it, where a result is as large.

    None of a list, nor where there is an anchor: a result takes the memory of what the library gave, and which thread of a generated one reads what
    is not looked into.
    """
    made = {node for region in regions for node in region.outputs}
    return {region: [] if region.members or region.anchor is not None else _fitting(region, made) for region in regions}


def _fitting(region: Region, made: Collection[fx.Node]) -> list[int]:
    sizes = [(node.meta["val"].dtype, node.meta["val"].numel()) for node in (*region.inputs, *region.outputs)]
    results = sizes[len(region.inputs) :]
    return [number for number in _dying(region.inputs, region.nodes, made) if sizes[number] in results]


def reuse_memory(graph: fx.Graph) -> None:
    """Let the regions that `graph` calls write results over arguments that die there, where they may, in place.

    Args:
        graph: flat; every node has ``meta["val"]``, and what calls a region has it as its target.
    """
    calls = [node for node in graph.nodes if isinstance(node.target, FusedRegion)]
    made = {each for call in calls if call.target.allocates for each in (call, *call.users)}
    for call in calls:
        call.target = call.target.reusing(_dying(call.args, (call,), made))


def _dying(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], made: Collection[fx.Node]) -> list[int]:
    """The numbers of those `inputs` that are the whole of memory which only `nodes`, and what these are made of, read.

    Args:
        inputs: what `nodes` read of others.
        nodes: of one call.
        made: among other nodes, what regions give, each with memory of its own.
    """
    owners, inside = [base(node) for node in inputs], {*nodes}
    before = functools.cache(lambda: ancestors(nodes))
    return [
        number
        for number, (node, owner) in enumerate(zip(inputs, owners, strict=True))
        if owners.count(owner) == 1
        and (owner in made or _is_fresh(owner))
        and _is_whole(node, owner)
        and all(_only_reads(reader) and (reader in inside or reader in before()) for reader in readers(owner))
    ]


def _is_fresh(node: fx.Node) -> bool:
    """Whether `node` is a tensor with memory of its own."""
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and _only_reads(node)
        and not is_view(node.target)
    )


def _only_reads(node: fx.Node) -> bool:
    """Whether what shares memory with the arguments of `node` behind it can be told: of PyTorch's operators and of regions."""
    if node.target is operator.getitem or isinstance(node.target, FusedRegion):
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten" and not writes(node.target)


def _is_whole(node: fx.Node, owner: fx.Node) -> bool:
    values = node.meta["val"], owner.meta["val"]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    seen, whole = values
    return seen.dtype is whole.dtype and seen.numel() == whole.numel()
