"""Rows of one element are no rows: what is reduced over them is found without a reduction, by a pointwise kernel, which loads whole vectors."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, ReductionResult
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.fuse import is_plain
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.splitter import as_piece


def columns_of_one(program: Program, builder: Builder) -> Program:
    """`program` with pointwise kernels in the place of those that reduce rows of one element."""
    return replace(program, kernels=tuple(_without_columns(kernel, builder) for kernel in program.kernels))


def _without_columns(kernel: Kernel, builder: Builder) -> Kernel:
    if not kernel.reduction_loops or kernel.col_count != 1 or not is_plain(kernel) or kernel.scans:
        return kernel
    found: dict[tuple[str, int], Expr] = {}

    def leaf(node: Expr) -> Expr | None:
        return found.get((node.reduction, node.part)) if isinstance(node, ReductionResult) else None

    for reduction in kernel.reductions:
        values = (builder.rewrite(value, leaf=leaf) for value in reduction.values)
        if not reduction.op.finds_place:
            values = (builder.cast(value, reduction.dtype) for value in values)
        parts = as_piece(replace(reduction, values=tuple(values)), builder)[-reduction.op.parts :]
        for number, part in enumerate(parts):
            found[reduction.name, number] = builder.cast(part, reduction.type_of(number))
    pointwise = rewrite_kernel(replace(kernel, reduction_loops=()), builder, leaf=leaf)
    return replace(pointwise, cols=(), row_stores=(), stores=(*pointwise.stores, *pointwise.row_stores))
