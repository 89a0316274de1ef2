"""Reductions over whole dimensions: sums, means, extremes, variances and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Op, ReduceOp
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Tensor, Unsupported, dtype_of

aten, prims = torch.ops.aten, torch.ops.prims

Dims = Sequence[int] | int | None


def _dims(a: Tensor, dims: Dims) -> tuple[int, ...]:
    rank = len(a.shape)
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return tuple(range(rank))
    return tuple(sorted(d % max(rank, 1) for d in ((dims,) if isinstance(dims, int) else dims)))


def _at_least_1d(call: Call, a: Tensor) -> Tensor:
    return a if a.shape else call.context.reshape(a, (1,))


def _finish(call: Call, kept: Tensor, shape: Sequence[int], dtype: DType) -> Tensor:
    return call.context.cast(call.context.reshape(kept, shape), dtype)


def simple(call: Call, op: ReduceOp, a: Tensor, dims: Dims, shape: Sequence[int], dtype: DType) -> Tensor:
    """`op` with one part; accumulates in the result's compute type."""
    wide = _at_least_1d(call, call.context.cast(a, dtype))
    (kept,) = call.context.reduce(op, (wide,), _dims(wide, dims), dtype.compute, call.origin)
    return _finish(call, kept, shape, dtype)


def _result(call: Call) -> tuple[Sequence[int], DType]:
    return call.value.shape, dtype_of(call.value.dtype)


@lowers(aten.sum.default, aten.sum.dim_IntList, prims.sum.default)
def _sum(call: Call, a: Tensor, dim: Dims = None, *unused: Any, **also_unused: Any) -> Tensor:
    shape, dtype = _result(call)
    return simple(call, ReduceOp.SUM, a, dim, shape, dtype)


@lowers(aten.mean.default, aten.mean.dim)
def _mean(call: Call, a: Tensor, dim: Dims = None, *unused: Any, **also_unused: Any) -> Tensor:
    return averaged(call, a, dim, *_result(call))


def averaged(call: Call, a: Tensor, dim: Dims, shape: Sequence[int], dtype: DType) -> Tensor:
    """The mean over `dim`, accumulated in the compute type of `dtype`."""
    wide = _at_least_1d(call, call.context.cast(a, dtype))
    dims = _dims(wide, dim)
    (total,) = call.context.reduce(ReduceOp.SUM, (wide,), dims, dtype.compute, call.origin)
    count = call.context.constant(prod(wide.shape[d] for d in dims), (), dtype.compute)
    mean = call.context.pointwise(Op.DIV, (total, count), dtype.compute)
    return _finish(call, mean, shape, dtype)


@lowers(aten.prod.default, aten.prod.dim_int, prims.prod.default)
def _prod(call: Call, a: Tensor, dim: Dims = None, *unused: Any, **also_unused: Any) -> Tensor:
    shape, dtype = _result(call)
    return simple(call, ReduceOp.PROD, a, dim, shape, dtype)


@lowers(aten.amax.default, aten.max.default, prims.amax.default)
def _amax(call: Call, a: Tensor, dim: Dims = None, *unused: Any) -> Tensor:
    shape, dtype = _result(call)
    return simple(call, ReduceOp.MAX, a, dim, shape, dtype)


@lowers(aten.amin.default, aten.min.default, prims.amin.default)
def _amin(call: Call, a: Tensor, dim: Dims = None, *unused: Any) -> Tensor:
    shape, dtype = _result(call)
    return simple(call, ReduceOp.MIN, a, dim, shape, dtype)


@lowers(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def _any_all(call: Call, a: Tensor, dim: Dims = None, *unused: Any) -> Tensor:
    shape, _ = _result(call)
    if dim is not None and not isinstance(dim, int) and not dim:
        return call.context.cast(a, DType.BOOL)  # unlike for other reductions, no dimension means none
    truth = call.context.cast(call.context.cast(a, DType.BOOL), DType.I32)
    op = ReduceOp.MAX if call.origin == "any" else ReduceOp.MIN
    found = simple(call, op, truth, dim, shape, DType.I32)
    zero = call.context.constant(0, (), DType.I32)  # an extreme over nothing is the least or greatest integer
    return call.context.pointwise(Op.GT, (found, zero), DType.BOOL)


@lowers(aten.max.dim, aten.min.dim)
def _extreme_with_index(call: Call, a: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor | None]:
    shape, dtype = _result(call)
    smallest = call.origin == "min"
    if not call.uses(1):
        op = ReduceOp.MIN if smallest else ReduceOp.MAX
        return simple(call, op, a, dim, shape, dtype), None
    value, index = _arg(call, ReduceOp.ARGMIN if smallest else ReduceOp.ARGMAX, a, dim)
    return _finish(call, value, shape, dtype), call.context.reshape(index, shape)


@lowers(aten.argmax.default, aten.argmin.default)
def _arg_extreme(call: Call, a: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    flat = a if dim is not None else call.context.reshape(a, (a.numel,))
    op = ReduceOp.ARGMAX if call.origin == "argmax" else ReduceOp.ARGMIN
    return call.context.reshape(_arg(call, op, flat, 0 if dim is None else dim)[1], call.value.shape)


def _arg(call: Call, op: ReduceOp, a: Tensor, dim: int) -> tuple[Tensor, ...]:
    wide = _at_least_1d(call, a)
    axis = dim % len(wide.shape)
    position = call.context.tensor(wide.shape, DType.I64, lambda c: call.context.builder.position(c[axis]))
    return call.context.reduce(op, (wide, position), (axis,), a.dtype.compute, call.origin)


@lowers(aten.var_mean.correction)
def _var_mean(
    call: Call, a: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    shape, dtype = _result(call)
    mean, var = _moments(call, a, dim, 1 if correction is None else correction, dtype)
    return _finish(call, var, shape, dtype), _finish(call, mean, shape, dtype)


@lowers(aten.var.correction, prims.var.default)
def _var(call: Call, a: Tensor, dim: Dims = None, correction: float | None = None, **unused: Any) -> Tensor:
    shape, dtype = _result(call)
    _, var = _moments(call, a, dim, 1 if correction is None else correction, dtype)
    return _finish(call, var, shape, dtype)


@lowers(aten.std.correction)
def _std(call: Call, a: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    shape, dtype = _result(call)
    _, var = _moments(call, a, dim, 1 if correction is None else correction, dtype)
    return _finish(call, call.context.pointwise(Op.SQRT, (var,), var.dtype), shape, dtype)


def _counts(call: torch.fx.Node) -> bool:
    """Whether a norm is the number of elements that are not 0."""
    return bool(len(call.args) > 1 and call.args[1] == 0)


@lowers(aten.linalg_vector_norm.default, jumps_in=_counts)
def _vector_norm(
    call: Call, a: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return norm(call, a, ord, dim, *_result(call))


def norm(call: Call, a: Tensor, ord: float, dim: Dims, shape: Sequence[int], result: DType) -> Tensor:
    """The sum of the powers `ord` of the sizes, to the power of its reciprocal; an infinite one is an extreme."""
    context = call.context
    if a.numel == 0:
        raise Unsupported("the norm of nothing")
    sizes = context.pointwise(Op.ABS, (context.cast(a, result),), result)
    if ord in (inf, -inf):
        return simple(call, ReduceOp.MAX if ord > 0 else ReduceOp.MIN, sizes, dim, shape, result)
    power = context.constant(ord, (), result.compute)
    if ord == 0:
        there = context.pointwise(Op.NE, (sizes, context.constant(0, (), result.compute)), DType.BOOL)
        terms = context.cast(there, result)
    elif ord in (2, 3, 4):
        square = context.pointwise(Op.MUL, (sizes, sizes), result)
        other = sizes if ord == 3 else square
        terms = square if ord == 2 else context.pointwise(Op.MUL, (square, other), result)
    else:
        terms = sizes if ord == 1 else context.pointwise(Op.POW, (sizes, power), result)
    wide = _at_least_1d(call, terms)
    (total,) = context.reduce(ReduceOp.SUM, (wide,), _dims(wide, dim), result.compute, call.origin)
    if ord == 2:
        total = context.pointwise(Op.SQRT, (total,), result.compute)
    elif ord not in (0, 1):
        root = context.pointwise(Op.RECIPROCAL, (power,), result.compute)
        total = context.pointwise(Op.POW, (total, root), result.compute)
    return _finish(call, total, shape, result)


@lowers(aten.logsumexp.default)
def _logsumexp(call: Call, a: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """The maximum is taken out first; where it is infinite, it is the result."""
    context, (shape, dtype) = call.context, _result(call)
    wide = _at_least_1d(call, context.cast(a, dtype.compute if dtype.is_float else dtype))
    if wide.numel == 0:
        raise Unsupported("logsumexp of nothing")
    dims = _dims(wide, dim)
    (largest,) = context.reduce(ReduceOp.MAX, (wide,), dims, dtype.compute, call.origin)
    shifted = context.pointwise(Op.SUB, (wide, largest), dtype.compute)
    exponentials = context.pointwise(Op.EXP, (shifted,), dtype.compute)
    (total,) = context.reduce(ReduceOp.SUM, (exponentials,), dims, dtype.compute, call.origin)
    logarithm = context.pointwise(Op.LOG, (total,), dtype.compute)
    whole = context.pointwise(Op.ADD, (logarithm, largest), dtype.compute)
    infinite = context.pointwise(Op.ISINF, (largest,), DType.BOOL)
    return _finish(call, context.pointwise(Op.WHERE, (infinite, largest, whole), dtype.compute), shape, dtype)


def _moments(call: Call, a: Tensor, dim: Dims, correction: float, dtype: DType) -> tuple[Tensor, Tensor]:
    """(mean, variance) with `dim` kept. The degrees of freedom are not negative, as in PyTorch.

    On a CPU in double, as eager: as a float the sum of squares is infinite for numbers whose variance is not.
    """
    if not dtype.is_float:
        raise Unsupported("variance of integers")
    accumulate = DType.F64 if call.context.wide else dtype.compute
    floats = call.context.cast(call.context.cast(a, dtype), dtype.compute)
    wide = _at_least_1d(call, call.context.cast(floats, accumulate))
    dims = _dims(wide, dim)
    count = prod(wide.shape[d] for d in dims)
    if count == 0:
        raise Unsupported("mean and variance of no elements")
    mean, m2 = call.context.reduce(ReduceOp.MOMENTS, (wide,), dims, accumulate, call.origin)
    if call.context.cuda:  # eager keeps an infinity at one place of the row, which only its kernel knows
        undefined = call.context.pointwise(Op.NE, (m2, m2), DType.BOOL)
        mean = call.context.pointwise(Op.WHERE, (undefined, m2, mean), accumulate)
    freedom = max(count - correction, 0)
    divisor = call.context.constant(freedom, (), accumulate)
    return mean, call.context.pointwise(Op.DIV, (m2, divisor), accumulate)
