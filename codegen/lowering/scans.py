"""Scans: sums and products of all elements up to each one along a dimension."""

from __future__ import annotations

from typing import Any

import torch

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Tensor, Unsupported, dtype_of

aten = torch.ops.aten


@lowers(aten.cumsum.default)
def _cumsum(call: Call, a: Tensor, dim: int, **unused: Any) -> Tensor:
    return _scan(call, ReduceOp.SUM, a, dim)


@lowers(aten.cumprod.default)
def _cumprod(call: Call, a: Tensor, dim: int, **unused: Any) -> Tensor:
    return _scan(call, ReduceOp.PROD, a, dim)


def _scan(call: Call, op: ReduceOp, a: Tensor, dim: int) -> Tensor:
    """`op` over the elements of `a` up to each one along `dim`; on a CPU eager adds up floats as doubles, too."""
    context, dtype = call.context, dtype_of(call.value.dtype)
    if dtype is DType.BOOL:
        raise Unsupported("a scan whose results are truth values")
    if not a.shape or a.shape[dim] == 1:
        return context.cast(a, dtype)
    accumulate = DType.F64 if dtype is DType.F32 and not context.cuda else dtype.compute
    return context.scan(op, context.cast(a, dtype), dim % len(a.shape), accumulate, call.origin)
