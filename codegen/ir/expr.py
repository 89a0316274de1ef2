"""Scalar expressions: what one element of a kernel's result is, as an immutable DAG.

Nodes are compared by identity; `Builder` interns them, so equal expressions built by one builder are one node and
common subexpressions are shared. Everything a kernel computes per element is one of the node classes below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.index import Axis, Bound, Index
from fusepass.codegen.ir.ops import DIVISIONS
from fusepass.codegen.ir.ops import Op as Op
from fusepass.codegen.ir.ops import ReduceOp as ReduceOp
from fusepass.codegen.ir.positions import combined


@dataclass(frozen=True, eq=False)
class Load:
    """The element of `buffer` at `index` (in elements from its first), as stored."""

    buffer: str
    index: Index
    dtype: DType


@dataclass(frozen=True)
class Place:
    """Where along one dimension a `Gather` reads: `value`, an integer, counts in steps of `stride` elements.

    `size` is the dimension's. Where `checked`, the value comes from data and may lie outside ``0 .. size - 1``, which
    the kernel reports; otherwise it is known to lie inside.
    """

    value: Expr
    stride: int
    size: int
    checked: bool

    @property
    def known(self) -> Index | None:
        """The place where that is known beforehand, and lies inside: it needs no looking up."""
        return known_inside(self.value, self.size)


@dataclass(frozen=True, eq=False)
class Gather:
    """The element of `buffer` at `index`, moved along dimensions to computed `places`, as stored."""

    buffer: str
    index: Index
    places: tuple[Place, ...]
    dtype: DType


@dataclass(frozen=True, eq=False)
class Const:
    """A literal; floats may be NaN or infinite."""

    value: float | int | bool
    dtype: DType


@dataclass(frozen=True, eq=False)
class Apply:
    """`op` on `args`; CAST converts its one argument to `dtype`."""

    op: Op
    args: tuple[Expr, ...]
    dtype: DType


@dataclass(frozen=True, eq=False)
class Position:
    """The value of an index as a number."""

    index: Index
    dtype: DType


@dataclass(frozen=True, eq=False)
class Masked:
    """`value` where every bound holds, else `other`; `value` is not evaluated elsewhere, so its loads may be out of range there."""

    mask: tuple[Bound, ...]
    value: Expr
    other: Expr
    dtype: DType


@dataclass(frozen=True, eq=False)
class Window:
    """Sequential reduction of `value` over the small `axes` of a window; `op` has one part."""

    op: ReduceOp
    axes: tuple[Axis, ...]
    value: Expr
    dtype: DType


@dataclass(frozen=True, eq=False)
class ReductionResult:
    """Part number `part` of the kernel's reduction `reduction` for the current row."""

    reduction: str
    part: int
    dtype: DType


@dataclass(frozen=True, eq=False)
class Prefix:
    """Result `part` of the running reduction `reduction` of the kernel, for the current row: over its columns up to and including column
    `index`."""

    reduction: str
    part: int
    index: Index
    dtype: DType


Expr = Load | Gather | Const | Apply | Position | Masked | Window | ReductionResult | Prefix


_LEAVES = frozenset({Load, Const, Position, ReductionResult, Prefix})


def children(expr: Expr) -> tuple[Expr, ...]:
    """Direct subexpressions."""
    if type(expr) in _LEAVES:
        return ()
    match expr:
        case Apply(args=args):
            return args
        case Gather(places=places):
            return tuple(place.value for place in places)
        case Masked(value=value, other=other):
            return (value, other)
        case Window(value=value):
            return (value,)
        case _:
            return ()


def evaluated(node: Expr) -> tuple[Expr, ...]:
    """What a node is made of wherever it is: not what a condition guards, nor the points of a window."""
    match node:
        case Masked(other=other):
            return (other,)
        case Window():
            return ()
        case _:
            return children(node)


def descend(
    roots: Iterable[Expr], below: Callable[[Expr], Sequence[Expr]] = children, but: Container[int] = ()
) -> Iterator[Expr]:
    """Every distinct node from `roots` down, before those that `below` gives for it; nothing `but` what is not there already, by identity."""
    stack, seen = [*roots][::-1], set[int]()
    while stack:
        node = stack.pop()
        if id(node) not in seen and id(node) not in but:
            seen.add(id(node))
            yield node
            stack.extend(reversed(below(node)))


def walk(*roots: Expr, but: Container[int] = ()) -> Iterator[Expr]:
    """Every distinct node below `roots`, operands first; nothing `but` what is not there already, by identity."""
    seen: set[int] = set()
    stack: list[Expr | tuple[Expr]] = list(reversed(roots))
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):  # its operands are through
            yield node[0]
            continue
        identity = id(node)
        if identity in seen or identity in but:
            continue
        seen.add(identity)
        if type(node) not in _LEAVES and (below := children(node)):
            stack.append((node,))
            stack.extend(below[::-1])
        else:
            yield node


def largest(roots: Sequence[Expr], wanted: Callable[[Expr], bool], *, guarded: bool = False) -> Iterator[Expr]:
    """The largest computed values below `roots` that are `wanted`; from below conditions and windows if `guarded`."""
    found = set[int]()

    def below(node: Expr) -> Sequence[Expr]:
        if (guarded or isinstance(node, Apply | ReductionResult)) and wanted(node):
            found.add(id(node))
            return ()
        return children(node) if guarded else evaluated(node)

    nodes = [*descend(roots, below)]
    return (node for node in nodes if id(node) in found)


def inside_windows(nodes: Iterable[Expr]) -> set[int]:
    """What lies in those of `nodes` that are windows, by identity."""
    return {id(below) for node in nodes if isinstance(node, Window) for below in walk(node)}


def without_truths(expr: Expr) -> bool:
    """Whether no truth value becomes a number below `expr`, as far as is seen at once."""
    return all(map(_keeps_truths, walk(expr)))


def _keeps_truths(node: Expr) -> bool:
    match node:
        case Apply(dtype=DType.BOOL) | Load() | Gather() | Const() | Position():
            return True
        case Apply(Op.CAST | Op.ADD | Op.SUB | Op.MUL | Op.TERM, args):
            return not any(arg.dtype is DType.BOOL for arg in args)
        case Apply(Op.WHERE, (_, *chosen)):  # between literals it may be the condition, as a number
            return not any(isinstance(arg, Const) or arg.dtype is DType.BOOL for arg in chosen)
        case _:
            return False


def may_divide_by_zero(expr: Expr) -> bool:
    """Whether the node itself divides an integer by one that is not known to be another than zero."""
    if not isinstance(expr, Apply) or expr.op not in DIVISIONS or not expr.dtype.is_int:
        return False
    by = expr.args[1]
    return not isinstance(by, Const) or by.value == 0


def own_indices(expr: Expr) -> tuple[Index, ...]:
    """The indices written in the node itself."""
    match expr:
        case Load(index=index) | Gather(index=index) | Position(index=index) | Prefix(index=index):
            return (index,)
        case Masked(mask=mask):
            return tuple(bound.index for bound in mask)
        case _:
            return ()


def indices_in(value: Expr) -> Iterator[Index]:
    """Every index that is written in `value`, and below it."""
    return (index for node in walk(value) for index in own_indices(node))


def known_index(value: Expr) -> Index | None:
    """An integer that only depends on where the element stands, as an index."""
    match value:
        case Position(index, dtype) if dtype.is_int:
            return index
        case Const(number, dtype) if dtype.is_int:
            return Index(int(number))
        case _:
            return None


def known_inside(value: Expr, size: int) -> Index | None:
    """The same, where it lies in ``0 .. size - 1``."""
    index = known_index(value)
    return index if index is not None and index.bounds[0] >= 0 and index.bounds[1] < size else None


def _casts_exactly(literal: Const, dtype: DType) -> bool:
    """Whether the literal as written means the same in `dtype` as its cast."""
    if dtype.is_int:
        low, high = dtype.limits
        return math.isfinite(literal.value) and low <= int(literal.value) <= high
    # A float32 literal is rounded where it is used; written as float64 it would not be.
    return not (literal.dtype is DType.F32 and dtype is DType.F64)


class Builder:
    """Makes interned nodes and rewrites expressions; folds what is exact to fold."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[object, ...], Expr] = {}

    def __getstate__(self) -> tuple[Expr, ...]:
        return (*self._nodes.values(),)  # operands first, so that pickle follows no chain down

    def __setstate__(self, nodes: tuple[Expr, ...]) -> None:
        self.__init__()  # type: ignore[misc]
        for node in nodes:
            fields = vars(node).values()
            key = (Const, repr(node.value), node.dtype) if isinstance(node, Const) else (type(node), *fields)
            self._nodes[key] = node

    def _intern(self, kind: type[Expr], *fields: Any) -> Expr:
        key = (kind, *fields)
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = kind(*fields)
        return found

    def load(self, buffer: str, index: Index, dtype: DType) -> Expr:
        return self._intern(Load, buffer, index, dtype)

    def gather(self, buffer: str, index: Index, places: tuple[Place, ...], dtype: DType) -> Expr:
        """An element at places of which those that are known beforehand, and lie inside, are part of the index."""
        known = [(place, at) for place in places if (at := place.known) is not None]
        if known:
            index = sum((at * place.stride for place, at in known), index)
            places = tuple(place for place in places if place.known is None)
        if not places:
            return self.load(buffer, index, dtype)
        return self._intern(Gather, buffer, index, places, dtype)

    def const(self, value: float | int | bool, dtype: DType) -> Expr:
        typed: float | int | bool = (
            float(value) if dtype.is_float else dtype.wrap(int(value)) if dtype.is_int else bool(value)
        )
        key = Const, repr(typed), dtype  # 0.0 equals -0.0, and NaN nothing
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = Const(typed, dtype)
        return found

    def apply(self, op: Op, *args: Expr, dtype: DType | None = None) -> Expr:
        result = dtype or args[-1].dtype
        if op is Op.CAST and args[0].dtype is result:
            return args[0]
        if op is Op.CAST and isinstance(args[0], Const) and _casts_exactly(args[0], result):
            return self.const(args[0].value, result)
        if op is Op.WHERE and isinstance(args[0], Const):
            return args[1 if args[0].value else 2]
        found = self._of_positions(op, args, result)
        if found is not None:
            return found
        return self._intern(Apply, op, args, result)

    def _of_positions(self, op: Op, args: Sequence[Expr], dtype: DType) -> Expr | None:
        """`op` on integers that only depend on where the element stands, where that is an index again or known beforehand."""
        indices = list[Index]()
        for arg in args:
            index = known_index(arg)
            if index is None:
                return None
            indices.append(index)
        found = combined(op, indices)
        if isinstance(found, bool):
            return self.const(found, dtype)
        if found is None or not dtype.is_int or not found.narrow:
            return None  # kernels compute indices in 32 bits where these are enough for their tensors
        low, high = dtype.limits
        return self.position(found, dtype) if low <= found.bounds[0] and found.bounds[1] <= high else None

    def cast(self, value: Expr, dtype: DType) -> Expr:
        return self.apply(Op.CAST, value, dtype=dtype)

    def position(self, index: Index, dtype: DType = DType.I64) -> Expr:
        if not index.terms:
            return self.const(index.constant, dtype)
        return self._intern(Position, index, dtype)

    def masked(self, mask: tuple[Bound, ...], value: Expr, other: Expr) -> Expr:
        open_bounds = tuple(bound for bound in mask if not bound.always)
        if not open_bounds:
            return value
        return self._intern(Masked, open_bounds, value, other, value.dtype)

    def window(self, op: ReduceOp, axes: tuple[Axis, ...], value: Expr) -> Expr:
        return self._intern(Window, op, axes, value, value.dtype)

    def reduction_result(self, reduction: str, part: int, dtype: DType) -> Expr:
        return self._intern(ReductionResult, reduction, part, dtype)

    def prefix(self, reduction: str, part: int, index: Index, dtype: DType) -> Expr:
        return self._intern(Prefix, reduction, part, index, dtype)

    def rewrite(
        self,
        root: Expr,
        axes: Mapping[Axis, Index] | None = None,
        leaf: Callable[[Expr], Expr | None] | None = None,
    ) -> Expr:
        """`root` with axes replaced, then every node for which `leaf` gives an expression replaced by that.

        `leaf` sees nodes whose axes are already replaced; it must not need its result rewritten again.
        """
        return self.rewriting(axes, leaf)(root)

    def rewriting(
        self,
        axes: Mapping[Axis, Index] | None = None,
        leaf: Callable[[Expr], Expr | None] | None = None,
    ) -> Callable[[Expr], Expr]:
        """`rewrite` for several roots: what they have in common is rewritten once, so `leaf` must say the same each time."""
        replaced = axes or {}

        def along(index: Index) -> Index:
            return index.substitute(replaced)

        def condition(bound: Bound) -> Bound:
            return Bound(along(bound.index), bound.low, bound.high)

        return self.with_indices(along, condition, leaf)

    def with_indices(
        self,
        along: Callable[[Index], Index],
        condition: Callable[[Bound], Bound],
        leaf: Callable[[Expr], Expr | None] | None = None,
    ) -> Callable[[Expr], Expr]:
        """As `rewriting`, with what `along` makes of each index, and `condition` of what masks ask."""
        done: dict[int, Expr] = {}
        roots: list[Expr] = []  # `done` is keyed by identity

        def rewrite(root: Expr) -> Expr:
            roots.append(root)
            for node in walk(root, but=done):
                fresh = self._rebuild(node, along, condition, done)
                done[id(node)] = fresh if leaf is None else leaf(fresh) or fresh
            return done[id(root)]

        return rewrite

    def _rebuild(
        self,
        node: Expr,
        along: Callable[[Index], Index],
        condition: Callable[[Bound], Bound],
        done: Mapping[int, Expr],
    ) -> Expr:
        match node:
            case Apply(op, args, dtype):
                return self.apply(op, *[done[id(arg)] for arg in args], dtype=dtype)
            case Load(buffer, index, dtype):
                return self.load(buffer, along(index), dtype)
            case Const(value, dtype):
                return self.const(value, dtype)
            case Gather(buffer, index, places, dtype):
                moved = tuple(replace(place, value=done[id(place.value)]) for place in places)
                return self.gather(buffer, along(index), moved, dtype)
            case Position(index, dtype):
                return self.position(along(index), dtype)
            case Masked(mask, value, other, _):
                return self.masked(tuple(map(condition, mask)), done[id(value)], done[id(other)])
            case Window(op, window_axes, value, _):
                return self.window(op, window_axes, done[id(value)])
            case ReductionResult(reduction, part, dtype):
                return self.reduction_result(reduction, part, dtype)
            case Prefix(reduction, part, index, dtype):
                return self.prefix(reduction, part, along(index), dtype)
