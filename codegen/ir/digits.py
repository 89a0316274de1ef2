"""Which values of a kernel need few digits: those of which nothing is made but numbers that are rounded to 16 bits.

Such a rounding is an error of 2^-12 (float16) or 2^-9 (bfloat16). A value that comes to it by products, quotients, choices and
extremes alone, or as a term of a sum of numbers of one sign, keeps the relative error that it has. So there an exponential may be off by
2^-17, which takes 2 instructions of a GPU instead of 8, and what is made of exponentials by 2^-14. Before a difference, a logarithm or a
comparison it may not, but for log(1 + x) of positive numbers, which makes no relative error larger. Nor where something decides by the
rounded number itself: next to the middle between two halves, the last digit says which of them it is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Const, Expr, Masked, Op, ReduceOp, ReductionResult, children, walk
from fusepass.codegen.ir.ops import STEPS
from fusepass.codegen.ir.program import Kernel, Program, Reduction

_NARROW = (DType.F16, DType.BF16)
_KEEPING = frozenset(
    {Op.MUL, Op.TERM, Op.DIV, Op.NEG, Op.ABS, Op.RECIPROCAL, Op.SQRT, Op.RSQRT, Op.MAXIMUM, Op.MINIMUM}
)  # the relative error of an operand
_POSITIVE = frozenset({Op.EXP, Op.EXP2, Op.SIGMOID, Op.NORMAL_CDF, Op.ABS, Op.SQRT, Op.RSQRT})
_UP, _DOWN = 1, -1  # never below 0, never above
_Side = frozenset[int]


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
        self._decided: set[int] = set()  # nodes, and names of reductions, by which something decides
        self._decided_stats: set[str] = set()
        stores = (*kernel.row_stores, *kernel.stores)
        self._exact |= {id(store.value) for store in stores if program.buffer(store.buffer).dtype not in _NARROW}
        self._exact |= {id(value) for value in kernel.partials.values} if kernel.partials is not None else set()
        self._sides: dict[int, _Side] = {}
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
        self._decide(node)
        if isinstance(node, ReductionResult):
            if id(node) in self._exact:
                self._exact_stats.add((node.reduction, node.part))
            return
        decided = id(node) in self._decided
        if isinstance(node, Apply) and node.op is Op.CAST and node.dtype in _NARROW and not decided:
            return
        if decided or id(node) in self._exact or not self._passes_on(node):
            self._exact |= {id(child) for child in children(node)}
        elif isinstance(node, Apply) and node.op is Op.WHERE:
            self._exact.add(id(node.args[0]))

    def _decide(self, node: Expr) -> None:
        """Note what is decided by in `node`, and below what is itself."""
        reduced = self._reduced[id(node)]
        if any(each.op.finds_place or each.name in self._decided_stats for each in reduced):
            self._decided.add(id(node))
        if isinstance(node, ReductionResult) and id(node) in self._decided:
            self._decided_stats.add(node.reduction)
        jumps = isinstance(node, Apply) and (node.op in STEPS or node.dtype is DType.BOOL or node.dtype.is_int)
        if jumps or id(node) in self._decided:
            self._decided |= {id(child) for child in children(node)}

    def _passes_on(self, node: Expr) -> bool:
        """Whether the relative error of `node` is no larger than those of the values that it is made of."""
        if isinstance(node, Masked):
            return True
        if not isinstance(node, Apply):
            return False
        match node.op:
            case Op.CAST:
                return node.dtype.is_float
            case Op.ADD:
                return bool(self._side(node.args[0]) & self._side(node.args[1]))
            case Op.SUB:
                return bool(self._side(node.args[0]) & _opposite(self._side(node.args[1])))
            case Op.LOG1P:
                return _UP in self._side(node.args[0])
            case _:
                return node.op in _KEEPING or node.op is Op.WHERE

    def _side(self, node: Expr) -> _Side:
        """On which side of 0 all that `node` may be lies; empty where that is not known."""
        if id(node) not in self._sides:
            self._sides[id(node)] = self._side_of(node)
        return self._sides[id(node)]

    def _side_of(self, node: Expr) -> _Side:
        if isinstance(node, Const):
            return frozenset(side for side, there in ((_UP, node.value >= 0), (_DOWN, node.value <= 0)) if there)
        if not isinstance(node, Apply):
            return frozenset()
        if node.op in _POSITIVE:
            return frozenset({_UP})
        sides = [self._side(arg) for arg in node.args]
        match node.op:
            case Op.CAST | Op.RECIPROCAL | Op.LOG1P:
                return sides[0]
            case Op.NEG:
                return _opposite(sides[0])
            case Op.MUL | Op.TERM | Op.DIV:
                return frozenset(a * b for a in sides[0] for b in sides[1])
            case Op.ADD:
                return sides[0] & sides[1]
            case Op.MAXIMUM:
                return (sides[0] & sides[1]) | ({_UP} & (sides[0] | sides[1]))
            case Op.MINIMUM:
                return (sides[0] & sides[1]) | ({_DOWN} & (sides[0] | sides[1]))
            case _:
                return frozenset()

    def _keeps(self, reduction: Reduction, value: Expr) -> bool:
        """Whether the result of `reduction` is as near as the `value` that it is made of."""
        if reduction.running:
            return False
        return reduction.op is ReduceOp.SUM and bool(self._side(value)) and (reduction.name, 0) not in self._exact_stats


def _opposite(side: _Side) -> _Side:
    return frozenset(-each for each in side)
