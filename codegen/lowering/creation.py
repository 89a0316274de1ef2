"""Tensors made from numbers alone: constants and ranges, which kernels compute where they are used."""

from __future__ import annotations

from typing import Any

import torch

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op
from fusepass.codegen.ir.index import Index
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Coordinates, Tensor, Unsupported, dtype_of

aten, prims = torch.ops.aten, torch.ops.prims


@lowers(
    aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.zeros_like.default,
    aten.ones_like.default, aten.zeros.default, aten.ones.default, prims.scalar_tensor.default,
    aten.empty.memory_format, aten.empty_like.default, aten.empty_permuted.default, aten.empty_strided.default,
)  # fmt: skip
def _full(call: Call, *args: Any, **unused: Any) -> Tensor:
    value: Any = {"zeros_like": 0, "zeros": 0, "ones_like": 1, "ones": 1}.get(call.origin)
    if call.origin.startswith("empty"):
        value = 0  # any value will do, so one that costs nothing
    if value is None:
        value = args[0] if call.origin == "scalar_tensor" else args[1]
    if isinstance(value, Tensor):
        raise Unsupported("a fill value that is a tensor")
    return call.context.constant(value, call.value.shape, dtype_of(call.value.dtype))


@lowers(prims.iota.default)
def _iota(call: Call, length: int, *, start: int, step: int, dtype: torch.dtype, **unused: Any) -> Tensor:
    target = dtype_of(call.value.dtype)
    builder = call.context.builder
    return call.context.tensor(
        (length,), target, lambda c: builder.cast(_counted(builder, c[0], start, step), target.compute)
    )


def _counted(builder: Builder, place: Index, start: int, step: int) -> Expr:
    """``start + step * place`` as an int64, which may be beyond what indices are."""
    value = builder.position(place)
    for op, number, nothing in ((Op.MUL, step, 1), (Op.ADD, start, 0)):
        if number != nothing:
            value = builder.apply(op, value, builder.const(number, DType.I64), dtype=DType.I64)
    return value


@lowers(aten.eye.default, aten.eye.m)
def _eye(call: Call, *sizes: int, **unused: Any) -> Tensor:
    builder, target = call.context.builder, dtype_of(call.value.dtype)

    def at(c: Coordinates) -> Expr:
        row, column = map(builder.position, c)
        return builder.cast(builder.apply(Op.EQ, row, column, dtype=DType.BOOL), target.compute)

    return call.context.tensor(call.value.shape, target, at)


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(call: Call, *ends: float, **unused: Any) -> Tensor:
    """Whole numbers exactly; others in float64, rounded once."""
    context, builder, target = call.context, call.context.builder, dtype_of(call.value.dtype)
    start = ends[0] if len(ends) > 1 else 0
    step = ends[2] if len(ends) > 2 else 1
    if float(start).is_integer() and float(step).is_integer():
        first, by = int(start), int(step)
        return context.tensor(
            call.value.shape, target, lambda c: builder.cast(_counted(builder, c[0], first, by), target.compute)
        )
    if not target.is_float:
        raise Unsupported("integers from a range with fractions")

    def at(c: Coordinates) -> Expr:
        count = builder.cast(builder.position(c[0]), DType.F64)
        moved = builder.apply(Op.MUL, count, builder.const(step, DType.F64))
        return builder.cast(builder.apply(Op.ADD, moved, builder.const(start, DType.F64)), target.compute)

    return context.tensor(call.value.shape, target, at)


@lowers(aten.linspace.default)
def _linspace(call: Call, start: float, end: float, steps: int, **unused: Any) -> Tensor:
    """From both ends towards the middle as PyTorch's kernels, which round each number once."""
    context, builder, dtype = call.context, call.context.builder, dtype_of(call.value.dtype)
    if dtype not in (DType.F32, DType.F64):
        raise Unsupported("steps of a type of few digits, or of whole numbers")
    first, last = (torch.tensor(each, dtype=call.value.dtype) for each in (start, end))
    step = builder.const(float((last - first) / max(steps - 1, 1)), dtype)

    def away(edge: torch.Tensor, count: Index) -> Expr:
        term = builder.apply(Op.TERM, builder.cast(builder.position(count), dtype), step)
        return builder.apply(Op.ADD, builder.const(float(edge), dtype), term)

    def at(c: Coordinates) -> Expr:
        near = builder.apply(
            Op.LT, builder.position(c[0]), builder.const(max(steps // 2, 1), DType.I64), dtype=DType.BOOL
        )
        return builder.apply(Op.WHERE, near, away(first, c[0]), away(last, c[0] + (1 - steps)))

    return context.tensor(call.value.shape, dtype, at)
