"""Exponentials of which nothing is made but their shares of their sum: a softmax of which few digits are needed.

A share `exp(x - top) / sum(exp(x - top))` is the same whatever is subtracted, as long as it is the same for all of a row. So what is
subtracted is rounded behind the factor that makes a power of two of an exponential, `2^(x log2(e) - round(top log2(e)))`: one instruction
for factor and difference, and the error of the rounding, which is large where `top` is, cancels. The quotient becomes a product with the
reciprocal of the sum.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusepass.codegen.ir.digits import few_digits
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Builder, Const, Expr, Op, ReduceOp, ReductionResult
from fusepass.codegen.ir.program import Kernel, Program, Reduction
from fusepass.codegen.ir.vectors import map_values

# From here on the error might be a factor beyond float32's range, and what is not equal lies 128 apart: as powers of two or of e, that is 0.
_LARGE = 2.0**30


def shares_of_sums(kernel: Kernel, program: Program, builder: Builder) -> Kernel:
    """`kernel` of `program`, its statistics split, with powers of two where exponentials need few digits and become shares."""
    for reduction in kernel.reductions:
        kernel = _with_shares(kernel, reduction, program, builder)
    return kernel


def _with_shares(kernel: Kernel, total: Reduction, program: Program, builder: Builder) -> Kernel:
    """`kernel` with the shares of one sum; as it is, where this is none of exponentials or something else is made of them."""
    found = _below_top(total)
    if found is None or id(total.values[0]) not in few_digits(kernel, program).nodes:
        return kernel
    value, top = (builder.rewrite(part) for part in found)
    base, one = builder.const(math.log2(math.e), DType.F32), builder.const(1.0, DType.F32)
    usual = builder.apply(Op.LT, builder.apply(Op.ABS, top), builder.const(_LARGE, DType.F32), dtype=DType.BOOL)
    factor = builder.apply(Op.WHERE, usual, base, one)
    difference = builder.apply(Op.SUB, builder.apply(Op.MUL, value, factor), builder.apply(Op.MUL, top, factor))
    power = builder.apply(Op.EXP2, difference)
    sum_of_powers = replace(total, name=f"{total.name}_of_powers", values=(power,))
    inverse = builder.apply(Op.RECIPROCAL, builder.reduction_result(sum_of_powers.name, 0, DType.F32))
    share = builder.apply(Op.MUL, power, inverse)
    exponential = builder.rewrite(total.values[0])

    def leaf(node: Expr) -> Expr | None:
        if not (isinstance(node, Apply) and node.op is Op.DIV and node.args[0] is exponential):
            return None
        return share if _is_total(node.args[1], total.name, top) else None

    changed = map_values(kernel, builder.rewriting(leaf=leaf), lambda index: index)
    swept = tuple(
        tuple(sum_of_powers if r.name == total.name else r for r in reduction_loop)
        for reduction_loop in changed.reduction_loops
    )
    changed = replace(changed, reduction_loops=swept)
    left = any(
        n is exponential or (isinstance(n, ReductionResult) and n.reduction == total.name) for n in changed.nodes
    )
    return kernel if left else changed


def _below_top(total: Reduction) -> tuple[Expr, Expr] | None:
    """A value and what is the same for its row, where `total` is the sum of exponentials of their difference."""
    match total:
        case Reduction(
            op=ReduceOp.SUM, dtype=DType.F32, values=(Apply(op=Op.EXP, args=(Apply(op=Op.SUB, args=args),)),)
        ):
            value, top = args
            return (value, top) if isinstance(top, ReductionResult) else None
    return None


def _is_total(divisor: Expr, name: str, top: Expr) -> bool:
    """Whether `divisor` is the sum called `name`, or that but for rows without a number above -inf, which are NaN either way."""
    match divisor:
        case Apply(
            op=Op.WHERE,
            args=(Apply(op=Op.EQ, args=(compared, Const(value=bound))), Const(value=0.0), ReductionResult() as own),
        ):
            return own.reduction == name and compared is top and bound == -math.inf
        case ReductionResult(reduction=found):
            return found == name
    return False
