"""Rows shorter than an access, one after another in memory, that are only reduced: windows of a pointwise kernel.

A thread then has several neighbouring rows and loads them in whole accesses. With a row for each thread, a warp would load single elements
some apart, and as many fewer bytes at once.
"""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, Gather, Stat, Window
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.fuse import is_plain
from fusepass.codegen.passes.rewrite import rewrite_kernel


def windows_of_short_rows(program: Program, builder: Builder, access: int) -> Program:
    """Make every kernel that only reduces rows of fewer bytes than an `access` has pointwise."""
    kernels = (_pointwise(kernel, builder) if _is_short(kernel, access) else kernel for kernel in program.kernels)
    return replace(program, kernels=tuple(kernels))


def _is_short(kernel: Kernel, access: int) -> bool:
    if not is_plain(kernel) or len(kernel.sweeps) != 1 or len(kernel.cols) != 1 or kernel.stores or not kernel.rows:
        return False
    (col,), row = kernel.cols, kernel.rows[-1]
    simple = all(each.op.arity == each.op.parts == 1 and not each.running for each in kernel.reductions)
    if col.size < 2 or not simple or any(isinstance(node, Gather | Window) for node in kernel.nodes):
        return False
    along = [load for load in kernel.loads() if load.index.stride(col) == 1 and load.index.stride(row) == col.size]
    return bool(along) and all(col.size * load.dtype.nbytes < access for load in along)


def _pointwise(kernel: Kernel, builder: Builder) -> Kernel:
    found = {
        each.name: builder.window(each.op, kernel.cols, builder.cast(each.values[0], each.dtype))
        for each in kernel.reductions
    }

    def leaf(node: Expr) -> Expr | None:
        return found[node.reduction] if isinstance(node, Stat) else None

    ends = rewrite_kernel(replace(kernel, sweeps=()), builder, leaf=leaf)
    return replace(ends, cols=(), row_stores=(), stores=ends.row_stores)
