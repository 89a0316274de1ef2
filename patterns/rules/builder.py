"""Writes expressions of ATen operators into a graph, for rewrites that need more than a call or two."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.aliasing import written
from fusepass.patterns.analysis.geometry import Geometry, Window
from fusepass.patterns.analysis.linearity import Operand
from fusepass.patterns.arguments import arguments, key_of
from fusepass.patterns.effects import writes
from fusepass.patterns.infer import is_plain
from fusepass.patterns.matcher import Declined, Match

aten = torch.ops.aten

_FEW_TERMS = 2**18
"""Of a matrix product: those that take some microseconds, about as long as a call."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of the tensor that `node` makes."""
    return tuple(node.meta["val"].shape)


class Builder:
    """Makes nodes in the place of a match. Every method gives the node of its result; equal calls give the same node.

    Args:
        found: the nodes stand before its root.

    Raises:
        Declined: the first node, where memory is written before the root.
    """

    def __init__(self, found: Match) -> None:
        self._found = found
        self._made: dict[Hashable, fx.Node] = {}

    def operand(self, operand: Operand) -> fx.Node:
        """The tensor of a term, in the shape that it has there."""
        node = operand.node
        if operand.eps is not None:
            node = self._call(aten.rsqrt.default, self.shift(node, operand.eps))
        return self.view(node, operand.shape)

    def item(self, call: fx.Node, number: int) -> fx.Node:
        """Result `number` of a call that gives several."""
        return self._found.item(call, number)

    def again(self, call: fx.Node, **changes: Any) -> fx.Node:
        """`call` once more with some arguments changed, none of which change what its results look like."""
        assert isinstance(call.target, OpOverload)
        return self._call(call.target, *(arguments(call) | changes).values(), like=call)

    def add(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self._call(aten.add.Tensor, a, b)

    def blend(self, a: fx.Node, b: fx.Node, factor: float = 1.0) -> fx.Node:
        """``a + factor * b`` in the shape and type of `a`, which are not the narrower ones."""
        scaled = {"alpha": factor} if factor != 1 else {}
        return self._call(aten.add.Tensor, a, b, like=a, **scaled)

    def subtract(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self._call(aten.sub.Tensor, a, b)

    def multiply(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self._call(aten.mul.Tensor, a, b)

    def divide(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self._call(aten.div.Tensor, a, b)

    def reciprocal(self, a: fx.Node) -> fx.Node:
        return self._call(aten.reciprocal.default, a)

    def shift(self, a: fx.Node, number: float) -> fx.Node:
        """``a + number``; `a` itself where nothing is added."""
        return a if number == 0 else self._call(aten.add.Tensor, a, number)

    def scale(self, a: fx.Node, number: float) -> fx.Node:
        """``number * a``; `a` itself where that is the same."""
        return a if number == 1 else self._call(aten.mul.Tensor, a, number)

    def sum(self, a: fx.Node, dims: Sequence[int]) -> fx.Node:
        """The sum over `dims`, which stay as dimensions of size 1; those that have this size already are left out."""
        shape = shape_of(a)
        long = sorted(dim % len(shape) for dim in dims if shape[dim] != 1)
        return self._call(aten.sum.dim_IntList, a, long, True) if long else a

    def mean(self, a: fx.Node, dims: Sequence[int]) -> fx.Node:
        """The mean over `dims`, which stay as dimensions of size 1."""
        return self._call(aten.mean.dim, a, list(dims), True)

    def average(self, a: fx.Node, windows: Mapping[int, Window]) -> fx.Node:
        """Averages over windows along some of the dimensions, counted from the left."""
        shape = shape_of(a)
        rank = max(2, len(shape) - min(windows))
        if rank > 3:
            raise Declined("a pool has two or three dimensions")
        padded = (*(1,) * (rank - len(shape)), *shape)
        chosen = [windows.get(dim - rank + len(shape), Window(1, 1)) for dim in range(rank)]
        value = self.view(a, (prod(padded[:-rank]), *padded[-rank:]))
        target = aten.avg_pool2d.default if rank == 2 else aten.avg_pool3d.default
        sizes, strides = [window.size for window in chosen], [window.stride for window in chosen]
        pooled = self._call(target, value, sizes, strides)
        kept = len(shape) - min(rank, len(shape))
        return self.view(pooled, (*shape[:kept], *shape_of(pooled)[1 + rank - len(shape) + kept :]))

    def slice(self, a: fx.Node, dim: int, part: range) -> fx.Node:
        """The elements of `a` whose index along `dim` is in `part`, which is not empty."""
        if part == range(shape_of(a)[dim]):
            return a
        step = (part.step,) if part.step != 1 else ()
        return self._call(aten.slice.Tensor, a, dim, part.start, part[-1] + 1, *step)

    def cat(self, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        """Row-major parts behind each other along `dim`."""
        return parts[0] if len(parts) == 1 else self._call(aten.cat.default, list(parts), dim)

    def view(self, a: fx.Node, shape: Sequence[int]) -> fx.Node:
        """The elements of `a` in another shape; they are copied where their strides do not allow that."""
        if shape_of(a) == tuple(shape):
            return a
        while a.target is aten.view.default and is_plain(a.args[0].meta["val"]):  # type: ignore[union-attr]
            a = a.args[0]  # type: ignore[assignment]
        if shape_of(a) == tuple(shape):
            return a
        return self._call(aten.view.default, self.contiguous(a), list(shape))

    def split(self, a: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`a` with dimensions apart, or without those of size 1: a view of it, wherever it lies."""
        return a if shape_of(a) == tuple(shape) else self._call(aten.view.default, a, list(shape))

    def contiguous(self, a: fx.Node) -> fx.Node:
        """`a` in row-major order.

        Strides of dimensions of size 1 count, too: convolutions take them for a hint at the memory format.
        """
        if is_plain(a.meta["val"]):
            return a
        return self._call(aten.clone.default, a, memory_format=torch.contiguous_format)

    def expand(self, a: fx.Node, shape: Sequence[int]) -> fx.Node:
        """Copies of `a` that fill `shape`, in memory once."""
        return a if shape_of(a) == tuple(shape) else self._call(aten.expand.default, a, list(shape))

    def permute(self, a: fx.Node, order: Sequence[int]) -> fx.Node:
        """The dimensions of `a` in the order given."""
        return a if list(order) == sorted(order) else self._call(aten.permute.default, a, list(order))

    def pad(self, a: fx.Node, dim: int, before: int, after: int) -> fx.Node:
        """`a` with zeros around it along `dim`, row-major."""
        if before == after == 0:
            return a
        behind = [0] * 2 * (len(shape_of(a)) - 1 - dim % len(shape_of(a)))
        return self._call(aten.constant_pad_nd.default, self.contiguous(a), [*behind, before, after])

    def product(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """The product of two matrices, or of two batches of them.

        With a single column, or few terms in all, it is written as a sum, which no mode of the library runs in lower
        precision, and which may fuse with what is around it: calls cost more than so few terms.
        """
        *batch, rows, inner = shape_of(a)
        columns = shape_of(b)[-1]
        if columns == 1:
            return self.sum(self.multiply(a, self.view(b, (*batch, 1, inner))), [-1])
        if prod(batch) * rows * inner * columns <= _FEW_TERMS:
            pairs = self.multiply(self.view(a, (*batch, rows, inner, 1)), self.view(b, (*batch, 1, inner, columns)))
            return self.view(self.sum(pairs, [-2]), (*batch, rows, columns))
        return self.matrix_product(a, b)

    def matrix_product(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """The product of two matrices, or of two batches of them, by the library."""
        return self._call(aten.mm.default if len(shape_of(a)) == 2 else aten.bmm.default, a, b)

    def biased_product(self, bias: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
        """A vector added to each row of the product of two matrices."""
        return self._call(aten.addmm.default, bias, a, b)

    def convolution(self, x: fx.Node, weight: fx.Node, bias: fx.Node | None, geometry: Geometry) -> fx.Node:
        """``aten.convolution``."""
        return self._call(aten.convolution.default, x, self.contiguous(weight), bias, *geometry.arguments())

    def precise_convolution(self, x: fx.Node, weight: fx.Node, geometry: Geometry) -> fx.Node:
        """A convolution without bias that computes in the type of its operands, never in TF32.

        What averages a convolution's results averages their rounding, too; where sums come first, nothing does.
        """
        value = x.meta["val"]
        if value.device.type != "cuda" or value.dtype is not torch.float32:
            return self.convolution(x, weight, None, geometry)
        cudnn = torch.backends.cudnn
        flags = (cudnn.benchmark, cudnn.deterministic, cudnn.enabled, False)
        return self._call(aten._convolution.default, x, self.contiguous(weight), None, *geometry.arguments(), *flags)

    def _call(self, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        key = (id(target), key_of(args), key_of(kwargs))
        if not self._made and not self._found.unwritten and _written_before(self._found.root):
            raise Declined("memory is written before it, which what it is made of may have read")
        if key not in self._made:
            self._made[key] = self._found.call(target, *args, **kwargs)
        return self._made[key]


def _written_before(root: fx.Node) -> bool:
    """Whether an operator before `root` writes: a tensor would be read later than the original reads it."""
    node = root.prev
    while node.op != "root":
        if writes(node.target) and any(written(node)):
            return True
        node = node.prev
    return False


def count(shape: Sequence[int], dims: Sequence[int]) -> int:
    """How many elements a sum over `dims` has."""
    return prod(shape[dim] for dim in dims)
