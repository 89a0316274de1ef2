"""Convolutions of single positions as matrix products of their tensors, as these lie.

A kernel of size 1 with stride 1 and no border takes each position by itself: each sample is a product of the weight, output by input
channels, and the input, input channels by positions. Nothing is packed, and no number is read more often than a product's tiles read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from fusepass.codegen.ir.convolution import Convolution, takes_single_positions
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr
from fusepass.codegen.ir.index import Axis, axis_index, delinearize
from fusepass.codegen.ir.product import Operand, Product, nested
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.partials import Pieces, reduce_positions
from fusepass.codegen.passes.rewrite import rewrite_kernel


@dataclass(frozen=True)
class Pointwise:
    """A convolution as such a product.

    Attributes:
        anchor: the convolution; what its kernel has until it is laid out as a product's.
        product: what its kernel computes.
        by_positions: whether its rows are positions of all samples, and its columns output channels; else the other way round.
    """

    anchor: Convolution
    product: Product
    by_positions: bool = False

    def turned(self, program: Program) -> Pointwise:
        """The transpose of the product, for results whose channels are neighbours."""
        samples, _, *sizes = program.buffer(self.anchor.source).shape
        image = self.product.right
        assert isinstance(image.row, int)
        image = replace(image, batch=0, row=nested([samples, prod(sizes)], [image.batch, image.row]))
        product = replace(self.product, left=image, right=self.product.left)
        return replace(self, product=product, by_positions=True)

    def value(self, builder: Builder) -> Expr:
        """An element of the result, rounded as the library rounds it."""
        return builder.cast(builder.stat(self.product.name, 0, DType.F32), self.product.dtype)

    def completed(self, program: Program, builder: Builder) -> tuple[Program, Kernel]:
        """`program`, whose first kernel has the dimensions of the result as rows, with that as the product's."""
        kernel, *rest = program.kernels
        sample, out, *spatial = kernel.rows
        along = [sample, *spatial] if self.by_positions else spatial
        position = Axis(f"{out.name}_position", prod(axis.size for axis in along))
        places = delinearize(axis_index(position), [axis.size for axis in along])
        moved = {axis: place for axis, place in zip(along, places, strict=True) if axis.size > 1}
        matrix = (Axis(f"{out.name}_batch", 1), position, out) if self.by_positions else (sample, out, position)
        rows = (Axis(f"{out.name}_piece", 1), *matrix)
        made = replace(rewrite_kernel(kernel, builder, moved), rows=rows, anchor=self.product)
        return replace(program, kernels=(made, *rest)), made

    def reduced(self, program: Program, builder: Builder, pieces: Pieces, kept: int) -> Program | None:
        """`program` with what is reduced over positions in its first kernel; None where nothing is. For `kept`, see `reduce_positions`."""
        if self.by_positions:
            return None
        return reduce_positions(
            program, builder, 0, lambda made, _: pieces(*self.completed(made, builder)), per_sample=True, kept=kept
        )


def pointwise_of(program: Program, anchor: Convolution) -> Pointwise | None:
    """The product that is a convolution; None where it has several groups or more than single positions, or these are not one dimension in memory."""
    source, weight = program.buffer(anchor.source), program.buffer(anchor.weight)
    if not takes_single_positions(weight.shape[2:], anchor.stride, anchor.padding, anchor.groups):
        return None
    along = nested(source.shape[2:], source.strides[2:])
    if not isinstance(along, int):
        return None
    channels = source.shape[1]
    to, of = (1, 0) if anchor.transposed else (0, 1)
    product = Product(
        name=anchor.name,
        left=Operand(weight.name, 0, weight.strides[to], weight.strides[of]),
        right=Operand(source.name, source.strides[0], along, source.strides[1]),
        inner=channels,
        length=channels,
        dtype=source.dtype,
        precision=anchor.precision,
    )
    return Pointwise(anchor, product)
