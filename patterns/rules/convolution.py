"""Convolutions, transposed or not: sums over their results."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from fusepass.patterns.analysis.geometry import Convolution
from fusepass.patterns.analysis.linearity import Operand
from fusepass.patterns.language import op, var
from fusepass.patterns.matcher import Declined
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.builder import Builder, shape_of
from fusepass.patterns.rules.reduction import plain_floats, sum_inside
from fusepass.patterns.rules.taps import merged_weights, tap_sums

aten = torch.ops.aten


_MOST_TERMS, _MOST_TERMS_TRANSPOSED = 150, 432
"""Products up to which one sum of all of them is about as exact as the mean of as many sums as were averaged: with numbers of
one sign the error of a sum of n is some 3.4e-8 sqrt(n / 3) in float32; libraries take transposed convolutions apart more finely."""


@dataclass(frozen=True)
class Filtered:
    """A convolution as a value that can be summed.

    Attributes:
        call: the convolution.
    """

    call: Convolution

    @property
    def shape(self) -> tuple[int, ...]:
        """``[samples, channels, *spatial]``."""
        return self.call.shape

    @property
    def feature(self) -> int:
        """The channels."""
        return 1

    @property
    def bias(self) -> Operand | None:
        """One number per channel."""
        if self.call.bias is None:
            return None
        return Operand(self.call.bias, (self.shape[1], *(1,) * self.call.rank))

    @property
    def _most_terms(self) -> int:
        return _MOST_TERMS_TRANSPOSED if self.call.geometry.transposed else _MOST_TERMS

    @staticmethod
    def of(node: fx.Node) -> Filtered | None:
        """The convolution that `node` calls, if it does."""
        call = Convolution.of(node)
        return None if call is None else Filtered(call)

    def without_bias(self, build: Builder) -> fx.Node:
        """See `Anchor.without_bias`."""
        return build.again(self.call.node, bias=None)

    def sum(self, build: Builder, dims: frozenset[int], scale: fx.Node | None) -> fx.Node:
        """See `Anchor.sum`.

        Along a summed axis each weight is multiplied with the sum of what it is multiplied with anywhere: the axis
        becomes as long as the kernel, and its positions are further channels of a convolution over the other axes.
        """
        call = self.call
        summed = sorted(dim for dim in dims if dim >= 2)
        axes = {dim: call.axis(dim - 2) for dim in summed}
        reads = {dim: [axis.read(tap) for tap in range(axis.kernel)] for dim, axis in axes.items()}
        x = tap_sums(build, call.x, reads)
        weight = merged_weights(build, call.weight, reads)
        if 0 in dims:
            x = build.sum(x, [0])
        groups = call.geometry.groups
        if 1 in dims and groups > 1 and shape_of(call.x)[1] * prod(shape_of(weight)[2:]) > self._most_terms:
            raise Declined("the groups' sums, added up, err less than one sum of all products")
        if 1 in dims:
            weight, groups = self._one_channel(build, weight, scale), 1
        result = self._convolved(build, x, weight, summed, groups)
        kept = [1 if dim in dims else size for dim, size in enumerate(self.shape)]
        return build.view(result, kept)

    def _one_channel(self, build: Builder, weight: fx.Node, scale: fx.Node | None) -> fx.Node:
        """Weights of one group that give the sum of the channels of all groups."""
        groups, rank = self.call.geometry.groups, self.call.rank
        outputs, kernel = self.shape[1], shape_of(weight)[2:]
        inputs = shape_of(self.call.x)[1]
        if self.call.geometry.transposed:  # [in, out / groups, *kernel], a group's inputs behind each other
            weight = build.view(weight, (groups, inputs // groups, outputs // groups, *kernel))
            shape = (groups, 1, outputs // groups, *(1,) * rank)
            weight = weight if scale is None else build.multiply(weight, build.view(scale, shape))
            return build.view(build.sum(weight, [2]), (inputs, 1, *kernel))
        weight = build.view(weight, (groups, outputs // groups, inputs // groups, *kernel))
        shape = (groups, outputs // groups, 1, *(1,) * rank)
        weight = weight if scale is None else build.multiply(weight, build.view(scale, shape))
        return build.view(build.sum(weight, [1]), (1, inputs, *kernel))

    def _convolved(self, build: Builder, x: fx.Node, weight: fx.Node, summed: list[int], groups: int) -> fx.Node:
        """The convolution over the axes that are not `summed`; those are channels. A product where none is left."""
        transposed = self.call.geometry.transposed
        rest = [dim for dim in range(2, len(self.shape)) if dim not in summed]
        sizes, kernel = shape_of(x), shape_of(weight)
        taps = prod(kernel[dim] for dim in summed)
        if rest and groups == 1 < taps and sizes[1] * prod(kernel[2:]) > self._most_terms:
            return self._added(build, x, weight, summed, rest)
        x = build.permute(x, [0, 1, *summed, *rest])
        weight = build.permute(weight, [0, *summed, 1, *rest] if transposed else [0, 1, *summed, *rest])
        inputs, filters = (sizes[0], sizes[1] * taps), (kernel[0], kernel[1] * taps)
        if transposed:
            filters = (kernel[0] * taps, kernel[1])
        if not rest and groups == 1:
            matrix = build.view(weight, filters)
            return build.product(build.view(x, inputs), matrix if transposed else build.permute(matrix, [1, 0]))
        # without axes it is a convolution at one position: unlike a product, it knows groups
        x = build.view(x, (*inputs, *([sizes[dim] for dim in rest] or [1])))
        weight = build.view(weight, (*filters, *([kernel[dim] for dim in rest] or [1])))
        return build.precise_convolution(x, weight, self.call.geometry.only([dim - 2 for dim in rest], groups))

    def _added(self, build: Builder, x: fx.Node, weight: fx.Node, summed: list[int], rest: list[int]) -> fx.Node:
        """The sums over the channels for each weight along `summed`, as groups, added up: p short sums err 1 / p as much."""
        sizes, kernel = shape_of(x), shape_of(weight)
        taps = prod(kernel[dim] for dim in summed)
        lead, inner = [sizes[dim] for dim in rest], [kernel[dim] for dim in rest]
        x = build.view(build.permute(x, [0, *summed, 1, *rest]), (sizes[0], taps * sizes[1], *lead))
        weight = build.view(build.permute(weight, [*summed, 0, 1, *rest]), (taps * kernel[0], kernel[1], *inner))
        parts = build.precise_convolution(x, weight, self.call.geometry.only([dim - 2 for dim in rest], taps))
        shape = shape_of(parts)
        return build.sum(build.view(parts, (shape[0], taps, shape[1] // taps, *shape[2:])), [1])


_reduction = op(aten.sum, aten.mean, open=True)

RULES: tuple[Rule, ...] = (
    Rule(
        name="sum-of-convolution",
        pattern=_reduction(var("x")),
        guards=(plain_floats,),
        rewrite=sum_inside(Filtered.of),
        why=(
            "a weight is multiplied with the sum of the elements that it is multiplied with one by one; over channels "
            "the weights are summed instead; the same elements reach the result, so that what is not finite leaves it "
            "not finite"
        ),
    ),
)
