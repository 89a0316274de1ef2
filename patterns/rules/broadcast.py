"""A value as what varies along some dimensions and what is the same along them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from fusepass.patterns.analysis.linearity import Factor, Operand, Term, summands
from fusepass.patterns.matcher import Declined
from fusepass.patterns.rules.builder import Builder, shape_of
from fusepass.patterns.rules.convolution import Filtered
from fusepass.patterns.rules.linear import Product
from fusepass.patterns.rules.reduction import Anchor, Piece, combined, times


def _anchor(value: Operand | None) -> Anchor | None:
    """The anchor that a term's value is, if it is one."""
    return None if value is None else Filtered.of(value.node) or Product.of(value.node)


@dataclass(frozen=True)
class Parted:
    """A value as what varies along some dimensions and what is the same along them.

    Attributes:
        varying: terms with the value's shape. Of anchors in `bare` the bias is left out.
        constant: the other terms.
        bare: values that are anchors whose bias is among `constant`.
    """

    varying: tuple[Term, ...]
    constant: tuple[Term, ...]
    bare: Mapping[fx.Node, Anchor]

    @staticmethod
    def of(node: fx.Node, dims: Collection[int]) -> Parted:
        """`node`, parted along `dims`, counted from the left.

        Raises:
            Declined: there are not both.
        """
        rank = len(shape_of(node))
        varying: list[Term] = []
        constant: list[Term] = []
        bare: dict[fx.Node, Anchor] = {}
        for term in summands(node):
            if _same_along(term, dims, rank):
                constant.append(term)
                continue
            varying.append(term)
            anchor = _anchor(term.value)
            if anchor is not None and anchor.bias is not None:
                bias = Term(anchor.bias, term.number, term.factors)
                if _same_along(bias, dims, rank):
                    constant.append(bias)
                    bare[term.value.node] = anchor  # type: ignore[union-attr]
        if not constant or not varying:
            raise Declined("nothing that is added cancels")
        return Parted(tuple(varying), tuple(constant), bare)

    def value(self, build: Builder) -> fx.Node:
        """The varying terms, added up."""
        pieces = [(self.factor(build, term, term.factors), term.number) for term in self.varying]
        return combined(build, pieces)

    def factor(self, build: Builder, term: Term, factors: Collection[Factor]) -> fx.Node:
        """The value of `term` times `factors`."""
        start = None
        if term.value is not None:
            anchor = self.bare.get(term.value.node)
            start = build.operand(term.value) if anchor is None else anchor.without_bias(build)
        return times(build, start, tuple(factors)) if factors or start is None else start

    def shift(self, build: Builder) -> tuple[Operand | None, float]:
        """The constant terms, added up: a tensor or None for 1, times a number."""
        if len(self.constant) == 1:
            (term,) = self.constant
            if term.value is not None and not term.factors:
                return term.value, term.number
        pieces: list[Piece] = []
        for term in self.constant:
            factors = (*([] if term.value is None else [Factor(term.value)]), *term.factors)
            pieces.append((times(build, None, factors) if factors else None, term.number))
        if all(node is None for node, _ in pieces):
            return None, sum(number for _, number in pieces)
        return Operand.of(combined(build, pieces)), 1.0


def _operands(term: Term) -> list[Operand]:
    return [*([] if term.value is None else [term.value]), *(factor.operand for factor in term.factors)]


def _same_along(term: Term, dims: Collection[int], rank: int) -> bool:
    return not any(operand.varies(dim - rank) for operand in _operands(term) for dim in dims)
