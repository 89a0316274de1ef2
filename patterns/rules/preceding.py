"""What is linear before an anchor becomes a part of its weights: scales of its input, and another convolution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.aliasing import base
from fusepass.patterns.analysis.geometry import Convolution
from fusepass.patterns.analysis.linearity import Term, summands
from fusepass.patterns.arguments import arguments
from fusepass.patterns.language import op, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.opclass import direct_class
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.builder import Builder, shape_of
from fusepass.patterns.rules.folding import GENERATED
from fusepass.patterns.rules.reduction import plain_floats, times

aten = torch.ops.aten


def _scaled(node: fx.Node, feature: int) -> tuple[fx.Node, Term]:
    """What `node` is a multiple of, and the term, whose factors differ along dimension `feature` alone.

    Raises:
        Declined: it is no such multiple, or the scale costs nothing where it is.
    """
    terms, rank = summands(node), len(shape_of(node))
    (term,) = terms if len(terms) == 1 else (Term(None),)
    if term.value is None or (term.number == 1 and not term.factors):
        raise Declined("its input is not scaled")
    source = term.value.node
    others = [dim - rank for dim in range(rank) if dim != feature]
    if any(factor.operand.varies(dim) for factor in term.factors for dim in others):
        raise Declined("the scale differs within a feature")
    made = base(source).target
    if isinstance(made, OpOverload) and direct_class(made) in GENERATED:
        raise Declined("the kernel that makes the input scales it for nothing")
    if source.meta["val"].stride() != node.meta["val"].stride():
        raise Declined("the input would be laid out in another way")
    return source, term


def _times(build: Builder, weight: fx.Node, term: Term, view: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """`weight` times the scale of a term; `view` lays a vector of the input's features along it."""
    if term.factors:
        weight = build.multiply(weight, view(times(build, None, term.factors)))
    return build.scale(weight, term.number)


def _scale_of_convolution(found: Match) -> fx.Node:
    call, build = Convolution.of(found.root), Builder(found)
    if call is None:
        raise Declined("it is no convolution of samples")
    source, term = _scaled(call.x, 1)
    inputs, ones, groups = shape_of(call.x)[1], (1,) * call.rank, call.geometry.groups

    def along(shape: tuple[int, ...]) -> Callable[[fx.Node], fx.Node]:
        return lambda vector: build.view(vector, shape if prod(shape_of(vector)) != 1 else (1,) * len(shape))

    weight, shape = call.weight, shape_of(call.weight)
    if call.geometry.transposed:
        weight = _times(build, weight, term, along((inputs, 1, *ones)))
    elif groups == 1:
        weight = _times(build, weight, term, along((1, inputs, *ones)))
    else:
        weight = build.view(weight, (groups, shape[0] // groups, *shape[1:]))
        weight = build.view(_times(build, weight, term, along((groups, 1, inputs // groups, *ones))), shape)
    return build.again(found.root, input=source, weight=weight)


def _scale_of_product(found: Match) -> fx.Node:
    given, build = arguments(found.root), Builder(found)
    rows, weight = ("mat1", "mat2") if "mat1" in given else ("self", "mat2")
    node = given[rows]
    while node.target in (aten.view.default, aten._unsafe_view.default):
        if shape_of(node.all_input_nodes[0])[-1:] != shape_of(node)[-1:]:
            break
        node = node.all_input_nodes[0]
    source, term = _scaled(node, len(shape_of(node)) - 1)
    scaled = _times(build, given[weight], term, lambda vector: build.view(vector, (-1, 1)))
    kwargs = {name: given[name] for name in ("beta", "alpha") if name in given}
    taken = {**given, rows: build.view(source, shape_of(given[rows])), weight: scaled}
    args = [value for name, value in taken.items() if name not in kwargs]
    return found.call(found.root.target, *args, like=found.root, **kwargs)


def _is_point(call: Convolution) -> bool:
    """Whether each result reads one position."""
    alone = all(size == 1 for size in shape_of(call.weight)[2:]) and not any(call.geometry.padding)
    return alone and not call.geometry.transposed and call.geometry.groups == 1


def _composed(found: Match) -> fx.Node:
    outer, inner, build = Convolution.of(found.root), Convolution.of(found.inner), Builder(found)
    if outer is None or inner is None or max(outer.geometry.groups, inner.geometry.groups) > 1:
        raise Declined("there are groups, or no samples")
    if outer.geometry.transposed or inner.geometry.transposed:
        raise Declined("a transposed convolution does not compose into one")
    results, middle = shape_of(outer.weight)[:2]
    inputs, second = shape_of(inner.weight)[1], build.view(outer.weight, (results, middle, -1))
    if _is_point(outer):
        steps = (a * b for a, b in zip(inner.geometry.stride, outer.geometry.stride, strict=True))
        geometry, kernel = replace(inner.geometry, stride=tuple(steps)), shape_of(inner.weight)[2:]
        matrix = build.view(second, (results, middle))
        weight = build.matrix_product(matrix, build.view(inner.weight, (middle, inputs * prod(kernel))))
    elif _is_point(inner) and all(step == 1 for step in inner.geometry.stride):
        if inner.bias is not None and any(outer.geometry.padding):
            raise Declined("the bias of the first is not there where the second pads")
        geometry, kernel = outer.geometry, shape_of(outer.weight)[2:]
        rows = build.view(build.permute(second, [0, 2, 1]), (results * prod(kernel), middle))
        weight = build.matrix_product(rows, build.view(inner.weight, (middle, inputs)))
        weight = build.permute(build.view(weight, (results, prod(kernel), inputs)), [0, 2, 1])
    else:
        raise Declined("both have a kernel of several weights")
    bias = outer.bias
    if inner.bias is not None:
        moved = build.sum(build.multiply(second, build.view(inner.bias, (1, middle, 1))), [1, 2])
        moved = build.view(moved, (results,))
        bias = moved if bias is None else build.add(moved, bias)
    return build.convolution(inner.x, build.view(weight, (results, inputs, *kernel)), bias, geometry)


_x, _weight = var("x"), var("weight")

RULES: tuple[Rule, ...] = (
    Rule(
        name="scale-before-convolution",
        pattern=op(aten.convolution, open=True)(_x, _weight),
        guards=(plain_floats,),
        rewrite=_scale_of_convolution,
        why="an input of a product may be scaled or its weight; the zeros of the padding stay zeros",
    ),
    Rule(
        name="scale-before-product",
        pattern=op(aten.mm)(_x, _weight),
        guards=(plain_floats,),
        rewrite=_scale_of_product,
        why="a feature of a product may be scaled or its row of weights",
    ),
    Rule(
        name="scale-before-biased-product",
        pattern=op(aten.addmm, open=True)(var("bias"), _x, _weight),
        guards=(plain_floats,),
        rewrite=_scale_of_product,
        why="a feature of a product may be scaled or its row of weights",
    ),
    Rule(
        name="convolution-of-convolution",
        pattern=op(aten.convolution, open=True)(op(aten.convolution, open=True)(_x)["inner"], _weight),
        guards=(plain_floats,),
        rewrite=_composed,
        why="sums of sums of products with weights are sums of products with sums of products of weights",
    ),
)
