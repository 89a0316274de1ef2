"""Activations and other common pointwise composites, by their formulas.

PyTorch has decompositions for all of them, but running one imports SymPy and Dynamo (three seconds in the first call), and they test for
NaN what the scalar operators propagate by themselves. Everything less common is decomposed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, pi, sqrt
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Op
from fusepass.codegen.lowering.decompositions import FLOAT32_SIXTH
from fusepass.codegen.lowering.pointwise import as_tensor, promote
from fusepass.codegen.lowering.registry import ALL, Call, Jumps, lowers
from fusepass.codegen.lowering.tensor import TORCH, Context, Tensor, dtype_of

aten = torch.ops.aten


_ARITHMETIC = frozenset({Op.ADD, Op.SUB, Op.MUL, Op.DIV})
"""What is computed with numbers as they are; what is compared, or put in place of an element, is rounded to its type."""


class Value:
    """A tensor in a formula: Python's operators, and numbers, mean what they look like."""

    def __init__(self, context: Context, tensor: Tensor) -> None:
        self.context = context
        self.tensor = tensor

    def apply(self, op: Op, *others: Value | float, dtype: DType | None = None) -> Value:
        """``op(self, *others)``."""
        operands = [self.tensor, *(self._tensor(other, exact=op in _ARITHMETIC) for other in others)]
        return Value(self.context, self.context.pointwise(op, operands, dtype or self.tensor.dtype))

    def _tensor(self, other: Value | float, *, exact: bool = False) -> Tensor:
        if isinstance(other, Value):
            return other.tensor
        return as_tensor(self.context, other, self.tensor.dtype, exact=exact)

    def number(self, value: float, *, exact: bool) -> Value:
        """`value` beside this one, rounded to its type unless `exact`."""
        return Value(self.context, self._tensor(value, exact=exact))

    def _reversed(self, op: Op, other: float) -> Value:
        return Value(self.context, self._tensor(other, exact=op in _ARITHMETIC)).apply(op, self)

    def __add__(self, other: Value | float) -> Value:
        return self.apply(Op.ADD, other)

    def __radd__(self, other: float) -> Value:
        return self._reversed(Op.ADD, other)

    def __sub__(self, other: Value | float) -> Value:
        return self.apply(Op.SUB, other)

    def __rsub__(self, other: float) -> Value:
        return self._reversed(Op.SUB, other)

    def __mul__(self, other: Value | float) -> Value:
        return self.apply(Op.MUL, other)

    def __rmul__(self, other: float) -> Value:
        return self._reversed(Op.MUL, other)

    def __truediv__(self, other: Value | float) -> Value:
        return self.apply(Op.DIV, other)

    def __neg__(self) -> Value:
        return self.apply(Op.NEG)

    def __gt__(self, other: Value | float) -> Value:
        return self.apply(Op.GT, other, dtype=DType.BOOL)

    def __lt__(self, other: Value | float) -> Value:
        return self.apply(Op.LT, other, dtype=DType.BOOL)

    def __le__(self, other: Value | float) -> Value:
        return self.apply(Op.LE, other, dtype=DType.BOOL)

    def clamp(self, low: float, high: float) -> Value:
        return self.apply(Op.MAXIMUM, low).apply(Op.MINIMUM, high)

    def where(self, yes: Value | float, no: Value | float) -> Value:
        """`yes` where this condition holds, else `no`; at least one of them is a `Value`."""
        typed = yes if isinstance(yes, Value) else no
        assert isinstance(typed, Value)
        branches = [typed._tensor(yes), typed._tensor(no)]
        return Value(self.context, self.context.pointwise(Op.WHERE, [self.tensor, *branches], typed.tensor.dtype))


def exp(x: Value) -> Value:
    return x.apply(Op.EXP)


def log1p(x: Value) -> Value:
    return x.apply(Op.LOG1P)


def tanh(x: Value) -> Value:
    return x.apply(Op.TANH)


Formula = Callable[..., Value]


def formula(*targets: OpOverload, jumps_in: Jumps = ()) -> Callable[[Formula], Formula]:
    """Register ``f(x, *parameters)`` for `targets`; tensors among the arguments arrive as `Value` of one float type. For `jumps_in` see `lowers`."""

    def register(function: Formula) -> Formula:
        def handler(call: Call, *args: Any, **kwargs: Any) -> Tensor:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            promoted, _ = promote(call, tuple(tensors), KIND.INT_TO_FLOAT)
            values = iter(Value(call.context, tensor) for tensor in promoted)
            result = function(*(next(values) if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
            return call.context.cast(result.tensor, dtype_of(call.value.dtype))

        lowers(*targets, jumps_in=jumps_in)(handler)
        return function

    return register


@formula(aten.gelu.default)
def gelu(x: Value, approximate: str = "none") -> Value:
    """``x Phi(x)``; approximately ``x (1 + tanh(y)) / 2``, which is ``x sigmoid(2 y)``: no digits cancel."""
    if approximate == "tanh":
        return x * (2 * sqrt(2 / pi) * (x + 0.044715 * (x * x * x))).apply(Op.SIGMOID)
    return x * x.apply(Op.NORMAL_CDF)


@formula(aten.silu.default)
def silu(x: Value) -> Value:
    return x * x.apply(Op.SIGMOID)


@formula(aten.softplus.default)
def softplus(x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    scaled = x if beta == 1 else x * beta
    return (scaled > threshold).where(x, log1p(exp(scaled)) if beta == 1 else log1p(exp(scaled)) / beta)


@formula(aten.mish.default)
def mish(x: Value) -> Value:
    """``x tanh(log(1 + e^x))``, where the tangent is ``n / (n + 2)`` for ``n = e^x (e^x + 2)``: one function instead of three.

    All terms are positive, so nothing cancels; from 20 on, the quotient is 1.
    """
    power = exp(x.apply(Op.MINIMUM, 20.0))
    grown = power * (power + 2.0)
    return x * (grown * (grown + 2.0).apply(Op.RECIPROCAL))


@formula(aten.elu.default)
def elu(x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    negative = (x if input_scale == 1 else x * input_scale).apply(Op.EXPM1)
    factor = alpha * scale
    return (x > 0.0).where(x if scale == 1 else x * scale, negative if factor == 1 else negative * factor)


@formula(aten.xlogy.Tensor)
def xlogy(x: Value, y: Value) -> Value:
    """``x * log(y)``, 0 where x is, NaN where y is; PyTorch's decomposition rounds halves in between."""
    zero = x.apply(Op.EQ, 0.0, dtype=DType.BOOL)
    return y.apply(Op.ISNAN, dtype=DType.BOOL).where(y, zero.where(0.0, x * y.apply(Op.LOG)))


@formula(aten.leaky_relu.default)
def leaky_relu(x: Value, negative_slope: float = 0.01) -> Value:
    return (x > 0.0).where(x, x * negative_slope)


@formula(aten._prelu_kernel.default)
def prelu(x: Value, weight: Value) -> Value:
    return (x > 0.0).where(x, weight * x)


@formula(aten.hardsigmoid.default)
def hardsigmoid(x: Value) -> Value:
    return _sixth((x + 3.0).clamp(0.0, 6.0))


@formula(aten.hardswish.default)
def hardswish(x: Value) -> Value:
    return _sixth(x * (x + 3.0).clamp(0.0, 6.0))


def _sixth(x: Value) -> Value:
    """`x` / 6 as ATen computes it: on CUDA the product with a sixth that is rounded to float32, for float64, too."""
    return x * FLOAT32_SIXTH if x.context.cuda else x / 6.0


@formula(aten.hardshrink.default, jumps_in=ALL)
def hardshrink(x: Value, bound: float = 0.5) -> Value:
    return (x.apply(Op.ABS) <= bound).where(0.0, x)


@formula(aten.softshrink.default)
def softshrink(x: Value, bound: float = 0.5) -> Value:
    return (x.apply(Op.ABS) <= bound).where(x * 0.0, (x > 0.0).where(x - bound, x + bound))


@formula(aten.softshrink_backward.default, aten.hardshrink_backward.default, jumps_in=(1,))
def shrink_backward(gradient: Value, x: Value, bound: float) -> Value:
    return (x.apply(Op.ABS) <= bound).where(0.0, gradient)


@formula(aten.angle.default, jumps_in=ALL)
def angle(x: Value) -> Value:
    """Of a real number: pi where it is negative, NaN where it is NaN."""
    zero = x.apply(Op.ABS).apply(Op.MINIMUM, 0.0)  # or NaN
    return (x < 0.0).where(pi, zero)


@formula(aten.threshold.default, jumps_in=(0,))
def threshold(x: Value, bound: float, value: float) -> Value:
    """On CUDA the bound is rounded to the type of `x`."""
    return (x <= x.number(bound, exact=not x.context.cuda)).where(value, x)


@formula(aten.lerp.Scalar)
def lerp(start: Value, end: Value, weight: float) -> Value:
    if weight < 0.5:
        return start + weight * (end - start)
    return end - (end - start) * (1.0 - weight)


@lowers(aten.glu.default)
def _glu(call: Call, a: Tensor, dim: int = -1) -> Tensor:
    axis, half = dim % len(a.shape), call.value.shape

    def part(start: int) -> Value:
        moved = call.context.tensor(
            half, a.dtype, lambda c: a.at((*c[:axis], c[axis] + start, *c[axis + 1 :])), windowed=a.windowed
        )
        return Value(call.context, moved)

    return (part(0) * part(half[axis]).apply(Op.SIGMOID)).tensor


@lowers(aten.nan_to_num.default, jumps_in=ALL)
def _nan_to_num(
    call: Call, a: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    if not a.dtype.is_float:
        return a
    limits = torch.finfo(TORCH[a.dtype])
    x = Value(call.context, a)
    x = x.apply(Op.NE, x, dtype=DType.BOOL).where(0.0 if nan is None else nan, x)
    x = x.apply(Op.EQ, inf, dtype=DType.BOOL).where(limits.max if posinf is None else posinf, x)
    return x.apply(Op.EQ, -inf, dtype=DType.BOOL).where(limits.min if neginf is None else neginf, x).tensor


@lowers(aten.log_sigmoid_forward.default)
def _log_sigmoid(call: Call, a: Tensor) -> tuple[Tensor, None]:
    (wide,), _ = promote(call, (a,), KIND.INT_TO_FLOAT)
    x = Value(call.context, wide)
    result = x.apply(Op.MINIMUM, 0.0) - log1p(exp(-x.apply(Op.ABS)))
    return call.context.cast(result.tensor, dtype_of(call.value.dtype)), None


@lowers(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(call: Call, a: Any, b: Any, alpha: float = 1) -> Tensor:
    (left, right), result = promote(call, (a, b), KIND.DEFAULT)
    subtracted = Value(call.context, left)
    value = Value(call.context, right) - (subtracted if alpha == 1 else subtracted * alpha)
    return call.context.cast(value.tensor, result)


@lowers(aten.addcmul.default, aten.addcdiv.default)
def _add_product(call: Call, a: Tensor, b: Tensor, c: Tensor, *, value: float = 1) -> Tensor:
    kind = KIND.DEFAULT if call.origin == "addcmul" else KIND.INT_TO_FLOAT
    converted, result = promote(call, (a, b, c), kind)
    x, y, z = (Value(call.context, tensor) for tensor in converted)
    scaled = y if value == 1 else value * y
    return call.context.cast((x + (scaled * z if call.origin == "addcmul" else scaled / z)).tensor, result)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(call: Call, a: Tensor, mask: Tensor, value: Any) -> Tensor:
    chosen = as_tensor(call.context, value, a.dtype)
    return call.context.pointwise(Op.WHERE, (call.context.cast(mask, DType.BOOL), chosen, a), a.dtype)
