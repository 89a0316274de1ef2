"""Normalisations by their definition: one reduction gives mean and variance (or two give maximum and sum), the rest is pointwise.

PyTorch has decompositions of them, but running one imports SymPy and Dynamo, three seconds in the first call, and those of layer
and group norm reduce twice (variance and sum).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Op, ReduceOp
from fusepass.codegen.lowering.activations import Value
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Tensor, Unsupported, dtype_of

aten = torch.ops.aten

Results = tuple[Tensor, Tensor, Tensor]


@lowers(aten.native_layer_norm.default)
def _layer_norm(
    call: Call, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Results:
    rank = len(x.shape)
    return _normalised(call, x, range(rank - len(normalized_shape), rank), weight, bias, eps)


@lowers(aten.native_group_norm.default)
def _group_norm(
    call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hxw: int, groups: int, eps: float
) -> Results:
    context = call.context
    grouped = context.reshape(x, (n, groups, c // groups, hxw))
    scale, shift = (None if a is None else context.reshape(a, (groups, c // groups, 1)) for a in (weight, bias))
    result, mean, rstd = _normalised(call, grouped, (2, 3), scale, shift, eps)
    return context.reshape(result, x.shape), mean, rstd


def _normalised(
    call: Call, x: Tensor, dims: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Results:
    """(normalised, mean, reciprocal of the standard deviation); the latter two in the shape PyTorch gave them."""
    wide = _wide(call, x)
    mean, variance = _moments(call, wide, dims)
    rstd = _rstd(variance, eps)
    result = _affine((wide - mean) * rstd, weight, bias)
    return call.context.cast(result.tensor, x.dtype), _saved(call, mean, 1), _saved(call, rstd, 2)


def _wide(call: Call, x: Tensor) -> Value:
    return Value(call.context, call.context.cast(x, x.dtype.compute))


def _moments(call: Call, x: Value, dims: Sequence[int]) -> tuple[Value, Value]:
    """(mean, variance without correction) of `x` over `dims`, which stay with size 1."""
    shape, dtype = x.tensor.shape, x.tensor.dtype
    mean, m2 = call.context.reduce(ReduceOp.MOMENTS, (x.tensor,), tuple(dims), dtype, call.origin)
    return Value(x.context, mean), Value(x.context, m2) / prod(shape[d] for d in dims)


def _rstd(variance: Value, eps: float) -> Value:
    return (variance + eps).apply(Op.RSQRT)


def _affine(x: Value, weight: Tensor | None, bias: Tensor | None) -> Value:
    dtype = x.tensor.dtype
    if weight is not None:
        x = x * Value(x.context, x.context.cast(weight, dtype))
    if bias is not None:
        x = x + Value(x.context, x.context.cast(bias, dtype))
    return x


def _saved(call: Call, statistic: Value, output: int) -> Tensor:
    """A statistic in the shape and type of the operator's output number `output`."""
    like = call.node.meta["val"][output]
    return call.context.cast(call.context.reshape(statistic.tensor, like.shape), dtype_of(like.dtype))


@lowers(aten._native_batch_norm_legit_functional.default)
def _batch_norm(
    call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not training:
        raise Unsupported("batch norm that keeps its running statistics although it may update them")
    result, mean, variance, rstd = _channel_norm(call, x, weight, bias, eps)
    count = x.numel // max(x.shape[1], 1)
    unbiased = variance * (count / max(count - 1, 1))
    return (
        result, _saved(call, mean, 1), _saved(call, rstd, 2),
        _blended(call, running_mean, mean, momentum), _blended(call, running_var, unbiased, momentum),
    )  # fmt: skip


def _blended(call: Call, running: Tensor, new: Value, momentum: float) -> Tensor:
    """The running statistic after a batch."""
    flat = Value(call.context, call.context.cast(call.context.reshape(new.tensor, running.shape), running.dtype))
    return (flat * momentum + Value(call.context, running) * (1 - momentum)).tensor


@lowers(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(
    call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> Results:
    result, mean, _, rstd = _channel_norm(call, x, weight, bias, eps)
    return result, _saved(call, mean, 1), _saved(call, rstd, 2)


def _channel_norm(
    call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Value, Value, Value]:
    """(normalised per channel, mean, variance, reciprocal of the standard deviation)."""
    wide = _wide(call, x)
    mean, variance = _moments(call, wide, [d for d in range(len(x.shape)) if d != 1])
    rstd = _rstd(variance, eps)
    result = _affine((wide - mean) * rstd, _per_channel(call, weight, x), _per_channel(call, bias, x))
    return call.context.cast(result.tensor, x.dtype), mean, variance, rstd


def _per_channel(call: Call, a: Tensor | None, x: Tensor) -> Tensor | None:
    return None if a is None else call.context.reshape(a, (x.shape[1], *(1,) * (len(x.shape) - 2)))


@lowers(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_eval(
    call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide, dtype = _wide(call, x), x.dtype.compute
    mean, variance, scale, shift = (
        None if a is None else call.context.cast(a, dtype)
        for a in (_per_channel(call, t, x) for t in (running_mean, running_var, weight, bias))
    )
    assert mean is not None
    assert variance is not None
    centred = wide - Value(call.context, mean)
    result = _affine(centred * _rstd(Value(call.context, variance), eps), scale, shift)
    empty = call.context.constant(0, (0,), DType.F32)
    return call.context.cast(result.tensor, x.dtype), empty, empty


@lowers(aten._softmax.default)
def _softmax(call: Call, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    numerator = _shifted(call, x, dim).apply(Op.EXP)
    total = Value(call.context, _reduced(call, ReduceOp.SUM, numerator, dim))
    return call.context.cast((numerator / total).tensor, dtype_of(call.value.dtype))


@lowers(aten._log_softmax.default)
def _log_softmax(call: Call, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted = _shifted(call, x, dim)
    total = Value(call.context, _reduced(call, ReduceOp.SUM, shifted.apply(Op.EXP), dim))
    return call.context.cast((shifted - total.apply(Op.LOG)).tensor, dtype_of(call.value.dtype))


def _shifted(call: Call, x: Tensor, dim: int) -> Value:
    """`x` minus its maximum along `dim`, so that no exponential overflows."""
    wide = _wide(call, x)
    if x.numel == 0:
        return wide
    return wide - Value(call.context, _reduced(call, ReduceOp.MAX, wide, dim))


def _reduced(call: Call, op: ReduceOp, x: Value, dim: int) -> Tensor:
    tensor = x.tensor if x.tensor.shape else call.context.reshape(x.tensor, (1,))
    (result,) = call.context.reduce(op, (tensor,), (dim % len(tensor.shape),), tensor.dtype, call.origin)
    return result if x.tensor.shape else call.context.reshape(result, ())
