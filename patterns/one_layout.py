"""Sums of a tensor whose rows lie apart and of one that is contiguous are contiguous.

PyTorch lets a result lie as its first operand. Images become rows of a transformer by a transposition, so every residual sum behind it lies
as the image did, and whatever reads its rows reads each element from another place. Here the first sum reads its operand so, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass.codegen.lowering import registry
from fusepass.patterns.opclass import OpClass, direct_class
from fusepass.patterns.relaid import Relaid, Unusual, described

aten = torch.ops.aten

ONE_LAYOUT = "one-layout"
"""The name by which it is reported and disabled."""

_LEAST = 1 << 12  # elements; a kernel of fewer takes as long however they lie
_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})


def contiguous_sums(graph: fx.GraphModule) -> tuple[fx.GraphModule, str | None]:
    """`graph`, or what computes the same with such results contiguous, and the name of the first of these.

    It stays where a value that the caller sees, or that backward reads, would lie otherwise, and where strides or sizes are not numbers.

    Args:
        graph: flat and functional; every node has its value in ``meta["val"]``.
    """
    if not any(_is_mixed(node) for node in graph.graph.nodes) or not _is_static(graph.graph):
        return graph, None
    relaid, first = Relaid(graph.graph), None
    try:
        for node in relaid.calls:
            if _is_mixed(node):
                first = first or node.name
                _make_contiguous(relaid, node)
            else:
                relaid.follow(node, _described)
    except Unusual:
        return graph, None
    if relaid.changes_results:
        return graph, None
    return fx.GraphModule(graph, relaid.graph), first


def _make_contiguous(relaid: Relaid, node: fx.Node) -> None:
    value = node.meta["val"]
    with relaid.graph.inserting_before(node):
        args = tuple(
            relaid.clone(arg, torch.contiguous_format) if isinstance(arg, fx.Node) and _lies_apart(arg, value) else arg
            for arg in node.args
        )
    relaid.lay_out(node, args, relaid.described(node, args))


def _is_mixed(node: fx.Node) -> bool:
    """Whether a call adds, or computes otherwise element by element, what is contiguous and what is not, and gives what is not."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.numel() < _LEAST:
        return False
    if not isinstance(node.target, OpOverload) or registry.handler_of(node.target) is None:
        return False
    if direct_class(node.target) is not OpClass.POINTWISE or not _lies_apart(node, value):
        return False
    return any(_is_whole(each, value) and each.meta["val"].is_contiguous() for each in node.all_input_nodes)


def _is_whole(node: fx.Node, value: torch.Tensor) -> bool:
    given = node.meta.get("val")
    return isinstance(given, torch.Tensor) and given.shape == value.shape


def _lies_apart(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether `node` gives something of the shape of `value` that has no gaps and is neither contiguous nor an image channels last."""
    if not _is_whole(node, value):
        return False
    given = node.meta["val"]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    usual = [torch.contiguous_format, *([formats[given.dim()]] if given.dim() in formats else [])]
    dense = sorted(zip(given.stride(), given.shape, strict=True))
    step = 1
    for stride, size in dense:
        if size > 1 and stride != step:
            return False
        step *= size
    return not any(given.is_contiguous(memory_format=each) for each in usual)


def _described(node: fx.Node) -> Any:
    """How the result of a call lies; None where nothing tells, or the library has kernels of its own for each layout."""
    target = node.target
    if not isinstance(target, OpOverload):  # operator.getitem
        return described(node)
    kind = OpClass.OTHER if registry.handler_of(target) is None else direct_class(target)
    if kind in (OpClass.POINTWISE, OpClass.VIEW):
        return described(node)
    whole = kind in (OpClass.NORMALISATION, OpClass.REDUCTION) and _are_contiguous(node.all_input_nodes)
    return node.meta["val"] if target in _PRODUCTS or (whole and _are_contiguous([node])) else None


def _are_contiguous(nodes: Sequence[fx.Node]) -> bool:
    values = [value for node in nodes for value in pytree.tree_leaves(node.meta["val"])]
    return all(value.is_contiguous() for value in values if isinstance(value, torch.Tensor))


def _is_static(graph: fx.Graph) -> bool:
    values = [value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return all(isinstance(size, int) for each in tensors for size in (*each.shape, *each.stride()))
