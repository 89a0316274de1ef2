"""Convolutions as matrix products of their tensors, as these lie.

- A kernel of size 1 with stride 1 and no border takes each position by itself: each sample is a product of the weight, output by input
  channels, and the input, input channels by positions.
- A kernel as large as the input, without a border, takes each sample whole: samples by inputs, times inputs by output channels.
- A transposed convolution of one position gives each sample a result as large as the kernel: samples by input channels, times input
  channels by all elements of the result.
- Windows side by side, as of an image in output tiles, are rows of a matrix: all windows of all samples by their elements, times these by
  output channels.

Nothing is packed, and no number is read more often than a product's tiles read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from fusepass.codegen.ir.convolution import Convolution, is_plain_product, takes_output_tiles, takes_single_positions
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr
from fusepass.codegen.ir.index import Axis, Index, axis_index, delinearize
from fusepass.codegen.ir.product import Operand, Product, Stride, nested
from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.passes.partials import Pieces, reduce_positions
from fusepass.codegen.passes.rewrite import rewrite_kernel

_Dimensions = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class PlainProduct:
    """A convolution as such a product.

    Attributes:
        anchor: the convolution; what its kernel has until it is laid out as a product's.
        product: what its kernel computes.
        dims: the dimensions of the convolution's result that are the product's batch, its rows and its columns.
    """

    anchor: Convolution
    product: Product
    dims: _Dimensions

    @property
    def by_samples(self) -> bool:
        """Whether each sample is a product of its own, of output channels by positions."""
        return bool(self.dims[0])

    @property
    def of_output_tiles(self) -> bool:
        """Whether its columns are the positions of all samples."""
        return 0 in self.dims[2]

    def turned(self, program: Program) -> PlainProduct:
        """The transpose of products whose columns are positions, as one, for results whose channels are neighbours."""
        image, (batch, channels, positions) = self.product.right, self.dims
        if batch:
            samples, _, *sizes = program.buffer(self.anchor.source).shape
            assert isinstance(image.row, int)
            image = replace(image, batch=0, row=nested([samples, prod(sizes)], [image.batch, image.row]))
        product = replace(self.product, left=image, right=self.product.left)
        return replace(self, product=product, dims=((), (*batch, *positions), channels))

    def value(self, builder: Builder) -> Expr:
        """An element of the result, rounded as the library rounds it."""
        return builder.cast(builder.reduction_result(self.product.name, 0, DType.F32), self.product.dtype)

    def completed(self, program: Program, builder: Builder) -> tuple[Program, Kernel]:
        """`program`, whose first kernel has the dimensions of the result as rows, with that as the product's."""
        kernel, *rest = program.kernels
        out, moved = kernel.rows[1].name, dict[Axis, Index]()
        matrix = []
        for dims in self.dims:
            axes = [kernel.rows[dim] for dim in dims]
            if dims in ((0,), (1,)):
                matrix += axes
                continue
            together = Axis(f"{out}_position" if axes else f"{out}_batch", prod(axis.size for axis in axes))
            places = delinearize(axis_index(together), [axis.size for axis in axes])
            moved.update((axis, place) for axis, place in zip(axes, places, strict=True) if axis.size > 1)
            matrix.append(together)
        rows = (Axis(f"{out}_piece", 1), *matrix)
        made = replace(rewrite_kernel(kernel, builder, moved), rows=rows, anchor=self.product)
        return replace(program, kernels=(made, *rest)), made

    def reduced(self, program: Program, builder: Builder, pieces: Pieces, kept: int) -> Program | None:
        """`program` with what is reduced over positions in its first kernel; None where nothing is. For `kept`, see `reduce_positions`."""
        if not self.by_samples:
            return None
        return reduce_positions(
            program, builder, 0, lambda made, _: pieces(*self.completed(made, builder)), per_sample=True, kept=kept
        )


def plain_product_of(program: Program, anchor: Convolution, result: Buffer) -> PlainProduct | None:
    """The product that is a convolution with that result; None where it is none, or where the dimensions that it takes together are not
    one in memory.
    """
    source, weight = program.buffer(anchor.source), program.buffer(anchor.weight)
    border, rank, kernel = anchor.padding, len(anchor.stride), weight.shape[2:]
    plain = is_plain_product(
        source.shape[2:], kernel, result.shape[2:], anchor.stride, border, anchor.groups, anchor.transposed
    )
    output_tiles = not plain and takes_output_tiles(anchor, kernel, source.strides[-1], source.dtype.nbytes)
    if not plain and not output_tiles:
        return None
    samples = Operand(source.name, 0, source.strides[0], source.strides[1])
    spatial = tuple(range(2, 2 + rank))
    dims: _Dimensions = ((), (0,), (1, *spatial))
    inner = source.shape[1]
    together: tuple[Stride, ...]
    if output_tiles:
        steps = [step * stride for step, stride in zip(anchor.stride, source.strides[2:], strict=True)]
        windows = nested([result.shape[0], *result.shape[2:]], [source.strides[0], *steps])
        taps = nested(weight.shape[1:], weight.strides[1:])
        left = Operand(weight.name, 0, weight.strides[0], taps)
        right = Operand(source.name, 0, windows, nested(weight.shape[1:], source.strides[1:]))
        dims, inner, together = ((), (1,), (0, *spatial)), prod(weight.shape[1:]), (taps,)
    elif takes_single_positions(kernel, anchor.stride, border, anchor.groups) and prod(source.shape[2:]) > 1:
        along = nested(source.shape[2:], source.strides[2:])
        to, of = (1, 0) if anchor.transposed else (0, 1)
        left = Operand(weight.name, 0, weight.strides[to], weight.strides[of])
        right = Operand(source.name, source.strides[0], along, source.strides[1])
        dims, together = ((0,), (1,), spatial), (along,)
    elif anchor.transposed:
        along = nested(weight.shape[1:], weight.strides[1:])
        left, right, together = samples, Operand(weight.name, 0, along, weight.strides[0]), (along,)
    else:
        taken, taps = (nested(buffer.shape[1:], buffer.strides[1:]) for buffer in (source, weight))
        left, right = replace(samples, inner=taken), Operand(weight.name, 0, weight.strides[0], taps)
        inner, together = prod(source.shape[1:]), (taken, taps)
    if not all(isinstance(stride, int) for stride in together):
        return None
    product = Product(
        name=anchor.name,
        left=left,
        right=right,
        inner=inner,
        length=inner,
        dtype=source.dtype,
        precision=anchor.precision,
    )
    return PlainProduct(anchor, product, dims)
