"""Sums over what pairs of tensors give for each other: bilinear forms, distances."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusepass.codegen.ir.expr import Op, ReduceOp
from fusepass.codegen.lowering.reductions import norm, simple
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Tensor, Unsupported

aten = torch.ops.aten

_BY_PRODUCT = 25
"""From more vectors than that on each side on, PyTorch takes Euclidean distances from a matrix product."""


def _unsqueezed(call: Call, a: Tensor, dims: Sequence[int]) -> Tensor:
    shape = list(a.shape)
    for dim in sorted(dims):
        shape.insert(dim, 1)
    return call.context.reshape(a, shape)


@lowers(aten._trilinear.default)
def _trilinear(
    call: Call, a: Tensor, b: Tensor, c: Tensor, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """The sum over `sumdim` of the products of all three, whose missing dimensions are named."""
    context, dtype = call.context, a.dtype
    wide = [_unsqueezed(call, t, dims) for t, dims in ((a, expand1), (b, expand2), (c, expand3))]
    product = context.pointwise(Op.MUL, (context.pointwise(Op.MUL, (wide[0], wide[2]), dtype), wide[1]), dtype)
    return simple(call, ReduceOp.SUM, product, tuple(sumdim), call.value.shape, dtype)


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
