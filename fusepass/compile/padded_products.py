"""Matrices of 16-bit numbers whose rows begin anywhere, as gradients of logits over an odd number of words: their products share a padded copy.

Tensor cores are fed by whole accesses. Where rows do not begin with one, or sums have an odd number of terms, cuBLAS takes up to seven times
as long (2.4 ms for 0.36 on an H200: 4,096 x 50,257 by 50,257 x 768), and each generated product makes a copy of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.ir.vectors import ACCESS
from fusepass.patterns.anchor_work import HALVES, is_large
from fusepass.patterns.dataflow import TRANSPOSES, remove_dead
from fusepass.patterns.infer import called

aten = torch.ops.aten

_LEAST = 2
"""Products that share a copy: a single one is generated with its own."""


@dataclass(frozen=True)
class _Use:
    """A product that takes a matrix, or its transpose where it is `turned`, as operand `number`."""

    product: fx.Node
    number: int
    turned: bool

    @property
    def pads_rows(self) -> bool:
        """Whether the matrix's columns are rows of the result, and not terms of its sums."""
        return self.number == 0 and self.turned

    @property
    def pads_columns(self) -> bool:
        """Whether they are columns of the result: cut off, they would leave rows that begin anywhere."""
        return self.number == 1 and not self.turned


def pad_products(graph: fx.Graph) -> None:
    """Let large products of one odd matrix read a copy of it with zeros behind each row, in place.

    Where its columns are terms of a sum, the other operand gets as many zeros; where they are rows of the result, those are cut off.

    Args:
        graph: ATen operators; every node that stands for a tensor has it in ``meta["val"]``.
    """
    uses: dict[fx.Node, list[_Use]] = {}
    for product in graph.find_nodes(op="call_function", target=aten.mm.default):
        if product.meta["val"].device.type != "cuda" or not is_large(product):
            continue
        for number, operand in enumerate(product.args):
            matrix, turned = _matrix(operand)
            use = _Use(product, number, turned)
            if _is_odd(matrix) and not use.pads_columns:
                uses.setdefault(matrix, []).append(use)
    done = set[fx.Node]()
    for matrix, found in uses.items():
        shared = {use.product: use for use in found if use.product not in done}
        if len(shared) >= _LEAST:
            _share(graph, matrix, list(shared.values()))
            done |= {*shared}
    if done:
        remove_dead(graph)
        graph.lint()


def _share(graph: fx.Graph, matrix: fx.Node, uses: Sequence[_Use]) -> None:
    columns = matrix.meta["val"].shape[1]
    more = -columns % (ACCESS // matrix.meta["val"].itemsize)
    with graph.inserting_before(uses[0].product):
        padded = _padded(graph, matrix, 1, more)
    for use in uses:
        with graph.inserting_before(use.product):
            operands: list[Any] = [*use.product.args]
            operands[use.number] = _call(graph, aten.t.default, padded) if use.turned else padded
            if not use.pads_rows:
                operands[1 - use.number] = _padded(graph, operands[1 - use.number], use.number, more)
            result = _call(graph, aten.mm.default, *operands)
            if use.pads_rows:
                result = _call(graph, aten.slice.Tensor, result, 0, 0, columns)
        use.product.replace_all_uses_with(result)


def _padded(graph: fx.Graph, operand: fx.Node, dim: int, more: int) -> fx.Node:
    """`operand` with zeros behind it along `dim`; a transpose stays one."""
    matrix, turned = _matrix(operand)
    behind = [0, more] if (dim == 1) != turned else [0, 0, 0, more]
    padded = _call(graph, aten.constant_pad_nd.default, matrix, behind, 0.0)
    return _call(graph, aten.t.default, padded) if turned else padded


def _call(graph: fx.Graph, target: OpOverload, *args: Any) -> fx.Node:
    return called(graph, target, args, {}, args[0].meta["val"].device)


def _matrix(operand: Any) -> tuple[fx.Node, bool]:
    """What a product's operand is, or, if told so, is the transpose of."""
    if operand.target not in TRANSPOSES:
        return operand, False
    matrix = operand.args[0]
    turned = operand.meta["val"].stride() == matrix.meta["val"].stride()[::-1]
    return (matrix, True) if turned else (operand, False)


def _is_odd(matrix: fx.Node) -> bool:
    """Whether rows of a matrix of 16-bit numbers lie in memory in one piece each, of no whole number of accesses."""
    value = matrix.meta["val"]
    return value.dtype in HALVES and value.stride()[1:] == (1,) and value.shape[1] * value.itemsize % ACCESS != 0
