"""The number that gradients are a multiple of: with one in its place they need nothing of backward, and forward can make them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusepass.compile.row_values import NotByRows, descendants, is_zero
from fusepass.patterns.ancestors import ancestors
from fusepass.patterns.arguments import arguments

aten = torch.ops.aten

_OF_FIRST = frozenset({
    aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.div.Tensor, aten._to_copy.default, aten.clone.default, aten.detach.default,
    aten.alias.default, aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.permute.default, aten.transpose.int, aten.t.default, aten.slice.Tensor,
    aten.select.int, aten.slice_backward.default, aten.select_backward.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default,
    aten.mean.dim, aten.masked_fill.Scalar, aten._log_softmax_backward_data.default, aten._softmax_backward_data.default,
    aten.nll_loss_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default, aten.threshold_backward.default,
    aten.gelu_backward.default, aten.silu_backward.default, aten.constant_pad_nd.default,
})  # fmt: skip
"""Operators that are linear in their first argument alone."""

_PRODUCTS = frozenset({aten.mul.Tensor, aten.mm.default})
_SUMS = frozenset({
    aten.add.Tensor, aten.sub.Tensor, aten.where.self, aten.scatter_add.default, aten.scatter.src, aten.index_put.default,
})  # fmt: skip
_ZEROS = frozenset({aten.new_zeros.default, aten.zeros_like.default})


def common_factor(tangents: Sequence[fx.Node], gradients: Collection[fx.Node]) -> fx.Node | None:
    """The last value of one element that all `gradients` are a multiple of; None where they are not made of `tangents` at all.

    Raises:
        NotByRows: there is no such value.
    """
    later = descendants(tangents)
    if later.isdisjoint(gradients):
        return None
    needed = ancestors(gradients)
    among: list[fx.Node] = [node for node in tangents[0].graph.nodes if node in later and node in needed]
    for node in reversed(among):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            continue
        made = descendants([node])
        others = descendants([tangent for tangent in tangents if tangent is not node], but=node)
        if others.isdisjoint(gradients) and all(_is_linear(each, made) for each in needed & made - {node}):
            return node
    raise NotByRows("its gradient is not a known tensor times one number")


def _is_linear(node: fx.Node, made: Collection[fx.Node]) -> bool:
    """Whether `node` is linear in what it reads of `made`, and zero where that is."""
    if node.target in _ZEROS:
        return True
    given: Mapping[str, Any] = arguments(node) if isinstance(node.target, torch._ops.OpOverload) else {}
    read = [name for name, value in given.items() if isinstance(value, fx.Node) and value in made]
    first = next(iter(given), None)
    if node.target in _OF_FIRST:
        fills = node.target is not aten.masked_fill.Scalar or given["value"] == 0
        pads = node.target is not aten.constant_pad_nd.default or given["value"] == 0
        return read == [first] and fills and pads
    if node.target in _PRODUCTS:
        return len(read) == 1
    if node.target in _SUMS:
        terms = {"self", "src", "values", "other"} & {*given}
        return terms.issuperset(read) and all(is_zero(given[name]) for name in terms.difference(read))
    return False
