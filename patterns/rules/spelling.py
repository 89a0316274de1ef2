"""One form for what may be written in several ways: reductions of reshaped and reordered tensors, pools, broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from fusepass.patterns.analysis.reordered import order_of
from fusepass.patterns.language import const, op, result, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.guards import floats
from fusepass.patterns.rules.pools import plain
from fusepass.patterns.rules.reductions import OVER_DIMS, dims, keeps, shaped

aten = torch.ops.aten

_x, _y = var("x"), var("y")
_REDUCTIONS = op(aten.sum, aten.mean, aten.amax, aten.amin, open=True)
_reshape = op(aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze, open=True)
_reorder = op(aten.permute, aten.transpose, aten.t, open=True)


def groups(source: Sequence[int], shown: Sequence[int]) -> list[tuple[range, range]]:
    """Dimensions of two shapes of as many elements that correspond: the smallest groups with equal products."""
    found, i, j = [], 0, 0
    while i < len(source) or j < len(shown):
        first, start, left, right = i, j, 1, 1
        while i == first or j == start or left != right:
            if i < len(source) and (left <= right or j == len(shown)):
                left, i = left * source[i], i + 1
            elif j < len(shown):
                right, j = right * shown[j], j + 1
            else:
                break
        found.append((range(first, i), range(start, j)))
    return found


def _of_reshaped(found: Match) -> fx.Node:
    """Where all of what one dimension was split into, or several were merged into, is reduced."""
    source, shown = (tuple(node.meta["val"].shape) for node in (found.x, found.inner))
    if 0 in source:
        raise Declined("there is nothing to reduce")
    reduced = {dim for dim in dims(found.root) if shown[dim] != 1}
    over: list[int] = []
    for before, after in groups(source, shown):
        long = {dim for dim in after if shown[dim] != 1}
        if long & reduced and not long <= reduced:
            raise Declined("a part of a dimension is reduced")
        over += [dim for dim in before if source[dim] != 1] if long & reduced else []
    return _reduction(found, over)


def _of_reordered(found: Match) -> fx.Node:
    order, reduced = order_of(found.inner), dims(found.root)
    kept = [at for dim, at in enumerate(order) if dim not in reduced]
    if any(first > second for first, second in pairwise(kept)):
        raise Declined("what is left would be in another order")
    return _reduction(found, sorted(order[dim] for dim in reduced))


def _reduction(found: Match, over: Sequence[int]) -> fx.Node:
    """The root's reduction of x over other dimensions, in the root's shape."""
    if not over:
        raise Declined("nothing is reduced")
    shape, wanted = found.x.meta["val"].shape, tuple(found.root.meta["val"].shape)
    without = tuple(size for dim, size in enumerate(shape) if dim not in over)
    target = OVER_DIMS[found.root.target.overloadpacket]  # type: ignore[union-attr]
    return shaped(found, found.call(target, found.x, list(over), without != wanted))


def _kept(found: Match) -> fx.Node:
    """The reduction that leaves its dimensions with size 1, where they are put back."""
    shape, over = found.x.meta["val"].shape, dims(found.inner)
    small = tuple(1 if dim in over else size for dim, size in enumerate(shape))
    if keeps(found.inner) or small != tuple(found.root.meta["val"].shape):
        raise Declined("it is another shape")
    target = OVER_DIMS[found.inner.target.overloadpacket]
    return found.call(target, found.x, list(over), True)


def _broadcast(found: Match) -> fx.Node:
    """The operator broadcasts by itself where its other operand has the shape of the result."""
    root = found.root
    if found.x is found.spread or tuple(found.x.meta["val"].shape) != tuple(root.meta["val"].shape):
        raise Declined("the other operand is broadcast, too")
    args: list[Any] = [found.y if value is found.spread else value for value in root.args]
    if found.y.meta["val"].dim() == 0 and found.y.meta["val"].dtype is not found.x.meta["val"].dtype:
        raise Declined("a number has less weight than a tensor in what type the result has")
    return found.call(root.target, *args, like=root, **dict[str, Any](root.kwargs))


def _windows(found: Match, shape: Sequence[int]) -> list[int]:
    """The window of an adaptive pool along each dimension, where all are as long."""
    extents = shape[len(shape) - len(found.sizes) :]
    if any(size < 1 or extent % size for extent, size in zip(extents, found.sizes, strict=True)):
        raise Declined("the windows are not equally long")
    return [extent // size for extent, size in zip(extents, found.sizes, strict=True)]


def _average_pool(found: Match) -> fx.Node:
    windows = _windows(found, found.x.meta["val"].shape)
    target = aten.avg_pool2d.default if len(windows) == 2 else aten.avg_pool3d.default
    return found.call(target, found.x, windows, windows, like=found.root)


def _extreme(found: Match) -> fx.Node:
    shape = found.x.meta["val"].shape
    if any(size != 1 for size in found.sizes):
        raise Declined("there are several windows")
    return found.call(aten.amax.default, found.x, list(range(len(shape) - len(found.sizes), len(shape))), True)


def floating(found: Match) -> str | None:
    """A guard: elements of one type, and some of them."""
    value = found.x.meta["val"]
    return None if value.is_floating_point() and value.numel() else "there are no numbers to pool"


_ARITHMETIC = (aten.add, aten.sub, aten.mul, aten.div, aten.maximum, aten.minimum)

RULES: tuple[Rule, ...] = (
    Rule(
        name="reduction-of-reshaped",
        pattern=_REDUCTIONS(_reshape(_x)["inner"]),
        guards=(floats,),
        rewrite=_of_reshaped,
        why="the same elements are reduced, whether they lie along one dimension or several",
        early=True,
        exact=True,
    ),
    Rule(
        name="reduction-of-reordered",
        pattern=_REDUCTIONS(_reorder(_x)["inner"]),
        guards=(floats,),
        rewrite=_of_reordered,
        why="the same elements are reduced, whatever the order of the dimensions",
        early=True,
        exact=True,
    ),
    Rule(
        name="reshaped-reduction",
        pattern=_reshape(_REDUCTIONS(_x)["inner"]),
        guards=(floats,),
        rewrite=_kept,
        why="a reduction may leave the dimensions that are put back behind it",
        early=True,
        exact=True,
    ),
    Rule(
        name="broadcast-operand",
        pattern=op(*_ARITHMETIC, commutative=True, open=True)(_x, op(aten.expand, open=True)(_y)["spread"]),
        rewrite=_broadcast,
        why="elementwise operators broadcast their operands",
        early=True,
        exact=True,
    ),
    Rule(
        name="adaptive-average-pool",
        pattern=op(aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d)(_x, const("sizes")),
        guards=(floating, plain),
        rewrite=_average_pool,
        why="windows that are as long everywhere are those of an average pool",
        early=True,
        exact=True,
    ),
    Rule(
        name="adaptive-max-pool-of-everything",
        pattern=result(0, op(aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)(_x, const("sizes"))),
        guards=(floating, plain),
        rewrite=_extreme,
        why="a window over all elements is their maximum; NaN is the maximum in both",
        early=True,
        exact=True,
    ),
)
