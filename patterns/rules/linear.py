"""Matrix products: sums over their results, and products of products."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from fusepass.patterns.analysis.linearity import Operand
from fusepass.patterns.analysis.reordered import ORDERS
from fusepass.patterns.arguments import arguments
from fusepass.patterns.cost import computed
from fusepass.patterns.language import op, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.builder import Builder, shape_of
from fusepass.patterns.rules.reduction import plain_floats, sum_inside

aten = torch.ops.aten

_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim})


@dataclass(frozen=True)
class Product:
    """A matrix product, or a batch of them, seen as a value of shape ``[*lead, features]``.

    Attributes:
        shape: that of the value.
        rows: ``[M, K]`` or ``[B, M, K]``; `lead` has M or B * M elements.
        weight: ``[K, N]`` or ``[B, K, N]``; N is the number of features.
        bias: what is added to each row.
    """

    shape: tuple[int, ...]
    rows: fx.Node
    weight: fx.Node
    bias: Operand | None

    @property
    def feature(self) -> int:
        """The last dimension."""
        return len(self.shape) - 1

    @staticmethod
    def of(node: fx.Node) -> Product | None:
        """The product that `node` is, or is a view of that keeps the features together."""
        shape, call = shape_of(node), node
        while call.target in _RESHAPES:
            call = call.all_input_nodes[0]
        if call.target not in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            return None
        made = shape_of(call)
        kept = len(shape) >= len(made) - 1 and shape[-1:] == made[-1:] and prod(shape) == prod(made)
        if not kept or (len(made) == 3 and shape[-2:] != made[-2:]):
            return None
        given = arguments(call)
        if call.target is not aten.addmm.default:
            return Product(shape, given["self"], given["mat2"], None)
        bias = given["self"]
        plain = given["alpha"] == given["beta"] == 1 and (shape == made or len(shape_of(bias)) == 1)
        return Product(shape, given["mat1"], given["mat2"], Operand.of(bias)) if plain else None

    def without_bias(self, build: Builder) -> fx.Node:
        """See `Anchor.without_bias`."""
        return build.view(build.matrix_product(self.rows, self.weight), self.shape)

    def sum(self, build: Builder, dims: frozenset[int], scale: fx.Node | None) -> fx.Node:
        """See `Anchor.sum`."""
        batched = len(shape_of(self.weight)) == 3
        if batched and not dims <= {self.feature - 1, self.feature}:
            raise Declined("a sum over a batch of products is no product")
        rows, weight, lead = self.rows, self.weight, self.shape[:-1]
        if self.feature in dims:
            weight = weight if scale is None else build.multiply(weight, scale)
            weight = build.sum(weight, [-1])
        summed = dims - {self.feature}
        if summed:
            rows = build.sum(build.view(rows, (*lead, shape_of(rows)[-1])), sorted(summed))
            lead = shape_of(rows)[:-1]
            batch = shape_of(self.weight)[:-2]
            rows = build.view(rows, (*batch, prod(lead) // prod(batch), shape_of(rows)[-1]))
        return build.view(build.product(rows, weight), (*lead, shape_of(weight)[-1]))


def one_batch(found: Match) -> str | None:
    """A guard."""
    return None if shape_of(found.x)[0] == 1 else "there are several products"


def _of_matrices(found: Match) -> fx.Node:
    """The product of two matrices, shown as a batch of one."""
    product = found.call(aten.mm.default, _matrix(found, found.x), _matrix(found, found.y))
    return found.call(aten.unsqueeze.default, product, 0)


def _matrix(found: Match, batch: fx.Node) -> fx.Node:
    """The one matrix of `batch`, made of what it is a view of by as few views as are known to do."""
    value = batch.meta["val"]
    shape, strides = tuple(value.shape[1:]), value.stride()[1:]
    node, best = batch, None
    while node.target in _RESHAPES or node.target in ORDERS:
        node = node.all_input_nodes[0]
        seen = node.meta["val"]
        if seen.dim() == 2 and (tuple(seen.shape), seen.stride()) == (shape, strides):
            best = (node, False)
        elif seen.dim() == 2 and (tuple(seen.shape), seen.stride()) == (shape[::-1], strides[::-1]):
            best = (node, True)
    if best is None:
        return found.call(aten.squeeze.dim, batch, 0)
    node, turned = best
    return found.call(aten.t.default, node) if turned else node


def with_a_vector(found: Match) -> str | None:
    """A guard."""
    if not (_ends_in_vector(found) or shape_of(found.x)[-2] == 1):
        return "neither operand is a vector"
    matrix = found.x if _ends_in_vector(found) else found.y
    return None if computed(matrix) else "the library reads a matrix in memory as fast"


def _ends_in_vector(found: Match) -> bool:
    return found.root.target is aten.mv.default or shape_of(found.y)[-1] == 1


def _pairs(found: Match) -> fx.Node:
    """The sums of products that the library would compute."""
    build, matrix, vector = Builder(found), found.x, found.y
    if not _ends_in_vector(found):
        last = len(shape_of(vector)) - 1
        matrix, vector = build.permute(vector, [*range(last - 1), last, last - 1]), matrix
    *batch, _, inner = shape_of(matrix)
    return build.view(build.product(matrix, build.view(vector, (*batch, inner, 1))), shape_of(found.root))


_reduction = op(aten.sum, aten.mean, open=True)

RULES: tuple[Rule, ...] = (
    Rule(
        name="sum-of-products",
        pattern=_reduction(var("x")),
        guards=(plain_floats,),
        rewrite=sum_inside(Product.of),
        why=(
            "a sum over the features of x @ W is x @ (the sum of W's columns), over its rows (the sum of x's rows) @ W; "
            "the same elements reach the result, so that what is not finite leaves it not finite"
        ),
    ),
    Rule(
        name="vector-behind-products",
        pattern=op(aten.mv)(var("x"), var("vector")),
        guards=(plain_floats,),
        rewrite=sum_inside(Product.of),
        why="(x @ W) @ v is x @ (W @ v); the same elements reach the result",
    ),
    Rule(
        name="product-with-a-vector",
        pattern=op(aten.mm, aten.bmm, aten.mv)(var("x"), var("y")),
        guards=(plain_floats, with_a_vector),
        rewrite=_pairs,
        why="a product with a vector is a sum of products, which may fuse with what makes the matrix",
    ),
    Rule(
        name="product-of-one-batch",
        pattern=op(aten.bmm)(var("x"), var("y")),
        guards=(plain_floats, one_batch),
        rewrite=_of_matrices,
        why="a batch of one product is that product",
        early=True,
    ),
)
