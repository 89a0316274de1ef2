"""The writes at the end of a graph: running statistics would otherwise cost three small kernels per norm.

Where all of them are one region's, its kernels write there, and no call is left of them. Else they become a few: PyTorch's ``_foreach_`` operators
take lists of tensors, and on CUDA one kernel then serves many of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from fusepass.patterns.aliasing import base, readers, viewed
from fusepass.patterns.ancestors import ancestors
from fusepass.patterns.effects import writes
from fusepass.patterns.region import Region
from fusepass.runtime.meta import Meta

aten = torch.ops.aten

_Key = tuple[Any, ...]


def is_write(node: fx.Node) -> bool:
    """Whether `node` writes one tensor over another."""
    return node.target is aten.copy_.default


def gather_writes(graph_module: fx.GraphModule) -> None:
    """Let writes of one kind and type among the trailing ``copy_`` nodes become one call, in place.

    ``copy_(counter, counter + 1)`` becomes an addition in place. A write to memory that another one reads keeps all of
    them as they are.

    Args:
        graph_module: flat; every node has a tensor in ``meta["val"]``.
    """
    graph = graph_module.graph
    last = list(trailing(graph))
    written = {write.args[0] for write in last}
    counts = {write for write in last if _is_count(write)}
    read = {base(write.args[1]) for write in last if write not in counts}  # type: ignore[arg-type]
    if len(written) < len(last) or written & read:
        return
    groups: dict[_Key, list[fx.Node]] = {}
    for write in reversed(last):
        key = _key(write, write in counts)
        if key is not None:
            groups.setdefault(key, []).append(write)
    for (is_count, *_), group in groups.items():
        if is_count or len(group) > 1:
            _replace(graph, group, is_count)
    if groups:
        graph.lint()
        graph_module.recompile()


def updates_of(graph: fx.Graph, regions: Sequence[Region]) -> dict[Region, dict[int, fx.Node]]:
    """The one region, or the lists, that may write over inputs of the graph what is written there at its end: by the number of its output, the write.

    No region where writes are left that are not of this region, or where something else reads what is overwritten, or the output. An output is from
    then on described as what it is written over, whose rows may lie apart.

    Args:
        graph: flat; every node has a tensor in ``meta["val"]``.
        regions: of it.
    """
    last = list(trailing(graph))
    lists = {each: found for each in regions if each.members and (found := _updates_of_list(each, last))}
    if lists:
        return lists
    pairs = [(write, *write.all_input_nodes) for write in last if len(write.all_input_nodes) == 2]
    region = next((each for each in regions if pairs and pairs[0][2] in each.outputs), None)
    targets = {target for _, target, _ in pairs}
    if region is None or not len(targets) == len(last) < len(region.outputs):
        return {}
    if any(writes(node.target) for node in graph.nodes if node not in last):
        return {}
    inside = {*region.nodes, *last, graph.output_node()}
    for write, target, value in pairs:
        alone = value in region.outputs and list(value.users) == [write] and target in region.inputs
        if not alone or not inside.issuperset(target.users) or not _is_alike(value.meta["val"], target.meta["val"]):
            return {}
    for _, target, value in pairs:
        value.meta["val"] = target.meta["val"]
    return {region: {region.outputs.index(value): write for write, _, value in reversed(pairs)}}


def _updates_of_list(region: Region, last: Sequence[fx.Node]) -> dict[int, fx.Node]:
    """The writes of `last` that `region`, of a list, may do: of what a member makes, over what that member alone reads from then on."""
    inside = {*region.nodes}
    before = ancestors(region.nodes) - inside
    member_of = {node: {*member} for member in region.members for node in member}
    found: dict[int, fx.Node] = {}
    for write in reversed(last):
        target, value = cast(tuple[fx.Node, fx.Node], write.args)
        if target not in region.inputs or value not in region.outputs:
            continue
        member, number = member_of[value], region.outputs.index(value)
        others = {*readers(target)} - {write} - member
        is_last = others <= before and {*value.users} <= inside | {write}
        if is_last and number not in found and Meta.of(value.meta["val"]) == Meta.of(target.meta["val"]):
            found[number] = write
    return found


def _is_alike(value: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a kernel may store `value` where `target` is: as it lies, or both row by row, with gaps behind the rows of `target`."""
    made, there = Meta.of(value), Meta.of(target)
    if made == there:
        return True
    dims = range(target.dim() - 1)
    apart = all(target.stride(dim) >= target.shape[dim + 1] * target.stride(dim + 1) for dim in dims)
    alike = replace(made, strides=there.strides) == there
    return alike and value.is_contiguous() and target.dim() > 1 and target.stride(-1) == 1 and apart


def trailing(graph: fx.Graph) -> Iterator[fx.Node]:
    """The ``copy_`` nodes behind which only views are made, from the last one on."""
    for node in reversed(graph.nodes):
        if is_write(node) and not node.users and node.args[0].op == "placeholder":
            yield node
        elif node.op != "output" and viewed(node) is None:
            return


def _is_count(write: fx.Node) -> bool:
    """Whether `write` adds a number to what it writes, and the sum serves nothing else."""
    target, value = write.args
    return (
        isinstance(value, fx.Node)
        and value.target is aten.add.Tensor
        and value.args[0] is target
        and isinstance(value.args[1], int)
        and not value.kwargs
        and len(value.users) == 1
    )


def _key(write: fx.Node, is_count: bool) -> _Key | None:
    """Equal for writes that one call may do; None for one that converts or expands what it writes."""
    target, value = (node.meta["val"] for node in write.args)  # type: ignore[union-attr]
    if (target.dtype, target.device, target.shape) != (value.dtype, value.device, value.shape):
        return None
    return is_count, target.dtype, target.device, write.args[1].args[1] if is_count else None  # type: ignore[union-attr]


def _replace(graph: fx.Graph, group: list[fx.Node], is_count: bool) -> None:
    """One call in place of the last of `group`."""
    targets = [write.args[0] for write in group]
    values = [write.args[1] for write in group]
    with graph.inserting_after(group[-1]):
        if is_count:
            number = values[0].args[1]  # type: ignore[union-attr]
            graph.call_function(aten._foreach_add_.Scalar, (targets, number))
        else:
            graph.call_function(aten._foreach_copy_.default, (targets, values))
    for write in group:
        graph.erase_node(write)
    for value in values if is_count else ():
        graph.erase_node(value)  # type: ignore[arg-type]
