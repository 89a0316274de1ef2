"""What is linear around an anchor becomes a part of its weights: affine functions behind it, a product before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.aliasing import readers
from fusepass.patterns.analysis.linearity import Factor, Operand, Term, terms
from fusepass.patterns.arguments import arguments
from fusepass.patterns.language import op, result, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.once import ONCE
from fusepass.patterns.opclass import OpClass, direct_class
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.builder import Builder, shape_of
from fusepass.patterns.rules.convolution import Filtered
from fusepass.patterns.rules.linear import Product
from fusepass.patterns.rules.reduction import Anchor, Piece, combined, plain_floats, times

aten = torch.ops.aten


@dataclass(frozen=True)
class Folded:
    """``scale * anchor + shift``, feature by feature.

    Attributes:
        anchor: a product or a convolution, whose bias is part of the shift.
        scale: numbers and vectors that its features are multiplied with.
        shift: what adds up to the vector that is added to them.
    """

    anchor: Anchor
    scale: Term
    shift: tuple[Term, ...]

    @staticmethod
    def of(node: fx.Node, anchor_of: Callable[[fx.Node], Anchor | None]) -> Folded:
        """`node` in this form.

        Raises:
            Declined: it has none.
        """
        found = terms(node, lambda inner: anchor_of(inner) is not None)
        products = [term for term in found if term.value is not None and anchor_of(term.value.node) is not None]
        anchor = anchor_of(products[0].value.node) if len(products) == 1 and products[0].value is not None else None
        if anchor is None or anchor.shape != shape_of(node):
            raise Declined("it is no affine function of one anchor")
        (scale,) = products
        shift = tuple(term for term in found if term is not scale)
        if anchor.bias is not None:
            shift += (Term(anchor.bias, scale.number, scale.factors),)
        folded = Folded(anchor, Term(None, scale.number, scale.factors), shift)
        if not all(folded._by_feature(operand) for operand in folded._operands()):
            raise Declined("it differs within a feature")
        return folded

    def _operands(self) -> list[Operand]:
        values = [term.value for term in self.shift if term.value is not None]
        return [*values, *(factor.operand for term in (self.scale, *self.shift) for factor in term.factors)]

    def _by_feature(self, operand: Operand) -> bool:
        rank = len(self.anchor.shape)
        return not any(operand.varies(dim - rank) for dim in range(rank) if dim != self.anchor.feature)

    def scaled(self, build: Builder, weight: fx.Node, view: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """`weight` times the scale; `view` lays a vector of features along it."""
        if self.scale.factors:
            weight = build.multiply(weight, view(times(build, None, self.scale.factors)))
        return build.scale(weight, self.scale.number)

    def shifted(self, build: Builder) -> fx.Node | None:
        """The shift as a vector of all features; None where nothing is added.

        Raises:
            Declined: it is a number.
        """
        if not self.shift:
            return None
        pieces: list[Piece] = []
        for term in self.shift:
            factors = (*([] if term.value is None else [Factor(term.value)]), *term.factors)
            pieces.append((times(build, None, factors) if factors else None, term.number))
        if not any(node is not None for node, _ in pieces):
            raise Declined("a number is added")
        total = combined(build, pieces)
        features = self.anchor.shape[self.anchor.feature]
        if shape_of(total).count(1) == len(shape_of(total)) and features != 1:
            raise Declined("a number is added")
        return build.view(total, (features,))


GENERATED = (OpClass.POINTWISE, OpClass.REDUCTION, OpClass.NORMALISATION, OpClass.POOLING)


def read_by_a_library(found: Match) -> str | None:
    """A guard: a generated kernel that reads the result applies an affine function on the way, for nothing."""
    for reader in readers(found.root):
        if isinstance(reader.target, OpOverload) and direct_class(reader.target) in GENERATED:
            return f"{reader.name} takes it into its kernel"
    return None


def _into_convolution(found: Match) -> fx.Node:
    folded, build = Folded.of(found.root, Filtered.of), Builder(found)
    assert isinstance(folded.anchor, Filtered)
    if folded.shift and found.root.meta["val"].device.type == "cuda":
        raise Declined("the library adds a bias in a pass of its own")
    call, kernel = folded.anchor.call, (1,) * folded.anchor.call.rank
    groups, outputs = call.geometry.groups, folded.anchor.shape[1]
    weight = call.weight
    if not call.geometry.transposed:
        weight = folded.scaled(build, weight, lambda vector: build.view(vector, _along(vector, (outputs, 1, *kernel))))
    else:
        inputs, each, *size = shape_of(weight)
        weight = build.view(weight, (groups, inputs // groups, each, *size))
        weight = folded.scaled(
            build, weight, lambda vector: build.view(vector, _along(vector, (groups, 1, each, *kernel)))
        )
        weight = build.view(weight, (inputs, each, *size))
    if ONCE in call.weight.meta and call.x is arguments(call.node)["input"]:  # the result lies as it did
        return build.again(call.node, weight=weight, bias=folded.shifted(build))
    return build.convolution(call.x, weight, folded.shifted(build), call.geometry)


def _along(vector: fx.Node, shape: Sequence[int]) -> Sequence[int]:
    """`shape`, or ones where `vector` has only one element."""
    return shape if any(size != 1 for size in shape_of(vector)) else (1,) * len(shape)


def _into_product(found: Match) -> fx.Node:
    folded, build = Folded.of(found.root, Product.of), Builder(found)
    assert isinstance(folded.anchor, Product)
    return _product(build, folded, folded.anchor.rows, _weight(build, folded), folded.shifted(build))


def _weight(build: Builder, folded: Folded) -> fx.Node:
    assert isinstance(folded.anchor, Product)
    return folded.scaled(build, folded.anchor.weight, lambda vector: build.view(vector, (-1,)))


def _product(build: Builder, folded: Folded, rows: fx.Node, weight: fx.Node, shift: fx.Node | None) -> fx.Node:
    if len(shape_of(weight)) == 3 and shift is not None:
        raise Declined("a batch of products takes no bias")
    value = build.matrix_product(rows, weight) if shift is None else build.biased_product(shift, rows, weight)
    return build.view(value, (*folded.anchor.shape[:-1], shape_of(weight)[-1]))


def _product_of_product(found: Match) -> fx.Node:
    outer, build = Product.of(found.root), Builder(found)
    assert outer is not None
    inner = Folded.of(outer.rows, Product.of)
    assert isinstance(inner.anchor, Product)
    if len(shape_of(inner.anchor.weight)) == 3 or len(shape_of(outer.weight)) == 3:
        raise Declined("a batch of products has a weight for each")
    weight = build.matrix_product(_weight(build, inner), outer.weight)
    shift, bias = inner.shifted(build), arguments(found.root).get("self") if outer.bias is not None else None
    if shift is not None:
        moved = build.matrix_product(build.view(shift, (1, -1)), outer.weight)
        moved = build.view(moved, (shape_of(weight)[-1],))
        bias = moved if bias is None else build.add(moved, bias)
    if bias is not None and shape_of(bias) != (shape_of(weight)[-1],):
        raise Declined("the bias is no vector")
    return _product(build, inner, inner.anchor.rows, weight, bias)


def _of_parameters(anchor_of: Callable[[fx.Node], Anchor | None]) -> Callable[[Match], str | None]:
    """A guard: what is folded is made of parameters alone, as the weight is."""

    def guard(found: Match) -> str | None:
        try:
            folded = Folded.of(found.root, anchor_of)
        except Declined as declined:
            return str(declined)
        weight = folded.anchor.call.weight if isinstance(folded.anchor, Filtered) else folded.anchor.weight  # type: ignore[attr-defined]
        nodes = (weight, *(operand.node for operand in folded._operands()))
        return None if all(ONCE in node.meta for node in nodes) else "it is not made of parameters alone"

    return guard


_x = var("x")
_affine = op(aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, open=True)
_normalised = result(0, op(aten._native_batch_norm_legit_no_training, open=True)(_x))

_SAME = (
    "the features are sums, and a sum of scaled products is scaled; elements that are not finite reach the same results"
)

_INTO: tuple[tuple[str, Callable[[fx.Node], Anchor | None], Callable[[Match], fx.Node]], ...] = (
    ("convolution", Filtered.of, _into_convolution),
    ("product", Product.of, _into_product),
)


def _rules(
    guards: Callable[[Callable[[fx.Node], Anchor | None]], tuple[Callable[[Match], str | None], ...]],
) -> Iterator[Rule]:
    """A rule for each anchor and each kind of affine function, with the guards that an anchor asks for."""
    for anchor, anchor_of, rewrite in _INTO:
        for name, pattern in (("affine", _affine(_x)), ("normalisation", _normalised)):
            yield Rule(f"{name}-into-{anchor}", pattern, rewrite, _SAME, guards(anchor_of))


OF_PARAMETERS: tuple[Rule, ...] = (*_rules(lambda anchor_of: (_of_parameters(anchor_of),)),)
"""Those for weights that are made once: they cost nothing, and are computed in wider types than the features are rounded to."""

RULES: tuple[Rule, ...] = (
    *_rules(lambda _: (read_by_a_library, plain_floats)),
    Rule(
        name="product-of-product",
        pattern=op(aten.mm)(_x, var("weight")),
        guards=(plain_floats,),
        rewrite=_product_of_product,
        why="matrix products are associative; what is not finite in a row leaves that row not finite",
    ),
    Rule(
        name="biased-product-of-product",
        pattern=op(aten.addmm)(var("bias"), _x, var("weight")),
        guards=(plain_floats,),
        rewrite=_product_of_product,
        why="matrix products are associative; what is not finite in a row leaves that row not finite",
    ),
)
