"""Scans: sums, products, extremes and their places, and logarithms of sums of exponentials, of all elements up to each one along a dimension."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, Op, ReduceOp
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Tensor, Unsupported, dtype_of

aten = torch.ops.aten


@lowers(aten.cumsum.default)
def _cumsum(call: Call, a: Tensor, dim: int, **unused: Any) -> Tensor:
    return _added_up(call, ReduceOp.SUM, a, dim)


@lowers(aten.cumprod.default)
def _cumprod(call: Call, a: Tensor, dim: int, **unused: Any) -> Tensor:
    return _added_up(call, ReduceOp.PROD, a, dim)


def _added_up(call: Call, op: ReduceOp, a: Tensor, dim: int) -> Tensor:
    dtype = _scanned(dtype_of(call.value.dtype))
    a = call.context.cast(a, dtype)
    if _is_single(a, dim):
        return a
    (result,) = call.context.scan(op, (a,), dim % len(a.shape), _accumulated(call, dtype), (dtype,), call.origin)
    return result


@lowers(aten.logcumsumexp.default)
def _logcumsumexp(call: Call, a: Tensor, dim: int) -> Tensor:
    dtype, builder = dtype_of(call.value.dtype), call.context.builder
    accumulate = _accumulated(call, dtype)

    def finish(top: Expr, total: Expr) -> tuple[Expr, ...]:
        endless = builder.apply(Op.EQ, top, builder.const(inf, accumulate), dtype=DType.BOOL)
        result = builder.apply(Op.ADD, top, builder.apply(Op.LOG, total, dtype=accumulate), dtype=accumulate)
        return (builder.apply(Op.WHERE, endless, top, result, dtype=accumulate),)

    if _is_single(a, dim):
        return a
    (result,) = call.context.scan(ReduceOp.SOFTMAX, (a,), dim % len(a.shape), accumulate, (dtype,), call.origin, finish)
    return result


@lowers(aten.cummax.default, aten.cummin.default)
def _extreme_so_far(call: Call, a: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
    """Of equal elements, the place of the last counts, as in eager."""
    context, greatest = call.context, call.origin == "cummax"
    dtype = _scanned(a.dtype)
    if _is_single(a, dim):
        return a, context.constant(0, a.shape, DType.I64)
    axis = dim % len(a.shape)
    if not call.uses(1):
        op = ReduceOp.MAX if greatest else ReduceOp.MIN
        (value,) = context.scan(op, (a,), axis, dtype.compute, (dtype,), call.origin)
        return value, None
    op = ReduceOp.LAST_ARGMAX if greatest else ReduceOp.LAST_ARGMIN
    place = context.tensor(a.shape, DType.I64, lambda c: context.builder.position(c[axis]))
    value, index = context.scan(op, (a, place), axis, dtype.compute, (dtype, DType.I64), call.origin)
    return value, index


def _scanned(dtype: DType) -> DType:
    if dtype is DType.BOOL:
        raise Unsupported("a scan whose results are truth values")
    return dtype


def _is_single(a: Tensor, dim: int) -> bool:
    """Whether there is one element along `dim`."""
    return not a.shape or a.shape[dim] == 1


def _accumulated(call: Call, dtype: DType) -> DType:
    """The type in which `dtype` is added up; on a CPU eager adds up floats as doubles, too."""
    return DType.F64 if dtype is DType.F32 and not call.context.cuda else dtype.compute
