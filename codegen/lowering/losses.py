"""Losses with an operator of their own: a formula per element, then its mean or sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

from fusepass.codegen.ir.expr import Op, ReduceOp
from fusepass.codegen.lowering.activations import Value
from fusepass.codegen.lowering.pointwise import promote
from fusepass.codegen.lowering.reductions import averaged, simple
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Tensor

aten = torch.ops.aten

_NONE, _MEAN = 0, 1


def _loss(call: Call, a: Tensor, target: Tensor, reduction: int, formula: Callable[[Value], Value]) -> Tensor:
    """`formula` of the difference of each pair; its mean or sum unless `reduction` says neither."""
    (left, right), dtype = promote(call, (a, target), KIND.DEFAULT)
    each = formula(Value(call.context, left) - Value(call.context, right)).tensor
    if reduction == _NONE:
        return each
    if reduction == _MEAN:
        return averaged(call, each, None, (), dtype)
    return simple(call, ReduceOp.SUM, each, None, (), dtype)


@lowers(aten.mse_loss.default)
def _mse(call: Call, a: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    return _loss(call, a, target, reduction, lambda difference: difference * difference)


@lowers(aten.smooth_l1_loss.default)
def _smooth_l1(call: Call, a: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    def formula(difference: Value) -> Value:
        size = difference.apply(Op.ABS)
        return size if beta == 0 else (size < beta).where(0.5 * size * size / beta, size - 0.5 * beta)

    return _loss(call, a, target, reduction, formula)


@lowers(aten.huber_loss.default)
def _huber(call: Call, a: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    def formula(difference: Value) -> Value:
        size = difference.apply(Op.ABS)
        return (size <= delta).where(0.5 * size * size, delta * (size - 0.5 * delta))

    return _loss(call, a, target, reduction, formula)
