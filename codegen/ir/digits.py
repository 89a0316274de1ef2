"""Which values of a kernel need few digits: those of which nothing is made but numbers that are rounded to 16 bits.

Such a rounding is an error of 2^-12 (float16) or 2^-9 (bfloat16). A value that comes to it by products and quotients alone, or as a
term of a sum of positive numbers, keeps the relative error that it has. So there an exponential may be off by 2^-17, which
takes 2 instructions of a GPU instead of 8, and a hyperbolic tangent by 2^-14. Before a difference, a logarithm or a comparison it may not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Expr, Masked, Op, ReduceOp, Stat, children, walk
from fusepass.codegen.ir.program import Kernel, Program, Reduction

_NARROW = (DType.F16, DType.BF16)
_KEEPING = frozenset(
    {Op.MUL, Op.DIV, Op.NEG, Op.ABS, Op.RECIPROCAL, Op.SQRT, Op.RSQRT}
)  # the relative error of an operand
_POSITIVE = frozenset({Op.EXP, Op.SIGMOID})


@dataclass(frozen=True)
class FewDigits:
    """What of a kernel needs few digits: nodes by identity, and reductions `SOFTMAX` by name, whose sum does."""

    nodes: frozenset[int] = frozenset()
    sums: frozenset[str] = frozenset()


def few_digits(kernel: Kernel, program: Program) -> FewDigits:
    """The nodes of `kernel` in float32 that need few digits."""
    if not any(program.buffer(store.buffer).dtype in _NARROW for store in kernel.stores):
        return FewDigits()
    return _Search(kernel, program).found()


class _Search:
    def __init__(self, kernel: Kernel, program: Program) -> None:
        self._kernel = kernel
        self._exact: set[int] = set()  # nodes with a use that needs all digits
        self._exact_stats: set[tuple[str, int]] = set()
        stores = (*kernel.row_stores, *kernel.stores)
        self._exact |= {id(store.value) for store in stores if program.buffer(store.buffer).dtype not in _NARROW}
        self._reduced = defaultdict[int, list[Reduction]](list)
        for reduction in kernel.reductions:
            for value in reduction.values:
                self._reduced[id(value)].append(reduction)

    def found(self) -> FewDigits:
        nodes = list(walk(*self._kernel.roots))
        for node in reversed(nodes):  # users first; what uses a reduction's result stands behind what is reduced
            self._visit(node)
        few = frozenset(id(node) for node in nodes if node.dtype is DType.F32 and id(node) not in self._exact)
        softmax = (each for each in self._kernel.reductions if each.op is ReduceOp.SOFTMAX and each.dtype is DType.F32)
        return FewDigits(few, frozenset(each.name for each in softmax if (each.name, 1) not in self._exact_stats))

    def _visit(self, node: Expr) -> None:
        if not all(self._keeps(reduction, node) for reduction in self._reduced[id(node)]):
            self._exact.add(id(node))
        if isinstance(node, Stat):
            if id(node) in self._exact:
                self._exact_stats.add((node.reduction, node.part))
            return
        rounds = isinstance(node, Apply) and node.op is Op.CAST and node.dtype in _NARROW
        keeps = isinstance(node, Masked) or (
            isinstance(node, Apply) and (node.op in _KEEPING or (node.op is Op.CAST and node.dtype.is_float))
        )
        if not rounds and (not keeps or id(node) in self._exact):
            self._exact |= {id(child) for child in children(node)}

    def _keeps(self, reduction: Reduction, value: Expr) -> bool:
        """Whether the result of `reduction` is as near as the `value` that it is made of."""
        positive = isinstance(value, Apply) and value.op in _POSITIVE
        return reduction.op is ReduceOp.SUM and positive and (reduction.name, 0) not in self._exact_stats
