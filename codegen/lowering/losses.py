"""Losses with an operator of their own: a formula per element, then its mean or sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Op, ReduceOp
from fusepass.codegen.lowering.activations import Value, log1p
from fusepass.codegen.lowering.gathers import Lookup, gathered
from fusepass.codegen.lowering.pointwise import promote
from fusepass.codegen.lowering.reductions import averaged, simple
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Coordinates, Tensor

aten = torch.ops.aten

_NONE, _MEAN = 0, 1


def _loss(call: Call, a: Tensor, target: Tensor, reduction: int, formula: Callable[[Value], Value]) -> Tensor:
    """`formula` of the difference of each pair; its mean or sum unless `reduction` says neither."""
    (left, right), dtype = promote(call, (a, target), KIND.DEFAULT)
    each = formula(Value(call.context, left) - Value(call.context, right)).tensor
    return _reduced(call, each, reduction, dtype)


def _reduced(call: Call, each: Tensor, reduction: int, dtype: DType) -> Tensor:
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


@lowers(aten.binary_cross_entropy.default)
def _binary_cross_entropy(
    call: Call, a: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    context = call.context
    given = (a, target) if weight is None else (a, target, weight)
    promoted, dtype = promote(call, given, KIND.DEFAULT)
    x, y = Value(context, promoted[0]), Value(context, _where_probable(call, promoted[0], promoted[1]))
    each = (y - 1) * log1p(-x).apply(Op.MAXIMUM, -100) - y * x.apply(Op.LOG).apply(Op.MAXIMUM, -100)
    if weight is not None:
        each = each * Value(context, promoted[2])
    return _reduced(call, each.tensor, reduction, dtype)


def _where_probable(call: Call, x: Tensor, target: Tensor) -> Tensor:
    """`target`; an `x` that is no probability is an error in eager, so it is reported as a place outside the target."""
    context, builder = call.context, call.context.builder
    only, outside = builder.const(0, DType.I64), builder.const(-1, DType.I64)

    def lookups(c: Coordinates) -> tuple[Coordinates, Mapping[int, Lookup]]:
        value = x.at(c[1:])
        bounds = (builder.const(0, value.dtype), builder.const(1, value.dtype))
        sides = (
            builder.apply(op, value, bound, dtype=DType.BOOL) for op, bound in zip((Op.GE, Op.LE), bounds, strict=True)
        )
        inside = builder.apply(Op.AND, *sides, dtype=DType.BOOL)
        return c, {0: Lookup(builder.apply(Op.WHERE, inside, only, outside, dtype=DType.I64), 1)}

    table = context.reshape(target, (1, *target.shape))
    return context.reshape(gathered(call, table, table.shape, lookups), target.shape)
