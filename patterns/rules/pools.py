"""Pools of pools, and pointwise functions that move behind a pool or a broadcast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.analysis.monotone import Direction, direction
from fusepass.patterns.arguments import arguments
from fusepass.patterns.infer import is_plain
from fusepass.patterns.language import of_class, op, result, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.opclass import OpClass, is_elementwise
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.guards import floats
from fusepass.patterns.rules.reductions import behind, dims, keeps

aten = torch.ops.aten

_x = var("x")
_max_pool = op(aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, open=True)
_average_pool = op(aten.avg_pool2d, aten.avg_pool3d, open=True)


@dataclass(frozen=True)
class Window:
    """How a pool's window moves along one dimension, undilated and without a partial window at the end."""

    size: int
    stride: int
    padding: int

    def after(self, inner: Window) -> Window:
        """The window of a pool without padding on the results of another."""
        return Window(inner.size + (self.size - 1) * inner.stride, self.stride * inner.stride, inner.padding)

    def count(self, extent: int) -> int:
        """Places of the window along `extent` elements."""
        return (extent + 2 * self.padding - self.size) // self.stride + 1


def windows(pool: fx.Node) -> list[Window] | None:
    """The windows of a pool along the last dimensions; None for a pool that has others."""
    given = arguments(pool)
    rank = pool.all_input_nodes[0].meta["val"].dim()
    spatial = int(str(pool.target).partition("pool")[2][0])

    def each(name: str) -> list[int]:
        value = given[name]
        values = list(value) if isinstance(value, list | tuple) else [value]
        return values * spatial if len(values) == 1 else values

    dilated = "dilation" in given and any(step != 1 for step in each("dilation"))
    if dilated or given["ceil_mode"] or given.get("divisor_override") is not None or rank < spatial:
        return None
    strides = each("stride") if given["stride"] else each("kernel_size")
    return [Window(*sizes) for sizes in zip(each("kernel_size"), strides, each("padding"), strict=True)]


def plain(found: Match) -> str | None:
    """Then a pool's result is plain, too."""
    return None if is_plain(found.x.meta["val"]) else f"{found.x.name} is not in the plain layout"


def overlapping(found: Match) -> str | None:
    """The inner windows must leave no gap, and the outer ones must not see beyond their input."""
    outer, inner = windows(found.outer), windows(found.inner)
    if outer is None or inner is None or found.outer.target is not found.inner.target:
        return "a pool is dilated, rounds up, or is of another kind"
    fits = all(i.stride <= i.size and o.padding == 0 for o, i in zip(outer, inner, strict=True))
    return None if fits else "the inner windows leave gaps, or the outer ones are padded"


def tiled(found: Match) -> str | None:
    """Each element counts once in the inner pool."""
    inner = windows(found.inner)
    if inner is None or any(window.stride != window.size or window.padding for window in inner):
        return "the inner windows do not lie side by side"
    return None


def unpadded(found: Match) -> str | None:
    outer = windows(found.root)
    fits = outer is not None and found.root.target is found.inner.target and not any(w.padding for w in outer)
    return None if fits else "the outer windows are padded, or round up"


def whole(found: Match) -> str | None:
    """The mean must be over all windows along the dimensions that they pool, and these over all elements."""
    inner = windows(found.inner) or []
    shape, over = found.x.meta["val"].shape, set(dims(found.root))
    last = range(len(shape) - len(inner), len(shape))
    pooled = [(dim, window.size) for dim, window in zip(last, inner, strict=True) if window.size > 1]
    fits = all(dim in over and shape[dim] % size == 0 for dim, size in pooled)
    return None if fits else "some elements are in no window, or some windows not in the mean"


def _composed(found: Match, outer: fx.Node, *rest: Any) -> fx.Node:
    """The outer pool on the input of the inner one, with windows that see what both saw."""
    pairs = zip(windows(outer) or (), windows(found.inner) or (), strict=True)
    joint = [o.after(i) for o, i in pairs]
    extents = found.x.meta["val"].shape[-len(joint) :]
    if [window.count(extent) for window, extent in zip(joint, extents, strict=True)] != list(
        found.root.meta["val"].shape[-len(joint) :]
    ):
        raise Declined("the border belongs to other windows")
    sizes = [[getattr(window, name) for window in joint] for name in ("size", "stride", "padding")]
    return found.call(outer.target, found.x, *sizes, *rest, like=outer)


def _max_of_max(found: Match) -> fx.Node:
    return found.item(_composed(found, found.outer), 0)


def _mean(found: Match) -> fx.Node:
    return found.call(aten.mean.dim, found.x, list(dims(found.root)), keeps(found.root), like=found.root)


def increasing(found: Match) -> str | None:
    grows = direction(found.inner) is Direction.INCREASING
    return None if grows else f"{found.inner.name} does not keep the order of numbers"


def seen(found: Match) -> str | None:
    """A window that sees nothing but padding gives minus infinity, which a function would change."""
    given = arguments(found.pool)
    dilated = "dilation" in given and any(step != 1 for step in given["dilation"])
    return "a dilated window may see padding alone" if dilated else None


def _pool_first(found: Match) -> fx.Node:
    if found.x.meta["val"].stride() != found.inner.meta["val"].stride():
        raise Declined("the function changes the layout")
    pool = found.call(found.pool.target, found.x, *found.pool.args[1:], like=found.pool, **found.pool.kwargs)
    return found.call(
        found.inner.target, found.item(pool, 0), *found.inner.args[1:], like=found.root, **found.inner.kwargs
    )


def one_operand(found: Match) -> str | None:
    x, result, target = found.x.meta["val"], found.root.meta["val"], found.root.target
    assert isinstance(target, OpOverload)
    if not is_elementwise(target):
        return "its function differs from place to place"
    alone = len(found.root.all_input_nodes) == 1 and found.spread is found.root.args[0]
    return None if alone and x.dtype is result.dtype else "it reads more than what is repeated"


def _function_first(found: Match) -> fx.Node:
    shape = list(found.root.meta["val"].shape)
    spread = found.call(aten.expand.default, behind(found, found.root, found.x), shape)
    return found.call(aten.clone.default, spread, memory_format=torch.contiguous_format)


RULES: tuple[Rule, ...] = (
    Rule(
        name="max-pool-of-max-pool",
        pattern=result(0, _max_pool(result(0, _max_pool(_x)["inner"]))["outer"]),
        guards=(floats, plain, overlapping),
        rewrite=_max_of_max,
        why="the largest of the largest in windows without gaps between is the largest of all that they see",
        exact=True,
    ),
    Rule(
        name="average-pool-of-average-pool",
        pattern=_average_pool(_average_pool(_x)["inner"]),
        guards=(floats, plain, tiled, unpadded),
        rewrite=lambda m: _composed(m, m.root),
        why="the mean of means of as many numbers each is the mean of all",
        early=True,
    ),
    Rule(
        name="mean-of-average-pool",
        pattern=op(aten.mean, open=True)(_average_pool(_x)["inner"]),
        guards=(floats, tiled, whole),
        rewrite=_mean,
        why="the mean of means of as many numbers each is the mean of all",
        early=True,
    ),
    Rule(
        name="increasing-function-before-max-pool",
        pattern=result(0, _max_pool(of_class(OpClass.POINTWISE)(_x)["inner"])["pool"]),
        guards=(floats, increasing, seen),
        rewrite=_pool_first,
        why="the largest f(x) is f of the largest x where f increases; padding is never chosen; NaN wins both ways",
        exact=True,
    ),
    Rule(
        name="function-of-copies",
        pattern=of_class(OpClass.POINTWISE)(op(aten.expand, open=True)(_x)["spread"]),
        guards=(one_operand,),
        rewrite=_function_first,
        why="copies of a number have one function value",
        exact=True,
    ),
)
