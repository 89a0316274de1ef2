"""Writes small windows out as plain expressions, so that a compiler can vectorise the loop around them."""

from __future__ import annotations

from itertools import product
from math import prod

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp, Window
from fusepass.codegen.ir.index import Index
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.ir.vectors import map_values

_COMBINE = {
    ReduceOp.SUM: Op.ADD,
    ReduceOp.PROD: Op.MUL,
    ReduceOp.MAX: Op.MAXIMUM,
    ReduceOp.MIN: Op.MINIMUM,
}


def unroll_windows(kernel: Kernel, builder: Builder, most: int) -> Kernel:
    """`kernel` in which every window of at most `most` points is a chain of operations, in the window's order."""

    def leaf(node: Expr) -> Expr | None:
        if not isinstance(node, Window) or not 0 < prod(axis.size for axis in node.axes) <= most:
            return None
        return _chain(node, builder)

    return map_values(kernel, builder.rewriting(leaf=leaf), lambda index: index)


def _chain(window: Window, builder: Builder) -> Expr:
    op = _COMBINE[window.op]
    if window.dtype is DType.BOOL:
        op = Op.OR if window.op is ReduceOp.MAX else Op.AND
    total: Expr | None = None
    for point in product(*(range(axis.size) for axis in window.axes)):
        here = {axis: Index(position) for axis, position in zip(window.axes, point, strict=True)}
        value = builder.rewrite(window.value, here)
        total = value if total is None else builder.apply(op, total, value, dtype=window.dtype)
    assert total is not None
    return total
