"""Reductions of reductions and of repeated values, and what moves from before a reduction behind it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from fusepass.patterns.analysis.affine import step
from fusepass.patterns.analysis.interval import interval
from fusepass.patterns.analysis.monotone import Direction, direction
from fusepass.patterns.arguments import arguments
from fusepass.patterns.language import of_class, op, result, var
from fusepass.patterns.matcher import Match
from fusepass.patterns.opclass import OpClass
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.guards import floats

aten = torch.ops.aten

_x, _y = var("x"), var("y")
_EXTREMES = op(aten.amax, aten.amin, open=True)
_LINEAR = op(aten.sum, aten.mean, open=True)
_REDUCTIONS = op(aten.sum, aten.mean, aten.amax, aten.amin, open=True)
OVER_DIMS = {
    aten.sum: aten.sum.dim_IntList,
    aten.mean: aten.mean.dim,
    aten.amax: aten.amax.default,
    aten.amin: aten.amin.default,
}
_VALUES = {aten.max.dim: aten.amax.default, aten.min.dim: aten.amin.default}
_OPPOSITE = {aten.amax: aten.amin.default, aten.amin: aten.amax.default}


def dims(node: fx.Node) -> tuple[int, ...]:
    """The dimensions of its input that a reduction removes, in ascending order."""
    rank = node.all_input_nodes[0].meta["val"].dim()
    chosen = arguments(node).get("dim")
    chosen = (chosen,) if isinstance(chosen, int) else chosen or range(rank)
    return tuple(sorted(dim % rank for dim in chosen)) if rank else ()


def keeps(node: fx.Node) -> bool:
    """Whether a reduction leaves its dimensions with size 1."""
    return bool(arguments(node).get("keepdim", False))


def alike(found: Match) -> str | None:
    same = found.root.target.overloadpacket is found.inner.target.overloadpacket  # type: ignore[union-attr]
    return None if same else f"{found.root.target} is not {found.inner.target}"


def shaped(found: Match, node: fx.Node) -> fx.Node:
    """`node` in the shape of the root, which has as many elements."""
    shape = list(found.root.meta["val"].shape)
    return node if list(node.meta["val"].shape) == shape else found.call(aten.view.default, node, shape)


def _reduced(found: Match, node: fx.Node, over: Sequence[int], target: Any = None) -> fx.Node:
    """`target`, else the root's operator, of `node`, with dimensions of size 1 left in."""
    target = target or OVER_DIMS[found.root.target.overloadpacket]  # type: ignore[union-attr]
    return found.call(target, node, list(over), True) if over else node


def _joined(found: Match) -> fx.Node:
    """One reduction over the dimensions of two."""
    inner, rank = dims(found.inner), found.x.meta["val"].dim()
    left = list(range(rank)) if keeps(found.inner) else [dim for dim in range(rank) if dim not in inner]
    over = sorted({*inner, *(left[dim] for dim in dims(found.root))})
    if keeps(found.inner) or keeps(found.root):
        return shaped(found, _reduced(found, found.x, over))
    return found.call(OVER_DIMS[found.root.target.overloadpacket], found.x, over, False)  # type: ignore[union-attr]


def _repeated(spread: fx.Node) -> set[int]:
    """The dimensions in which `expand` repeats its input."""
    source, shape = spread.all_input_nodes[0].meta["val"], spread.meta["val"].shape
    missing = len(shape) - source.dim()
    sizes = [1] * missing + list(source.shape)
    return {dim for dim, (small, large) in enumerate(zip(sizes, shape, strict=True)) if small != large}


def over_copies(found: Match) -> str | None:
    repeated = _repeated(found.spread)
    if 0 in found.spread.meta["val"].shape:
        return "there is nothing to reduce"
    return None if repeated and repeated <= set(dims(found.root)) else "something else than copies is reduced"


def _of_one_copy(found: Match) -> fx.Node:
    """The reduction of what is repeated; a sum is that times the number of copies."""
    shape, source = found.spread.meta["val"].shape, list(found.x.meta["val"].shape)
    repeated, missing = _repeated(found.spread), len(shape) - len(source)
    node = found.call(aten.view.default, found.x, [1] * missing + source) if missing else found.x
    node = _reduced(found, node, [dim for dim in dims(found.root) if dim not in repeated])
    if found.root.target.overloadpacket is aten.sum:  # type: ignore[union-attr]
        node = found.call(aten.mul.Tensor, node, float(prod(shape[dim] for dim in repeated)))
    return shaped(found, node)


def monotone(found: Match) -> str | None:
    return None if direction(found.inner) is not None else f"{found.inner.name} does not keep the order of numbers"


def behind(found: Match, function: fx.Node, operand: fx.Node) -> fx.Node:
    """The pointwise operator `function` of `operand` in place of its own first operand."""
    return found.call(function.target, operand, *function.args[1:], **dict[str, Any](function.kwargs))


def _extreme_first(found: Match) -> fx.Node:
    decreasing = direction(found.inner) is Direction.DECREASING
    target = _OPPOSITE[found.root.target.overloadpacket] if decreasing else None  # type: ignore[union-attr]
    return shaped(found, behind(found, found.inner, _reduced(found, found.x, dims(found.root), target)))


def scaled(found: Match) -> str | None:
    line = step(found.inner)
    if line is None or line.shift != 0 or line.scale == 0:
        return "no multiplication with a number"
    wide = found.x.meta["val"].dtype.itemsize > 2
    return None if wide or abs(line.scale) >= 1 else "the sum of what is not scaled yet may overflow"


def _scale_last(found: Match) -> fx.Node:
    return shaped(found, behind(found, found.inner, _reduced(found, found.x, dims(found.root))))


def constant_along(found: Match) -> str | None:
    """The factor must not vary along what is reduced."""
    x, y = found.x.meta["val"], found.y.meta["val"]
    if x.dtype is not y.dtype or y.dtype.itemsize <= 2:
        return "the sum of what is not scaled yet may overflow"
    same = x.dim() == y.dim() and all(y.shape[dim] == 1 for dim in dims(found.root))
    return None if same else f"{found.y.name} varies along what is reduced"


def bounded(found: Match) -> str | None:
    """An infinite factor makes NaN of 0, which terms that cancel are only after they are added."""
    return None if interval(found.y).bounded else f"{found.y.name} may be infinite"


def _factor_last(found: Match) -> fx.Node:
    return shaped(found, found.call(aten.mul.Tensor, _reduced(found, found.x, dims(found.root)), found.y))


def along_a_dimension(found: Match) -> str | None:
    whole = found.extreme.target not in _VALUES
    return "it is the extreme of two tensors or of everything" if whole else None


def _value(found: Match) -> fx.Node:
    return found.call(_VALUES[found.extreme.target], found.x, list(dims(found.extreme)), keeps(found.extreme))


RULES: tuple[Rule, ...] = (
    Rule(
        name="value-of-extreme",
        pattern=result(0, op(aten.max, aten.min, open=True)(_x)["extreme"]),
        guards=(along_a_dimension,),
        rewrite=_value,
        why="nobody reads the position; NaN is the extreme in both",
        exact=True,
    ),
    Rule(
        name="reduction-of-reduction",
        pattern=_REDUCTIONS(_REDUCTIONS(_x)["inner"]),
        guards=(floats, alike),
        rewrite=_joined,
        why="a sum of sums is the sum of all, likewise means of as many each, and extremes",
        early=True,
    ),
    Rule(
        name="reduction-of-copy",
        pattern=_REDUCTIONS(op(aten.clone, open=True)(_x)),
        guards=(floats,),
        rewrite=lambda m: shaped(m, _reduced(m, m.x, dims(m.root))),
        why="a reduction reads its input in any layout",
    ),
    Rule(
        name="reduction-of-copies",
        pattern=_REDUCTIONS(op(aten.expand, open=True)(_x)["spread"]),
        guards=(floats, over_copies),
        rewrite=_of_one_copy,
        why="a sum of equal terms is a product with their number; mean and extremes of copies are those of one",
    ),
    Rule(
        name="monotone-function-before-extreme",
        pattern=_EXTREMES(of_class(OpClass.POINTWISE)(_x)["inner"]),
        guards=(floats, monotone),
        rewrite=_extreme_first,
        why="the largest f(x) is f of the largest x where f increases, of the smallest where it decreases; NaN wins both ways",
        exact=True,
    ),
    Rule(
        name="scale-before-sum",
        pattern=_LINEAR(op(aten.mul, aten.div, aten.neg, open=True)(_x)["inner"]),
        guards=(floats, scaled),
        rewrite=_scale_last,
        why="a common factor comes out of a sum",
    ),
    Rule(
        name="factor-before-sum",
        pattern=_LINEAR(op(aten.mul, commutative=True)(_x, _y)["inner"]),
        guards=(floats, constant_along, bounded),
        rewrite=_factor_last,
        why="a factor that is the same for all terms, and finite, comes out of a sum",
    ),
)
