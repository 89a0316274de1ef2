"""Sums and means of linear expressions: what an anchor contributes is summed before the anchor runs, not after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import fx

from fusepass.patterns.aliasing import base, is_view
from fusepass.patterns.analysis.linearity import Factor, Operand, Term, is_linear_step, terms
from fusepass.patterns.arguments import arguments
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.rules.builder import Builder, count, shape_of

aten = torch.ops.aten


class Anchor(Protocol):
    """A value that a matrix product or a convolution makes, perhaps seen through a view."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""

    @property
    def feature(self) -> int:
        """The dimension that the weights make."""

    @property
    def bias(self) -> Operand | None:
        """What the anchor adds to its products, in a shape that broadcasts."""

    def without_bias(self, build: Builder) -> fx.Node:
        """The value without its bias."""

    def sum(self, build: Builder, dims: frozenset[int], scale: fx.Node | None) -> fx.Node:
        """The sum over `dims`, kept with size 1, without the bias.

        Args:
            build: makes the nodes.
            dims: one or more dimensions, counted from the left.
            scale: a vector that the features are multiplied with before; only where they are summed.

        Raises:
            Declined: there is no cheaper form.
        """


@dataclass(frozen=True)
class Reduction:
    """A call of sum, mean or mv.

    Attributes:
        operand: what is reduced.
        dims: over these dimensions, counted from the left, in ascending order.
        mean: whether the sum is divided by the number of its elements.
        factor: a tensor that the operand is multiplied with before; it broadcasts.
    """

    operand: fx.Node
    dims: tuple[int, ...]
    mean: bool
    factor: fx.Node | None = None

    @staticmethod
    def of(root: fx.Node) -> Reduction:
        """What `root`, a call of ``aten.sum``, ``aten.mean`` or ``aten.mv``, reduces."""
        given = arguments(root)
        if root.target is aten.mv.default:
            return Reduction(given["self"], (1,), False, given["vec"])
        rank = len(shape_of(given["self"]))
        dims = sorted({dim % rank for dim in given.get("dim") or range(rank)}) if rank else []
        return Reduction(given["self"], tuple(dims), root.target in (aten.mean.dim, aten.mean.default))


def plain_floats(found: Match) -> str | None:
    """A guard: narrow types would round sums that eager keeps wide."""
    value, source = found.root.meta["val"], found.x.meta["val"]
    if value.dtype not in (torch.float32, torch.float64) or source.dtype is not value.dtype:
        return f"sums of {source.dtype} would be rounded in between"
    return "there is nothing to sum" if 0 in source.shape else None


def sum_inside(anchor_of: Callable[[fx.Node], Anchor | None]) -> Callable[[Match], fx.Node]:
    """A rewrite of a reduction `found.root`, which sums inside of the anchors that `anchor_of` knows."""

    def rewrite(found: Match) -> fx.Node:
        reduction = Reduction.of(found.root)
        shape = shape_of(reduction.operand)
        size = count(shape, reduction.dims)
        if size == 1:
            raise Declined("there is nothing to sum")
        parts = terms(reduction.operand, lambda node: anchor_of(node) is not None)
        if reduction.factor is not None:
            factor = Operand.of(reduction.factor)
            parts = tuple(term.by(factor) for term in parts)
        build = Builder(found)
        total = _Sum(build, shape, frozenset(reduction.dims), anchor_of, found.root).of(parts)
        result = combined(build, [(node, number / size if reduction.mean else number) for node, number in total])
        return build.view(result, shape_of(found.root))

    return rewrite


Piece = tuple[fx.Node | None, float]
"""A tensor, or the number 1, and what it is multiplied with."""


@dataclass(frozen=True)
class _Sum:
    """Sums of terms over `dims` of the shape that they have together."""

    build: Builder
    shape: tuple[int, ...]
    dims: frozenset[int]
    anchor_of: Callable[[fx.Node], Anchor | None]
    root: fx.Node

    def of(self, parts: Sequence[Term]) -> list[Piece]:
        """What adds up to the sum; each piece has size 1, or is not there, along `dims`.

        Raises:
            Declined: no term is an anchor that can be summed inside.
        """
        pieces: list[Piece] = []
        free: list[Term] = []
        for term in parts:
            anchor = self._foldable(term)
            if anchor is None:
                free.append(term)
                continue
            assert term.value is not None
            alike = [other for other in parts if other.value is not None and other.value.node is term.value.node]
            if len(alike) > 1 or _is_kept(term, self.root):
                raise Declined("others read the product, and sum it on the way")
            inside, outside = self._split(term.factors)
            scale = self.build.view(self._times(None, inside), (-1,)) if inside else None
            pieces.append((self._times(anchor.sum(self.build, self.dims, scale), outside), term.number))
            if anchor.bias is not None:
                free.append(Term(anchor.bias, term.number, term.factors))
        if not pieces:
            raise Declined("it is no sum of products")
        return [*pieces, *self._free(free)]

    def _foldable(self, term: Term) -> Anchor | None:
        """The anchor that `term` is a multiple of, if its factors join the weights or wait for the sum."""
        if term.value is None or term.value.shape != self.shape:
            return None
        anchor = self.anchor_of(term.value.node)
        inside, _ = self._split(term.factors)
        others = [dim - len(self.shape) for dim in range(len(self.shape)) if anchor and dim != anchor.feature]
        return None if any(factor.operand.varies(dim) for factor in inside for dim in others) else anchor

    def _free(self, parts: Sequence[Term]) -> list[Piece]:
        """The sums of terms that are no anchors. Those of one shape are added before they are summed."""
        alike: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
        pieces: list[Piece] = []
        for term in parts:
            inside, outside = self._split(term.factors)
            start = None if term.value is None else self.build.operand(term.value)
            node = self._times(start, inside) if inside else start
            if outside or node is None:
                summed, repeats = self._summed(node)
                pieces.append((self._times(summed, outside) if outside else summed, term.number * repeats))
            else:
                alike[shape_of(node)].append((node, term.number))
        for group in alike.values():
            node, number = group[0] if len(group) == 1 else (combined(self.build, group), 1.0)
            summed, repeats = self._summed(node)
            pieces.append((summed, number * repeats))
        return pieces

    def _summed(self, node: fx.Node | None) -> Piece:
        """The sum of a tensor that broadcasts over the shape, and how often each of its elements counts in it."""
        shape = () if node is None else shape_of(node)
        missing = len(self.shape) - len(shape)
        long = [dim - missing for dim in self.dims if dim >= missing and shape[dim - missing] != 1]
        repeats = prod(self.shape[dim] for dim in self.dims if dim - missing not in long)
        return (node if node is None else self.build.sum(node, long)), float(repeats)

    def _split(self, factors: Sequence[Factor]) -> tuple[list[Factor], list[Factor]]:
        """Those that differ along what is summed, and those that do not."""
        ranks = [dim - len(self.shape) for dim in self.dims]
        inside = [factor for factor in factors if any(factor.operand.varies(dim) for dim in ranks)]
        return inside, [factor for factor in factors if factor not in inside]

    def _times(self, node: fx.Node | None, factors: Sequence[Factor]) -> fx.Node:
        return times(self.build, node, factors)


_MOST_BETWEEN = 32
"""Operators between a product and its sum that are looked at."""


def _is_kept(term: Term, root: fx.Node) -> bool:
    """Whether more than `root`, and what comes to it alone, depends on the term's value, perhaps by subtracting from it.

    Then the product runs anyway, and what rounds in it (a library may round operands to TF32) must round in its sum, too.
    """
    assert term.value is not None
    reached = [base(term.value.node)]
    for node in reached:  # grows
        for user in node.users:
            if user is root or user in reached:
                continue
            between = is_view(user.target) or is_linear_step(user)
            if not between or user > root or len(reached) > _MOST_BETWEEN:
                return True
            reached.append(user)
    return any(factor.operand.node in reached for factor in term.factors)


def times(build: Builder, node: fx.Node | None, factors: Sequence[Factor]) -> fx.Node:
    """`node`, or the number 1, times one or more factors."""
    for factor in sorted(factors, key=lambda factor: factor.divides):
        operand = build.operand(factor.operand)
        if node is None:
            node = build.reciprocal(operand) if factor.divides else operand
        else:
            node = build.divide(node, operand) if factor.divides else build.multiply(node, operand)
    assert node is not None
    return node


def combined(build: Builder, pieces: Sequence[Piece]) -> fx.Node:
    """The sum of pieces, at least one of which is a tensor."""
    tensors = [(node, factor) for node, factor in pieces if node is not None]
    number = sum(factor for node, factor in pieces if node is None)
    common = tensors[0][1]
    if common == 0 or any(factor != common for _, factor in tensors):
        common = 1.0
    else:
        tensors = [(node, 1.0) for node, _ in tensors]
    result = build.scale(*tensors[0])
    for node, factor in tensors[1:]:
        if factor == -1:
            result = build.subtract(result, node)
        else:
            result = build.add(result, build.scale(node, factor))
    return build.shift(build.scale(result, common), number)
