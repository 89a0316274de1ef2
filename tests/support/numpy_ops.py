"""The kernel IR's scalar operations and reductions on numpy arrays, for the reference interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fusepass.codegen.ir.expr import Op, ReduceOp
from fusepass.codegen.ir.random import place
from fusepass.codegen.lowering.dropout import uniform

Array = np.ndarray[Any, np.dtype[Any]]


def tf32(x: Array) -> Array:
    """`x` as float32 with 10 bits of mantissa, to nearest, halves away from zero; float64 as the interpreter has it."""
    single = x.astype(np.float32)
    rounded = ((single.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isnan(single), single, rounded).astype(np.float64)


# ---- Reductions over the last axis


def _sum(x: Array) -> tuple[Array, ...]:
    return (x.sum(-1, dtype=x.dtype),)


def _prod(x: Array) -> tuple[Array, ...]:
    return (x.prod(-1, dtype=x.dtype),)


def _lowest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return False
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _highest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return True
    return np.inf if dtype.kind == "f" else np.iinfo(dtype).max


def _max(x: Array) -> tuple[Array, ...]:
    return (x.max(-1, initial=_lowest(x.dtype)),)


def _min(x: Array) -> tuple[Array, ...]:
    return (x.min(-1, initial=_highest(x.dtype)),)


def _moments(x: Array) -> tuple[Array, ...]:
    mean = x.mean(-1) if x.shape[-1] else np.zeros(x.shape[:-1])
    return mean, ((x - mean[..., None]) ** 2).sum(-1), np.full(mean.shape, float(x.shape[-1]))


def _merge_moments(count: Array, mean: Array, m2: Array) -> tuple[Array, ...]:
    total = count.sum(-1)
    center = (count * mean).sum(-1) / np.where(total > 0, total, 1)
    return center, m2.sum(-1) + (count * (mean - center[..., None]) ** 2).sum(-1), total


def _softmax(x: Array) -> tuple[Array, ...]:
    return _merge_softmax(x, np.ones_like(x))


def _merge_softmax(value: Array, total: Array) -> tuple[Array, ...]:
    (bound,) = _max(value)
    shift = np.where(bound == -np.inf, 0, bound)
    return bound, (total * np.exp(value - shift[..., None])).sum(-1)


def _arg_extreme(extreme: Callable[[Array], tuple[Array, ...]], value: Array, position: Array) -> tuple[Array, ...]:
    (found,) = extreme(value)
    same = (value == found[..., None]) | (np.isnan(value) & np.isnan(found)[..., None])
    return found, np.where(same, position, np.iinfo(np.int64).max).min(-1, initial=np.iinfo(np.int64).max)


def _last_extreme(extreme: Callable[[Array], tuple[Array, ...]], value: Array, position: Array) -> tuple[Array, ...]:
    found, last = _arg_extreme(extreme, value, -position)
    return found, -last


REDUCE: dict[ReduceOp, Callable[..., tuple[Array, ...]]] = {
    ReduceOp.SUM: _sum,
    ReduceOp.PROD: _prod,
    ReduceOp.MAX: _max,
    ReduceOp.MIN: _min,
    ReduceOp.MOMENTS: _moments,
    ReduceOp.MERGE_MOMENTS: _merge_moments,
    ReduceOp.SOFTMAX: _softmax,
    ReduceOp.MERGE_SOFTMAX: _merge_softmax,
    ReduceOp.ARGMAX: lambda value, position: _arg_extreme(_max, value, position),
    ReduceOp.ARGMIN: lambda value, position: _arg_extreme(_min, value, position),
    ReduceOp.LAST_ARGMAX: lambda value, position: _last_extreme(_max, value, position),
    ReduceOp.LAST_ARGMIN: lambda value, position: _last_extreme(_min, value, position),
}


def _each(reduce: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """What `reduce` finds of the elements up to each one."""

    def run(*values: Array) -> tuple[Array, ...]:
        found = [reduce(*(value[..., : end + 1] for value in values)) for end in range(values[0].shape[-1])]
        return tuple(np.stack(part, -1) for part in zip(*found, strict=True))

    return run


RUNNING: dict[ReduceOp, Callable[..., tuple[Array, ...]]] = {
    ReduceOp.SUM: lambda x: (np.add.accumulate(x, -1, x.dtype),),
    ReduceOp.PROD: lambda x: (np.multiply.accumulate(x, -1, x.dtype),),
    ReduceOp.MAX: lambda x: (np.maximum.accumulate(x, -1),),
    ReduceOp.MIN: lambda x: (np.minimum.accumulate(x, -1),),
    ReduceOp.SOFTMAX: _each(_softmax),
    ReduceOp.MERGE_SOFTMAX: _each(_merge_softmax),
    ReduceOp.LAST_ARGMAX: _each(REDUCE[ReduceOp.LAST_ARGMAX]),
    ReduceOp.LAST_ARGMIN: _each(REDUCE[ReduceOp.LAST_ARGMIN]),
}

# ---- Scalar operations


def _by_torch(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    def apply(*args: Array) -> Array:
        result: Array = function(*(torch.from_numpy(np.array(arg)) for arg in args)).numpy()
        return result

    return apply


_uniform = _by_torch(uniform)

APPLY: dict[Op, Callable[..., Any]] = {
    Op.ADD: np.add,
    Op.SUB: np.subtract,
    Op.MUL: np.multiply,
    Op.TERM: np.multiply,
    Op.RESCALE: np.multiply,
    Op.DIV: np.divide,
    Op.FLOOR_DIV: np.floor_divide,
    Op.REMAINDER: np.remainder,
    Op.FMOD: np.fmod,
    Op.POW: _by_torch(torch.pow),
    Op.ATAN2: np.arctan2,
    Op.HYPOT: np.hypot,
    Op.COPYSIGN: np.copysign,
    # The neighbour is the type's, not float64's.
    Op.NEXTAFTER: lambda a, b: np.nextafter(a.astype(np.float32), b.astype(np.float32)),
    Op.MAXIMUM: np.maximum,
    Op.MINIMUM: np.minimum,
    Op.FMAX: np.fmax,
    Op.FMIN: np.fmin,
    Op.EQ: np.equal,
    Op.NE: np.not_equal,
    Op.LT: np.less,
    Op.LE: np.less_equal,
    Op.GT: np.greater,
    Op.GE: np.greater_equal,
    Op.AND: np.logical_and,
    Op.OR: np.logical_or,
    Op.XOR: np.logical_xor,
    Op.NOT: np.logical_not,
    Op.BIT_AND: np.bitwise_and,
    Op.BIT_OR: np.bitwise_or,
    Op.BIT_XOR: np.bitwise_xor,
    Op.BIT_NOT: np.invert,
    Op.SHIFT_LEFT: _by_torch(torch.bitwise_left_shift),
    Op.SHIFT_RIGHT: _by_torch(torch.bitwise_right_shift),
    Op.WHERE: np.where,
    Op.NEG: np.negative,
    Op.ABS: np.abs,
    Op.SIGN: _by_torch(torch.sign),
    Op.SIGNBIT: np.signbit,
    Op.RECIPROCAL: lambda x: 1 / x,
    Op.SQRT: np.sqrt,
    Op.RSQRT: lambda x: 1 / np.sqrt(x),
    Op.EXP: np.exp,
    Op.EXP2: np.exp2,
    Op.EXPM1: np.expm1,
    Op.LOG: np.log,
    Op.LOG2: np.log2,
    Op.LOG10: np.log10,
    Op.LOG1P: np.log1p,
    Op.SIN: np.sin,
    Op.COS: np.cos,
    Op.TAN: np.tan,
    Op.ASIN: np.arcsin,
    Op.ACOS: np.arccos,
    Op.ATAN: np.arctan,
    Op.SINH: np.sinh,
    Op.COSH: np.cosh,
    Op.TANH: np.tanh,
    Op.ASINH: np.arcsinh,
    Op.ACOSH: np.arccosh,
    Op.ATANH: np.arctanh,
    Op.ERF: _by_torch(torch.erf),
    Op.ERFC: _by_torch(torch.erfc),
    Op.RANDOM: lambda seed, offset, element, threads, width: _uniform(
        seed, offset, *place(element, threads.item(), width.item())
    ),
    Op.UNIFORM: lambda *args: _uniform(*args),
    Op.NORMAL_CDF: _by_torch(torch.special.ndtr),
    Op.LGAMMA: _by_torch(torch.lgamma),
    Op.FLOOR: np.floor,
    Op.CEIL: np.ceil,
    Op.ROUND: np.rint,
    Op.TRUNC: np.trunc,
    Op.TF32: tf32,
    Op.ISNAN: np.isnan,
    Op.ISINF: np.isinf,
    Op.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
}
