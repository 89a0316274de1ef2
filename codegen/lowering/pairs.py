"""What pairs of vectors give for each other: distances."""

from __future__ import annotations

import torch

from fusepass.codegen.ir.expr import Op
from fusepass.codegen.lowering.reductions import norm
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Tensor, Unsupported

aten = torch.ops.aten

_BY_PRODUCT = 25
"""From more vectors than that on each side on, PyTorch takes Euclidean distances from a matrix product."""


@lowers(aten._cdist_forward.default)
def _cdist(call: Call, a: Tensor, b: Tensor, p: float, compute_mode: int | None) -> Tensor:
    many = max(a.shape[-2], b.shape[-2]) > _BY_PRODUCT
    if p == 2 and (compute_mode == 1 or (not compute_mode and many)):
        raise Unsupported("distances from a matrix product")
    if p == 0:
        raise Unsupported("a count of differences")
    left = call.context.reshape(a, (*a.shape[:-1], 1, a.shape[-1]))
    right = call.context.reshape(b, (*b.shape[:-2], 1, *b.shape[-2:]))
    difference = call.context.pointwise(Op.SUB, (left, right), a.dtype)
    return norm(call, difference, float(p), (-1,), call.value.shape, a.dtype)
