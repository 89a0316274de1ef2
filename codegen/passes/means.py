"""The sum of what is affine in a value, from the value's mean: ``sum(f(x)) = n f(mean(x))``.

What a normalisation gives is affine in its input wherever its statistics and parameters are the same, so its mean needs no
second reading. The formula is computed as it stands, with the mean in the value's place: what the normalisation
subtracts is subtracted from the mean. Both are rounded, as the statistics are in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Builder, Const, Expr, Load, Op, ReduceOp, ReductionResult, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Reduction
from fusepass.codegen.passes.axes import count
from fusepass.codegen.passes.rewrite import rewrite_kernel

_KEEPING_NAN = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.NEG, Op.SQRT, Op.RSQRT, Op.RECIPROCAL)


def sums_from_means(
    kernel: Kernel, builder: Builder, is_value: Callable[[Expr], bool], is_statistic: Callable[[Expr], bool]
) -> Kernel | None:
    """`kernel` with the moments of a value in place of the sums of its first reduction loop; None where that cannot be.

    Each of these must be of something affine in the value, by coefficients that are the same in a row, and NaN where a
    statistic is. Statistics are NaN wherever a value of their row is not finite; so is the mean of its moments.
    """
    first, *later = kernel.reduction_loops
    values = {id(node): node for each in first for node in walk(*each.values) if is_value(node)}
    if len(values) != 1 or any(each.op is not ReduceOp.SUM or each.dtype is not DType.F32 for each in first):
        return None
    (value,) = values.values()
    rows = frozenset(kernel.rows)
    for each in first:
        if _degree(each.values[0], value, rows) != 1 or not keeps_nan(each.values[0], is_statistic):
            return None
    moments = Reduction(f"{first[0].name}_moments", ReduceOp.MOMENTS, (value,), DType.F32)
    mean, terms = builder.reduction_result(moments.name, 0, DType.F32), builder.const(count(kernel.cols), DType.F32)
    totals = {
        each.name: builder.apply(
            Op.MUL, builder.rewrite(each.values[0], leaf=lambda node: mean if node is value else None), terms
        )
        for each in first
    }

    def total(node: Expr) -> Expr | None:
        return totals.get(node.reduction) if isinstance(node, ReductionResult) else None

    rest = rewrite_kernel(replace(kernel, reduction_loops=tuple(later)), builder, leaf=total)
    return replace(rest, reduction_loops=((moments,), *rest.reduction_loops))


def keeps_nan(root: Expr, is_source: Callable[[Expr], bool]) -> bool:
    """Whether `root` is surely NaN where a source that it is made of is."""
    if is_source(root):
        return True
    return isinstance(root, Apply) and root.op in _KEEPING_NAN and any(keeps_nan(arg, is_source) for arg in root.args)


def _degree(root: Expr, value: Expr, rows: frozenset[Axis]) -> int | None:
    """1 where `root` is affine in `value`, 0 where it is the same in a row; None where it is neither, or that is not seen."""
    found: dict[int, int | None] = {}
    for node in walk(root):
        match node:
            case _ if node is value:
                degree: int | None = 1
            case Const():
                degree = 0
            case Load(index=index):
                degree = 0 if index.axes <= rows else None
            case Apply(op=op, args=args, dtype=DType.F32):
                degree = _applied(op, [found[id(arg)] for arg in args], args)
            case _:
                degree = None
        found[id(node)] = degree
    return found[id(root)]


def _applied(op: Op, degrees: list[int | None], args: tuple[Expr, ...]) -> int | None:
    known = [degree for degree in degrees if degree is not None]
    if len(known) < len(degrees):
        return None
    if not any(known):
        return 0
    if any(arg.dtype is not DType.F32 for arg in args):
        return None
    match op:
        case Op.ADD | Op.SUB | Op.NEG:
            return 1
        case Op.MUL:
            return 1 if sum(known) == 1 else None
        case Op.DIV:
            return 1 if known == [1, 0] else None
        case _:
            return None
