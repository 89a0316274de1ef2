"""Losses with an operator of their own: a formula per element, then its mean or sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Index
from fusepass.codegen.lowering.activations import Value, log1p
from fusepass.codegen.lowering.gathers import Lookup, gathered, position
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


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(
    call: Call, a: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """The loss and the weight of all samples, by which a mean divides as it was added up: a half has no room for many samples."""
    context, builder, compute = call.context, call.context.builder, a.dtype.compute
    axis = 1 if len(a.shape) > 1 else 0
    samples = (*a.shape[:axis], *a.shape[axis + 1 :])
    wanted = context.reshape(target, samples)

    def is_counted(c: Coordinates) -> Expr:
        return builder.apply(Op.NE, position(context, wanted, c), builder.const(ignored, DType.I64), dtype=DType.BOOL)

    def where_counted(c: Coordinates, value: Expr) -> Expr:
        return builder.apply(Op.WHERE, is_counted(c), value, builder.const(0, value.dtype), dtype=value.dtype)

    def of_kind(table: Tensor, dim: int, fixed: Callable[[Coordinates], Coordinates]) -> Tensor:
        """What the `table` has along `dim` for each sample's class."""

        def lookups(c: Coordinates) -> tuple[Coordinates, Mapping[int, Lookup]]:
            return fixed(c), {dim: Lookup(where_counted(c, position(context, wanted, c)), table.shape[dim])}

        return gathered(call, table, samples, lookups)

    chosen = of_kind(a, axis, lambda c: (*c[:axis], Index(), *c[axis:]))
    if weight is None:
        weights = context.tensor(samples, DType.I64, lambda c: builder.cast(is_counted(c), DType.I64))
    else:
        of_class = of_kind(weight, 0, lambda c: (Index(),))
        chosen = context.pointwise(Op.MUL, (chosen, of_class), a.dtype)
        weights = context.tensor(samples, a.dtype, lambda c: where_counted(c, of_class.at(c)))
    losses = context.tensor(
        samples, a.dtype, lambda c: where_counted(c, builder.apply(Op.NEG, chosen.at(c), dtype=compute))
    )
    if reduction == _NONE and samples:
        return losses, context.constant(0, (), a.dtype)
    weight_of_all = simple(call, ReduceOp.SUM, weights, None, (), weights.dtype)
    loss = simple(call, ReduceOp.SUM, losses, None, (), a.dtype)
    if reduction == _MEAN:
        loss = context.pointwise(Op.DIV, (loss, context.cast(weight_of_all, compute)), a.dtype)
    return loss, context.cast(weight_of_all, a.dtype)


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
