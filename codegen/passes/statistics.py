"""Reductions that can share their work: a sum beside the moments of the same values, the two sweeps of a softmax."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.expr import Apply, Builder, Const, Expr, Op, ReduceOp, Stat
from fusepass.codegen.ir.program import Kernel, Program, Reduction
from fusepass.codegen.passes.rewrite import rewrite_kernel


def share_moments(kernel: Kernel, builder: Builder) -> Kernel:
    """Duplicate reductions become one; a sum beside the moments of the same values becomes their mean times the count."""
    for sweep in kernel.sweeps:
        for reduction in sweep:
            twin = _twin(reduction, sweep)
            if twin is not None:
                return share_moments(_replaced(kernel, builder, reduction, twin), builder)
    return kernel


def _twin(reduction: Reduction, sweep: tuple[Reduction, ...]) -> Reduction | None:
    for other in sweep:
        same_values = list(map(id, other.values)) == list(map(id, reduction.values))
        if other is reduction or not same_values or other.dtype is not reduction.dtype:
            continue
        if other.op is reduction.op and sweep.index(other) < sweep.index(reduction):
            return other
        if other.op is ReduceOp.MOMENTS and reduction.op is ReduceOp.SUM:
            return other
    return None


def _replaced(kernel: Kernel, builder: Builder, old: Reduction, twin: Reduction) -> Kernel:
    size = float(kernel.col_count)

    def is_old(node: Expr) -> bool:
        return isinstance(node, Stat) and node.reduction == old.name

    def leaf(node: Expr) -> Expr | None:
        if isinstance(node, Apply) and node.op is Op.DIV and is_old(node.args[0]) and old.op is not twin.op:
            divisor = node.args[1]
            if isinstance(divisor, Const) and divisor.value == size:
                return builder.stat(twin.name, 0, twin.dtype)
        return None

    def rest(node: Expr) -> Expr | None:
        if not is_old(node):
            return None
        assert isinstance(node, Stat)
        stat = builder.stat(twin.name, node.part, twin.dtype)
        return stat if old.op is twin.op else builder.apply(Op.MUL, stat, builder.const(size, twin.dtype))

    without = replace(kernel, sweeps=tuple(tuple(r for r in sweep if r is not old) for sweep in kernel.sweeps))
    return rewrite_kernel(rewrite_kernel(without, builder, leaf=leaf), builder, leaf=rest)


def online_softmax(program: Program, builder: Builder, longest_cached_row: int) -> Program:
    """One sweep instead of two for ``max(x)`` and ``sum(exp(x - max(x)))`` in rows too long to stay on chip.

    The running maximum rescales the running sum (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax").
    """
    kernels = (
        _online(kernel, builder) if kernel.col_count > longest_cached_row else kernel for kernel in program.kernels
    )
    return replace(program, kernels=tuple(kernels))


def _online(kernel: Kernel, builder: Builder) -> Kernel:
    for first, second in zip(kernel.sweeps, kernel.sweeps[1:], strict=False):
        for maximum in first:
            for total in second:
                if _is_softmax(maximum, total):
                    return _online(_joined(kernel, builder, maximum, total), builder)
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
    return x is maximum.values[0] and isinstance(shift, Stat) and shift.reduction == maximum.name


def _joined(kernel: Kernel, builder: Builder, maximum: Reduction, total: Reduction) -> Kernel:
    both = Reduction(maximum.name, ReduceOp.SOFTMAX, maximum.values, maximum.dtype)

    def leaf(node: Expr) -> Expr | None:
        if isinstance(node, Stat) and node.reduction == total.name:
            return builder.stat(both.name, 1, both.dtype)
        return None

    sweeps = (tuple(both if r is maximum else r for r in sweep if r is not total) for sweep in kernel.sweeps)
    joined = replace(kernel, sweeps=tuple(sweep for sweep in sweeps if sweep))
    return rewrite_kernel(joined, builder, leaf=leaf)
