"""Reductions that can share their work: equal ones, the two reduction loops of a softmax."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.expr import Apply, Builder, Expr, Op, ReduceOp, ReductionResult
from fusepass.codegen.ir.program import Kernel, Program, Reduction
from fusepass.codegen.passes.axes import read_and_written_along
from fusepass.codegen.passes.rewrite import rewrite_kernel


def share_reductions(kernel: Kernel, builder: Builder) -> Kernel:
    """Of equal reductions in a reduction loop one remains.

    A sum beside the moments of the same values stays: it is infinite where their mean is NaN.
    """
    for reduction_loop in kernel.reduction_loops:
        first: dict[tuple[object, ...], Reduction] = {}
        for reduction in reduction_loop:
            key = (reduction.op, reduction.dtype, *map(id, reduction.values))
            twin = first.setdefault(key, reduction)
            if twin is not reduction:
                return share_reductions(_without(kernel, builder, reduction, twin), builder)
    return kernel


def _without(kernel: Kernel, builder: Builder, old: Reduction, twin: Reduction) -> Kernel:
    def leaf(node: Expr) -> Expr | None:
        if isinstance(node, ReductionResult) and node.reduction == old.name:
            return builder.reduction_result(twin.name, node.part, twin.type_of(node.part))
        return None

    reduction_loops = tuple(
        tuple(r for r in reduction_loop if r is not old) for reduction_loop in kernel.reduction_loops
    )
    return rewrite_kernel(replace(kernel, reduction_loops=reduction_loops), builder, leaf=leaf)


def online_softmax(program: Program, builder: Builder, longest_cached_row: int, longest_column: int) -> Program:
    """One reduction loop instead of two for ``max(x)`` and ``sum(exp(x - max(x)))`` in rows too long to stay on chip.

    The running maximum rescales the running sum (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"). Rows of which
    nothing is needed per element, and whose columns are not neighbours in memory, stay up to `longest_column` elements.
    """

    def longest(kernel: Kernel) -> int:
        read, _ = read_and_written_along(program, kernel)
        return longest_cached_row if kernel.stores or read not in kernel.rows else longest_column

    kernels = (online(kernel, builder) if kernel.col_count > longest(kernel) else kernel for kernel in program.kernels)
    return replace(program, kernels=tuple(kernels))


def online(kernel: Kernel, builder: Builder) -> Kernel:
    """The same of one kernel."""
    for first, second in zip(kernel.reduction_loops, kernel.reduction_loops[1:], strict=False):
        for maximum in first:
            for total in second:
                if _is_softmax(maximum, total):
                    return online(_joined(kernel, builder, maximum, total), builder)
    return kernel


def _is_softmax(maximum: Reduction, total: Reduction) -> bool:
    if maximum.op is not ReduceOp.MAX or total.op is not ReduceOp.SUM or maximum.dtype is not total.dtype:
        return False
    value = total.values[0]
    if not (isinstance(value, Apply) and value.op is Op.EXP):
        return False
    shifted = value.args[0]
    if not (isinstance(shifted, Apply) and shifted.op is Op.SUB):
        return False
    x, shift = shifted.args
    return x is maximum.values[0] and isinstance(shift, ReductionResult) and shift.reduction == maximum.name


def _joined(kernel: Kernel, builder: Builder, maximum: Reduction, total: Reduction) -> Kernel:
    both = Reduction(maximum.name, ReduceOp.SOFTMAX, maximum.values, maximum.dtype)

    def leaf(node: Expr) -> Expr | None:
        if isinstance(node, ReductionResult) and node.reduction == total.name:
            return builder.reduction_result(both.name, 1, both.dtype)
        return None

    reduction_loops = (
        tuple(both if r is maximum else r for r in reduction_loop if r is not total)
        for reduction_loop in kernel.reduction_loops
    )
    joined = replace(
        kernel, reduction_loops=tuple(reduction_loop for reduction_loop in reduction_loops if reduction_loop)
    )
    return rewrite_kernel(joined, builder, leaf=leaf)
