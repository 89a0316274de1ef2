"""What the values of a kernel depend on, and which of them a later phase uses again.

The *phases* of a kernel are its reduction loops in order, then what it stores, or leaves of reductions over positions, per element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fusepass.codegen.ir.expr import (
    Apply,
    Const,
    Expr,
    Gather,
    Load,
    Op,
    Position,
    Prefix,
    ReductionResult,
    Window,
    children,
    descend,
    evaluated,
    own_indices,
    walk,
)
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel

Need = Axis | ReductionResult | Prefix

_WORD = 4  # bytes of a register
_SIMPLE = frozenset({
    Op.CAST, Op.ADD, Op.SUB, Op.MUL, Op.TERM, Op.NEG, Op.ABS, Op.MAXIMUM, Op.MINIMUM,
    Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE, Op.WHERE,
})  # fmt: skip
"""Of an instruction or two."""


class Dataflow:
    """Answers questions about expressions, each node analysed once."""

    def __init__(self) -> None:
        self._needs: dict[int, frozenset[Need]] = {}
        self._loads: dict[int, bool] = {}
        self._roots: list[Expr] = []  # the tables are keyed by identity

    def needs(self, root: Expr) -> frozenset[Need]:
        """The axes and reduction results that `root` depends on."""
        self._analyse(root)
        return self._needs[id(root)]

    def safe(self, root: Expr) -> bool:
        """Whether `root` may be computed where its value is not wanted: it loads nothing."""
        self._analyse(root)
        return not self._loads[id(root)]

    def _analyse(self, root: Expr) -> None:
        if id(root) in self._needs:
            return
        self._roots.append(root)
        for node in walk(root):
            below = children(node)
            needs = frozenset[Need]().union(*(self._needs[id(child)] for child in below))
            needs = needs.union(*(index.axes for index in own_indices(node)))
            if isinstance(node, ReductionResult | Prefix):
                needs |= {node}
            if isinstance(node, Window):
                needs -= frozenset(node.axes)
            self._needs[id(node)] = needs
            self._loads[id(node)] = isinstance(node, Load | Gather) or any(self._loads[id(child)] for child in below)


def phases(kernel: Kernel) -> tuple[tuple[Expr, ...], ...]:
    """The expressions that each phase evaluates per element."""
    reduction_loops = (
        tuple(value for reduction in reduction_loop for value in reduction.values)
        for reduction_loop in kernel.reduction_loops
    )
    partial = kernel.partials.values if kernel.partials is not None else ()
    return (*reduction_loops, (*(store.value for store in kernel.stores), *partial))


@dataclass(frozen=True, eq=False)
class Kept:
    """A value computed in phase `first` that later phases use again, phase `last` the last time."""

    node: Expr
    first: int
    last: int


def kept_values(kernel: Kernel, dataflow: Dataflow, *, stats: bool = True) -> tuple[Kept, ...]:
    """The largest per-column values that more than one phase needs, those that use reductions only if `stats`."""
    born: dict[int, int] = {}
    found: dict[int, tuple[Expr, int]] = {}
    cols = frozenset(kernel.cols)

    def old(node: Expr) -> bool:
        """Whether an earlier phase has computed `node`, and it is worth keeping."""
        needs = dataflow.needs(node)
        if id(node) not in born or isinstance(node, Const | Position) or not needs & cols:
            return False
        return stats or not any(isinstance(need, ReductionResult) for need in needs)

    for number, roots in enumerate(phases(kernel)):
        reached = list(_reached(roots, stop=old))
        found |= {id(node): (node, number) for node in reached if old(node)}
        born |= {id(node): born.get(id(node), number) for node in reached}
    return tuple(Kept(node, born[id(node)], last) for node, last in found.values())


def most_words(kernel: Kernel, dataflow: Dataflow) -> int:
    """Registers for `kept_values` of a column: as many as any phase finds, or leaves to later ones."""
    kept = kept_values(kernel, dataflow)
    ends = range(len(phases(kernel)))
    held = ([value for value in kept if value.first <= end < value.last] for end in ends)
    return max((sum(max(_WORD, value.node.dtype.nbytes) // _WORD for value in each) for each in held), default=0)


def rematerialised(kernel: Kernel, dataflow: Dataflow, kept: Sequence[Kept]) -> int:
    """Operators of a column, but for short ones, that phases compute anew where no more is `kept` than that."""
    known, cols = {id(value.node) for value in kept}, frozenset(kernel.cols)
    times = Counter(
        id(node)
        for roots in phases(kernel)
        for node in _reached(roots, stop=lambda node: id(node) in known)
        if id(node) not in known and dataflow.needs(node) & cols and not _is_short(node)
    )
    return times.total() - len(times)


def kept_in_memory(kernel: Kernel, dataflow: Dataflow) -> tuple[Kept, ...]:
    """As `kept_values` without reductions' results, where room is shorter than arithmetic: what they are made of, if that
    is plain loads which take less room, and simple to compute again. What is the same for all columns is computed once, and may be anything."""
    values = kept_values(kernel, dataflow, stats=False)
    cols, loads = frozenset(kernel.cols), dict[int, Kept]()
    for value in values:
        for node in walk(value.node):
            if isinstance(node, Load) and dataflow.needs(node) & cols:
                known = loads.get(id(node), value)
                loads[id(node)] = Kept(node, min(value.first, known.first), max(value.last, known.last))
            elif not _is_short(node) and dataflow.needs(node) & cols:
                return values
    found = tuple(loads.values())
    return found if _bytes(found) < _bytes(values) else values


def _is_short(node: Expr) -> bool:
    return isinstance(node, Load | Const | Position | ReductionResult) or (
        isinstance(node, Apply) and node.op in _SIMPLE
    )


def _bytes(kept: Sequence[Kept]) -> int:
    return sum(each.node.dtype.nbytes for each in kept)


def _reached(roots: Sequence[Expr], stop: Callable[[Expr], bool]) -> Iterator[Expr]:
    """Nodes that are always evaluated with `roots`, in order of first use, not going below where `stop` holds."""
    return descend(roots, lambda node: () if stop(node) else evaluated(node))


def always_loaded(root: Expr) -> Iterator[Load]:
    """The loads that `root` needs wherever it is evaluated: those outside masks and windows."""
    return (node for node in descend([root], evaluated) if isinstance(node, Load))
