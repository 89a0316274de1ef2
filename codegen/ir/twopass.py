"""Splits one-pass statistics into two plain reduction loops, for rows that stay on the chip between reduction loops.

`MOMENTS` (Welford) and `SOFTMAX` (online) pay for reading memory once with divisions and exponentials. Where a row is
kept in registers or shared memory, a sum and then sums of differences and of their squares, or a maximum and then a sum
of exponentials, are cheaper and more accurate.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp, ReductionResult
from fusepass.codegen.ir.program import Kernel, Reduction
from fusepass.codegen.ir.vectors import map_values

_SPLIT = (ReduceOp.MOMENTS, ReduceOp.SOFTMAX)


def split_statistics(kernel: Kernel, builder: Builder) -> Kernel:
    """`kernel` with each `MOMENTS` and `SOFTMAX` reduction, but a running one, made two reduction loops of `SUM` and `MAX`."""
    replaced: dict[tuple[str, int], Expr] = {}

    def leaf(node: Expr) -> Expr | None:
        return replaced.get((node.reduction, node.part)) if isinstance(node, ReductionResult) else None

    reduction_loops: list[tuple[Reduction, ...]] = []
    for reduction_loop in kernel.reduction_loops:
        reduction_loop = tuple(
            replace(reduction, values=tuple(builder.rewrite(value, leaf=leaf) for value in reduction.values))
            for reduction in reduction_loop
        )
        first: list[Reduction] = []
        second: list[Reduction] = []
        for reduction in reduction_loop:
            if reduction.op not in _SPLIT or reduction.running:
                first.append(reduction)
                continue
            split = _split_moments if reduction.op is ReduceOp.MOMENTS else _split_softmax
            before, after, parts = split(reduction, kernel.col_count, builder)
            first += before
            second += after
            replaced |= {(reduction.name, number): part for number, part in enumerate(parts)}
        reduction_loops += [tuple(reductions) for reductions in (first, second) if reductions]
    stores = map_values(replace(kernel, reduction_loops=()), builder.rewriting(leaf=leaf), lambda i: i)
    return replace(stores, reduction_loops=tuple(reduction_loops))


_Split: TypeAlias = tuple[
    tuple[Reduction, ...], tuple[Reduction, ...], tuple[Expr, Expr]
]  # reduction loops, and the parts


def _split_moments(moments: Reduction, count: int, builder: Builder) -> _Split:
    """The corrected two-pass algorithm of Chan, Golub and LeVeque, 1983.

    The mean is one rounding off, which a normalisation magnifies where numbers are (nearly) equal. What the second
    reduction loop finds the differences to sum to corrects mean and squares.
    """
    dtype = moments.dtype
    value = builder.cast(moments.values[0], dtype)
    total = Reduction(f"{moments.name}_sum", ReduceOp.SUM, (value,), dtype)
    mean = builder.apply(Op.DIV, builder.reduction_result(total.name, 0, dtype), builder.const(count, dtype))
    difference = builder.apply(Op.SUB, value, mean)
    square = builder.apply(Op.MUL, difference, difference)
    off = Reduction(f"{moments.name}_off", ReduceOp.SUM, (difference,), dtype)
    m2 = Reduction(f"{moments.name}_m2", ReduceOp.SUM, (square,), dtype)
    rest = builder.reduction_result(off.name, 0, dtype)
    shift = builder.apply(Op.DIV, rest, builder.const(count, dtype))
    squares = builder.apply(Op.SUB, builder.reduction_result(m2.name, 0, dtype), builder.apply(Op.MUL, rest, shift))
    zero = builder.const(0.0, dtype)
    return (total,), (off, m2), (builder.apply(Op.ADD, mean, shift), builder.apply(Op.MAXIMUM, squares, zero))


def _split_softmax(softmax: Reduction, _: int, builder: Builder) -> _Split:
    dtype = softmax.dtype
    value = builder.cast(softmax.values[0], dtype)
    largest = Reduction(f"{softmax.name}_max", ReduceOp.MAX, (value,), dtype)
    top = builder.reduction_result(largest.name, 0, dtype)
    power = builder.apply(Op.EXP, builder.apply(Op.SUB, value, top))
    total = Reduction(f"{softmax.name}_total", ReduceOp.SUM, (power,), dtype)
    empty = builder.apply(Op.EQ, top, builder.const(-math.inf, dtype), dtype=DType.BOOL)
    # A row of -inf only has total 0, as the one-pass state has it.
    zero = builder.const(0.0, dtype)
    return (
        (largest,),
        (total,),
        (top, builder.apply(Op.WHERE, empty, zero, builder.reduction_result(total.name, 0, dtype))),
    )
