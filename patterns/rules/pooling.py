"""Average pools of linear expressions: an anchor whose weights are averaged makes the pooled values at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeVar

import torch
from torch import fx

from fusepass.patterns.analysis.geometry import Convolution, Window
from fusepass.patterns.analysis.linearity import Factor, Operand, Term, terms
from fusepass.patterns.arguments import arguments
from fusepass.patterns.language import op, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.builder import Builder, shape_of
from fusepass.patterns.rules.composed import composed_convolution
from fusepass.patterns.rules.convolution import Filtered
from fusepass.patterns.rules.linear import Product
from fusepass.patterns.rules.reduction import Piece, combined, plain_floats, times

aten = torch.ops.aten

Windows = Mapping[int, Window]
"""The windows of a pool by dimension, counted from the left; other dimensions are not pooled."""


class Pooled(Protocol):
    """An anchor that can make its averages over windows itself."""

    @property
    def bias(self) -> Operand | None:
        """What the anchor adds to its products, in a shape that broadcasts."""

    def pool(self, build: Builder, windows: Windows) -> Piece:
        """The sum over each window, without the bias, perhaps up to a number.

        Raises:
            Declined: there is no cheaper form.
        """


@dataclass(frozen=True)
class AveragePool:
    """A call of ``aten.avg_pool2d`` or ``avg_pool3d`` without padding.

    Attributes:
        operand: what is pooled, without the dimensions of size 1 that were inserted for the call.
        windows: the pooled dimensions of `operand`.
        result: the shape of the result in the dimensions of `operand`.
    """

    operand: fx.Node
    windows: dict[int, Window]
    result: tuple[int, ...]

    @staticmethod
    def of(root: fx.Node) -> AveragePool:
        """What `root` pools."""
        given = arguments(root)
        node, shape = given["self"], list(shape_of(given["self"]))
        sizes = _each(given["kernel_size"], root)
        steps = _each(given["stride"], root) if given["stride"] else sizes
        first = len(shape) - len(sizes)
        windows = {
            first + axis: Window(size, step)
            for axis, (size, step) in enumerate(zip(sizes, steps, strict=True))
            if (size, step) != (1, 1)
        }
        result = list(shape_of(root))
        while node.target is aten.unsqueeze.default:
            dim = int(node.args[1]) % len(shape)
            if dim in windows:
                break
            node = node.all_input_nodes[0]
            windows = {other - (other > dim): window for other, window in windows.items()}
            del result[dim], shape[dim]
        return AveragePool(node, windows, tuple(result))


def _each(values: Sequence[int], root: fx.Node) -> list[int]:
    rank = 2 if root.target is aten.avg_pool2d.default else 3
    return list(values) * rank if len(values) == 1 else list(values)


def whole_windows(found: Match) -> str | None:
    """A guard: at a border with padding a window holds other numbers than elsewhere."""
    given = arguments(found.root)
    if any(given["padding"]):
        return "the pool pads, and the bias of an anchor is not zero there"
    if given["divisor_override"] is not None:
        return "the pool has a divisor of its own"
    pool = AveragePool.of(found.root)
    if not pool.windows:
        return "there is nothing to pool"
    extents = shape_of(pool.operand)
    outside = (dim for dim, window in pool.windows.items() if window.reach(pool.result[dim]) > extents[dim])
    return next((f"windows along dimension {dim} reach over the border" for dim in outside), None)


A = TypeVar("A", bound=Pooled)


def _pool_inside(anchor_of: Callable[[fx.Node], A | None]) -> Callable[[Match], fx.Node]:
    """A rewrite of an average pool, which pools inside of the anchors that `anchor_of` knows."""

    def rewrite(found: Match) -> fx.Node:
        pool = AveragePool.of(found.root)
        build, shape = Builder(found), shape_of(pool.operand)
        pieces: list[Piece] = []
        free: list[Term] = []
        for term in terms(pool.operand, lambda node: anchor_of(node) is not None):
            anchor = anchor_of(term.value.node) if term.value is not None and term.value.shape == shape else None
            if anchor is None or any(_varies(factor.operand, pool, shape) for factor in term.factors):
                free.append(term)
                continue
            node, number = anchor.pool(build, pool.windows)
            pieces.append((times(build, node, term.factors), term.number * number))
            if anchor.bias is not None:
                free.append(Term(anchor.bias, term.number, term.factors))
        if not pieces:
            raise Declined("it is no pool of products")
        pieces += [_pooled(build, term, pool, shape) for term in free]
        return build.view(combined(build, pieces), shape_of(found.root))

    return rewrite


def _varies(operand: Operand, pool: AveragePool, shape: Sequence[int]) -> bool:
    return any(operand.varies(dim - len(shape)) for dim in pool.windows)


def _pooled(build: Builder, term: Term, pool: AveragePool, shape: Sequence[int]) -> Piece:
    """The averages of a term that no anchor makes; one that is the same along a window is its own average."""
    inside = [factor for factor in term.factors if _varies(factor.operand, pool, shape)]
    outside = [factor for factor in term.factors if factor not in inside]
    value = [] if term.value is None else [Factor(term.value)]
    if not any(_varies(factor.operand, pool, shape) for factor in (*value, *inside)):
        factors = (*value, *outside)
        return (times(build, None, factors) if factors else None), term.number
    node = times(build, None, (*value, *inside))
    missing = len(shape) - len(shape_of(node))
    windows = {
        dim - missing: window
        for dim, window in pool.windows.items()
        if dim >= missing and shape_of(node)[dim - missing] > 1
    }
    return times(build, build.average(node, windows), outside), term.number


@dataclass(frozen=True)
class PooledProduct(Product):
    """A matrix product whose features are pooled."""

    @staticmethod
    def of(node: fx.Node) -> PooledProduct | None:
        """See `Product.of`."""
        found = Product.of(node)
        return None if found is None else PooledProduct(found.shape, found.rows, found.weight, found.bias)

    def pool(self, build: Builder, windows: Windows) -> Piece:
        """See `Pooled.pool`."""
        if windows.keys() != {self.feature}:
            raise Declined("rows of a product are pooled")
        dim = len(shape_of(self.weight)) - 1
        weight = build.average(self.weight, {dim: windows[self.feature]})
        result = build.product(self.rows, weight)
        return build.view(result, (*self.shape[:-1], shape_of(weight)[-1])), 1.0


@dataclass(frozen=True)
class PooledFilter(Filtered):
    """A convolution whose positions are pooled."""

    @staticmethod
    def of(node: fx.Node) -> PooledFilter | None:
        """See `Filtered.of`."""
        found = Filtered.of(node)
        return None if found is None else PooledFilter(found.call)

    def pool(self, build: Builder, windows: Windows) -> Piece:
        """See `Pooled.pool`."""
        if min(windows) < 2:
            raise Declined("channels or samples are pooled")
        by_axis = {dim - 2: window for dim, window in windows.items()}
        size = prod(window.size for window in windows.values())
        axes = [self.call.axis(axis) for axis in by_axis]
        if all((axis.kernel, axis.stride, axis.padding, axis.transposed) == (1, 1, 0, False) for axis in axes):
            x = build.average(self.call.x, windows)
            return build.precise_convolution(x, self.call.weight, self.call.geometry), 1.0
        return composed_convolution(build, self.call, by_axis, 1 / size), 1.0


def _pool_before(found: Match) -> fx.Node:
    """The products at single positions of what is pooled; a bias counts as much as a window has of the input."""
    call, given, build = Convolution.of(found.x), arguments(found.root), Builder(found)
    if call is None or call.geometry.transposed or any(found.x.users.keys() - {found.root}):
        raise Declined("it is no pool of a convolution that nobody else reads")
    if call.rank != _RANKS[found.root.target.overloadpacket]:  # type: ignore[union-attr]
        raise Declined("channels or samples are pooled")
    axes = [call.axis(number) for number in range(call.rank)]
    if any((axis.kernel, axis.stride, axis.padding) != (1, 1, 0) for axis in axes):
        raise Declined(
            "a convolution beside the border of what is pooled would read the input, where the pool has zeros"
        )
    settings = [given[name] for name in _POOL_SETTINGS]
    pooled = found.call(found.root.target, call.x, *settings)
    result = build.precise_convolution(pooled, call.weight, call.geometry)
    if call.bias is None:
        return result
    bias = build.view(call.bias, (-1, *(1,) * call.rank))
    if (any(given["padding"]) and given["count_include_pad"]) or given["divisor_override"] is not None:
        value = call.bias.meta["val"]
        ones = found.call(aten.full.default, [1, 1, *shape_of(call.x)[2:]], 1.0, dtype=value.dtype, device=value.device)
        bias = build.multiply(bias, found.call(found.root.target, ones, *settings))
    return build.add(result, bias)


_POOL_SETTINGS = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")

_RANKS = {aten.avg_pool2d: 2, aten.avg_pool3d: 3}
_pool = op(*_RANKS, open=True)

RULES: tuple[Rule, ...] = (
    Rule(
        name="average-pool-of-everything",
        pattern=_pool(var("x")),
        guards=(plain_floats, whole_windows),
        rewrite=lambda m: _mean(m),
        why="a window over all elements is their mean",
        early=True,
        exact=True,
    ),
    Rule(
        name="average-pool-of-products",
        pattern=_pool(var("x")),
        guards=(plain_floats, whole_windows),
        rewrite=_pool_inside(PooledProduct.of),
        why="the average of some features of x @ W is x @ (the average of these columns of W)",
    ),
    Rule(
        name="average-pool-of-convolution",
        pattern=_pool(var("x")),
        guards=(plain_floats, whole_windows),
        rewrite=_pool_inside(PooledFilter.of),
        why=(
            "the average of neighbouring results of a convolution is a convolution, whose weights are sums of the "
            "original ones; every element of the input that it reads is read by the original, too"
        ),
    ),
    Rule(
        name="average-pool-before-points",
        pattern=_pool(var("x")),
        guards=(plain_floats,),
        rewrite=_pool_before,
        why="a convolution of single positions and a pool of channels by themselves may change places",
    ),
)


def _mean(found: Match) -> fx.Node:
    pool = AveragePool.of(found.root)
    shape = shape_of(pool.operand)
    if any(window.size != shape[dim] for dim, window in pool.windows.items()):
        raise Declined("the window is smaller than what is pooled")
    build = Builder(found)
    return build.view(build.mean(pool.operand, sorted(pool.windows)), shape_of(found.root))
