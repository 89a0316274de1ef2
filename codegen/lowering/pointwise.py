"""Pointwise operators: one table from ATen and prims names to scalar ops, and PyTorch's own type promotion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Op
from fusepass.codegen.ir.ops import STEPS
from fusepass.codegen.lowering.registry import ALL, Call, lowers
from fusepass.codegen.lowering.tensor import TORCH, Context, Tensor, dtype_of

aten, prims = torch.ops.aten, torch.ops.prims

_MOST_FACTORS = 8  # of a power that is a product: each factor rounds by half a unit

# Operators whose scalar op has the same operands: (scalar op, promotion, ATen and prims overloads).
_DIRECT: tuple[tuple[Op, KIND, tuple[str, ...]], ...] = (
    (Op.MUL, KIND.DEFAULT, ("aten.mul.Tensor", "aten.mul.Scalar", "prims.mul.default")),
    (Op.DIV, KIND.INT_TO_FLOAT, ("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")),
    (Op.MAXIMUM, KIND.DEFAULT, ("aten.maximum.default", "prims.maximum.default")),
    (Op.MINIMUM, KIND.DEFAULT, ("aten.minimum.default", "prims.minimum.default")),
    (Op.FMAX, KIND.DEFAULT, ("aten.fmax.default", "prims.fmax.default")),
    (Op.FMIN, KIND.DEFAULT, ("aten.fmin.default", "prims.fmin.default")),
    (Op.FMOD, KIND.DEFAULT, ("aten.fmod.Tensor", "aten.fmod.Scalar", "prims.fmod.default")),
    (
        Op.REMAINDER,
        KIND.DEFAULT,
        ("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor", "prims.remainder.default"),
    ),
    (Op.POW, KIND.BOOL_TO_LONG, ("aten.pow.Tensor_Tensor", "prims.pow.default")),
    (Op.ATAN2, KIND.INT_TO_FLOAT, ("aten.atan2.default", "prims.atan2.default")),
    (Op.HYPOT, KIND.DEFAULT, ("aten.hypot.default", "prims.hypot.default")),
    (Op.NEXTAFTER, KIND.NO_OPMATH, ("prims.nextafter.default",)),
    (Op.SHIFT_LEFT, KIND.DEFAULT, ("prims.shift_left.default", "aten.__lshift__.Tensor", "aten.__lshift__.Scalar")),
    (Op.SHIFT_RIGHT, KIND.DEFAULT, ("prims.shift_right_arithmetic.default", "aten.__rshift__.Tensor", "aten.__rshift__.Scalar")),
    (Op.COPYSIGN, KIND.INT_TO_FLOAT, ("aten.copysign.Tensor",)),
    (Op.EQ, KIND.ALWAYS_BOOL, ("aten.eq.Tensor", "aten.eq.Scalar", "prims.eq.default")),
    (Op.NE, KIND.ALWAYS_BOOL, ("aten.ne.Tensor", "aten.ne.Scalar", "prims.ne.default")),
    (Op.LT, KIND.ALWAYS_BOOL, ("aten.lt.Tensor", "aten.lt.Scalar", "prims.lt.default")),
    (Op.LE, KIND.ALWAYS_BOOL, ("aten.le.Tensor", "aten.le.Scalar", "prims.le.default")),
    (Op.GT, KIND.ALWAYS_BOOL, ("aten.gt.Tensor", "aten.gt.Scalar", "prims.gt.default")),
    (Op.GE, KIND.ALWAYS_BOOL, ("aten.ge.Tensor", "aten.ge.Scalar", "prims.ge.default")),
    (Op.BIT_AND, KIND.DEFAULT, ("aten.bitwise_and.Tensor", "aten.bitwise_and.Scalar", "prims.bitwise_and.default")),
    (Op.BIT_OR, KIND.DEFAULT, ("aten.bitwise_or.Tensor", "aten.bitwise_or.Scalar", "prims.bitwise_or.default")),
    (Op.BIT_XOR, KIND.DEFAULT, ("aten.bitwise_xor.Tensor", "aten.bitwise_xor.Scalar", "prims.bitwise_xor.default")),
    (Op.BIT_NOT, KIND.DEFAULT, ("aten.bitwise_not.default", "prims.bitwise_not.default")),
    (Op.NEG, KIND.DEFAULT, ("aten.neg.default", "prims.neg.default")),
    (Op.ABS, KIND.DEFAULT, ("aten.abs.default", "prims.abs.default")),
    (Op.SIGN, KIND.DEFAULT, ("aten.sign.default", "aten.sgn.default", "prims.sign.default")),
    (Op.FLOOR, KIND.DEFAULT, ("aten.floor.default", "prims.floor.default")),
    (Op.CEIL, KIND.DEFAULT, ("aten.ceil.default", "prims.ceil.default")),
    (Op.ROUND, KIND.DEFAULT, ("aten.round.default", "prims.round.default")),
    (Op.TRUNC, KIND.DEFAULT, ("aten.trunc.default", "prims.trunc.default")),
    (Op.SIGNBIT, KIND.ALWAYS_BOOL, ("aten.signbit.default", "prims.signbit.default")),
    (Op.ISNAN, KIND.ALWAYS_BOOL, ("aten.isnan.default",)),
    (Op.ISINF, KIND.ALWAYS_BOOL, ("aten.isinf.default",)),
    *(
        (op, KIND.INT_TO_FLOAT, (f"aten.{op.value}.default", f"prims.{op.value}.default"))
        for op in (
            Op.RECIPROCAL, Op.SQRT, Op.RSQRT, Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG10, Op.LOG1P,
            Op.SIN, Op.COS, Op.TAN, Op.ASIN, Op.ACOS, Op.ATAN, Op.SINH, Op.COSH, Op.TANH, Op.ASINH, Op.ACOSH, Op.ATANH,
            Op.ERF, Op.ERFC, Op.LGAMMA, Op.SIGMOID,
        )
    ),
)  # fmt: skip


_WITH_NUMBERS = frozenset({Op.MUL, Op.DIV, Op.FLOOR_DIV})
"""Operators of a half and a Python number that PyTorch computes with the number as it is, not as a half."""


def overload(name: str) -> Any | None:
    """The operator called ``namespace.op.overload``, None where this PyTorch has none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def promote(
    call: Call, operands: tuple[Any, ...], kind: KIND, *, exact: bool = False
) -> tuple[tuple[Tensor, ...], DType]:
    """The operands as tensors of the type PyTorch computes in, numbers not rounded to it if `exact`; the result's type."""
    compute = common_type(operands)
    if kind is KIND.INT_TO_FLOAT and not compute.is_float:
        compute = dtype_of(torch.get_default_dtype())
    if kind is KIND.BOOL_TO_LONG and compute is DType.BOOL:
        compute = DType.I64
    converted = tuple(as_tensor(call.context, operand, compute, exact=exact) for operand in operands)
    return converted, DType.BOOL if kind is KIND.ALWAYS_BOOL else compute


def common_type(operands: Sequence[Any]) -> DType:
    """PyTorch's type promotion: tensors with dimensions before 0-dim tensors before Python numbers.

    A later group counts only where its kind (bool, integer, float) is higher. `elementwise_dtypes` does the same and imports SymPy.
    """
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    groups = (
        [TORCH[tensor.dtype] for tensor in tensors if tensor.shape],
        [TORCH[tensor.dtype] for tensor in tensors if not tensor.shape],
        [_number_type(operand) for operand in operands if not isinstance(operand, Tensor)],
    )
    result: torch.dtype | None = None
    for group in groups:
        if group:
            lower = reduce(torch.promote_types, group)
            result = lower if result is None or _rank(lower) > _rank(result) else result
    assert result is not None, "an operator has operands"
    return dtype_of(result)


def _number_type(number: Any) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, int) else torch.get_default_dtype()


def _rank(dtype: torch.dtype) -> int:
    """0 for bool, 1 for integers, 2 for floats, 3 for complex numbers."""
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def as_tensor(context: Context, value: Any, dtype: DType, *, exact: bool = False) -> Tensor:
    """`value` (a tensor or a Python number) as a tensor of `dtype`; with `exact` a number keeps all of its digits."""
    if isinstance(value, Tensor):
        return context.cast(value, dtype)
    return context.constant(value, (), dtype, exact=exact)


def elementwise(call: Call, op: Op, kind: KIND, *operands: Any) -> Tensor:
    """`op` with promotion; the result has the type that PyTorch gave it."""
    converted, result = promote(call, operands, kind, exact=op in _WITH_NUMBERS)
    return call.context.pointwise(op, converted, result)


def _register_direct() -> None:
    for op, kind, names in _DIRECT:
        found = [target for name in names if (target := overload(name)) is not None]

        def handler(call: Call, *operands: Any, _op: Op = op, _kind: KIND = kind, **unused: Any) -> Tensor:
            return elementwise(call, _op, _kind, *operands)

        lowers(*found, jumps_in=ALL if op in STEPS else ())(handler)


_register_direct()


@lowers(aten.add.Tensor, aten.add.Scalar, prims.add.default)
def _add(call: Call, a: Any, b: Any, alpha: float = 1) -> Tensor:
    return _scaled(call, Op.ADD, a, b, alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar, prims.sub.default)
def _sub(call: Call, a: Any, b: Any, alpha: float = 1) -> Tensor:
    return _scaled(call, Op.SUB, a, b, alpha)


def _scaled(call: Call, op: Op, a: Any, b: Any, alpha: float) -> Tensor:
    (left, right), result = promote(call, (a, b), KIND.DEFAULT)
    context = call.context
    if alpha != 1:
        right = context.pointwise(Op.MUL, (right, as_tensor(context, alpha, right.dtype)), right.dtype)
    if result is DType.BOOL:
        op = Op.OR
    return context.pointwise(op, (left, right), result)


@lowers(aten.pow.Tensor_Scalar)
def _pow(call: Call, a: Tensor, exponent: float) -> Tensor:
    """Roots where PyTorch's own kernels use them, which are not the same at infinity, and products: both are cheaper than a power."""
    (base, power), result = promote(call, (a, exponent), KIND.BOOL_TO_LONG)
    if exponent in range(2, (_MOST_FACTORS if result.is_float else 3) + 1):
        return _product(call, base, int(exponent), result)
    if exponent == -2 and result.is_float:
        return call.context.pointwise(Op.RECIPROCAL, (_product(call, base, 2, result),), result)
    root = {0.5: Op.SQRT, -0.5: Op.RSQRT, -1: Op.RECIPROCAL}.get(exponent)
    if root is not None and result.is_float:
        return call.context.pointwise(root, (base,), result)
    return call.context.pointwise(Op.POW, (base, power), result)


def _product(call: Call, base: Tensor, count: int, result: DType) -> Tensor:
    """So many factors `base`, by squares."""
    multiply = partial(call.context.pointwise, Op.MUL, dtype=result)
    factors, power = list[Tensor](), base
    while count:
        if count & 1:
            factors.append(power)
        count >>= 1
        power = multiply((power, power))
    return reduce(lambda x, y: multiply((y, x)), factors)


@lowers(aten.pow.Scalar)
def _power_of_number(call: Call, base: float, exponent: Tensor) -> Tensor:
    (left, right), result = promote(call, (base, exponent), KIND.BOOL_TO_LONG)
    if base == 2 and result.is_float:
        return call.context.pointwise(Op.EXP2, (right,), result)
    return call.context.pointwise(Op.POW, (left, right), result)


@lowers(prims.div.default)
def _prims_div(call: Call, a: Any, b: Any) -> Tensor:
    (left, right), result = promote(call, (a, b), KIND.DEFAULT)
    return (
        _truncated(call, left, right) if not result.is_float else call.context.pointwise(Op.DIV, (left, right), result)
    )


def _truncated(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """The quotient of integers, rounded towards zero: what is left without the remainder divides exactly."""
    rest = call.context.pointwise(Op.FMOD, (a, b), a.dtype)
    return call.context.pointwise(Op.FLOOR_DIV, (call.context.pointwise(Op.SUB, (a, rest), a.dtype), b), a.dtype)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode, jumps_in=lambda call: call.kwargs.get("rounding_mode") is not None)
def _div_mode(call: Call, a: Any, b: Any, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is None:
        return elementwise(call, Op.DIV, KIND.INT_TO_FLOAT, a, b)
    (left, right), result = promote(call, (a, b), KIND.DEFAULT, exact=True)
    if rounding_mode == "floor":
        return call.context.pointwise(Op.FLOOR_DIV, (left, right), result)
    if not result.is_float:
        return _truncated(call, left, right)
    return call.context.pointwise(Op.TRUNC, (call.context.pointwise(Op.DIV, (left, right), result),), result)


@lowers(aten.floor_divide.default, jumps_in=ALL)
def _floor_divide(call: Call, a: Any, b: Any) -> Tensor:
    return elementwise(call, Op.FLOOR_DIV, KIND.DEFAULT, a, b)


@lowers(aten.relu.default)
def _relu(call: Call, a: Tensor) -> Tensor:
    return elementwise(call, Op.MAXIMUM, KIND.DEFAULT, a, 0)


@lowers(aten.clamp.default, aten.clamp.Tensor, aten.hardtanh.default)
def _clamp(call: Call, a: Tensor, low: Any = None, high: Any = None) -> Tensor:
    if call.origin == "hardtanh":
        low, high = (-1 if low is None else low), (1 if high is None else high)
    bounds = tuple(bound for bound in (low, high) if bound is not None)
    converted, result = promote(call, (a, *bounds), KIND.DEFAULT)
    value, rest = converted[0], list(converted[1:])
    for op, bound in ((Op.MAXIMUM, low), (Op.MINIMUM, high)):
        if bound is not None:
            value = call.context.pointwise(op, (value, rest.pop(0)), result)
    return value


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def _clamp_min(call: Call, a: Tensor, low: Any) -> Tensor:
    return elementwise(call, Op.MAXIMUM, KIND.DEFAULT, a, low)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def _clamp_max(call: Call, a: Tensor, high: Any) -> Tensor:
    return elementwise(call, Op.MINIMUM, KIND.DEFAULT, a, high)


@lowers(aten.where.self, prims.where.default, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(call: Call, condition: Tensor, a: Any, b: Any) -> Tensor:
    (left, right), result = promote(call, (a, b), KIND.NO_OPMATH)
    chosen = call.context.cast(condition, DType.BOOL)
    return call.context.pointwise(Op.WHERE, (chosen, left, right), result)


@lowers(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.logical_not.default)
def _logical(call: Call, *operands: Tensor) -> Tensor:
    converted = [call.context.cast(operand, DType.BOOL) for operand in operands]
    return call.context.pointwise(Op(call.origin), converted, DType.BOOL)


@lowers(aten._to_copy.default)
def _to_copy(call: Call, a: Tensor, *, dtype: torch.dtype | None = None, **unused: Any) -> Tensor:
    """What the model itself narrows to a half is rounded here, as in eager; other halves round where they are stored."""
    if dtype is None:
        return a
    target = dtype_of(dtype)
    narrow = call.context.cast(a, target)
    return narrow if target is a.dtype or target.compute is target else call.context.rounded(narrow)


@lowers(prims.convert_element_type.default)
def _convert(call: Call, a: Tensor, dtype: torch.dtype) -> Tensor:
    return call.context.cast(a, dtype_of(dtype))


@lowers(
    aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, prims.view_of.default
)
def _identity(call: Call, a: Tensor, **unused: Any) -> Tensor:
    return a
