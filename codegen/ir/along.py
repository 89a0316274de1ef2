"""What a convolution's kernel may reduce along the last axis of its result: rows that the warps of some kernels have laid out whole."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Expr, ReductionResult, descend, indices_in
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel


def reduced_along(kernel: Kernel, axes: Sequence[Axis]) -> Expr | None:
    """What `kernel`, whose anchor's result has the dimensions `axes`, reduces along the last one; None where that has no form here.

    It reduces once, float32 numbers of one value. That, like a result itself, is made of numbers of a sample and a channel alone, as
    the threads that reduce a row do not have its neighbours' places; and nothing else is made of results.
    """
    if len(kernel.reduction_loops) != 1 or kernel.anchor is None:
        return None
    (reduction_loop,) = kernel.reduction_loops
    value = reduction_loop[0].values[0]
    if (
        any(each.values != (value,) or each.dtype is not DType.F32 for each in reduction_loop)
        or value.dtype is not DType.F32
    ):
        return None
    near = set(axes[:2])
    if any(not index.axes <= near for index in indices_in(value)):
        return None
    stored = [store.value for store in (*kernel.row_stores, *kernel.stores)]
    return None if _needs_besides(stored, value, kernel.anchor.name) else value


def _needs_besides(roots: Sequence[Expr], value: Expr, anchor: str) -> bool:
    """Whether `roots` take the results of `anchor` but through `value`."""
    return any(
        isinstance(node, ReductionResult) and node.reduction == anchor for node in descend(roots, but={id(value)})
    )
