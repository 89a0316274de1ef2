"""A convolution's kernel as that of a matrix product of halves: what each of the product's rows and columns is of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, delinearize
from fusepass.codegen.ir.product import Product, nested
from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.passes.halves import Scales, Unscaled
from fusepass.codegen.passes.padding import with_room
from fusepass.codegen.passes.partials import Pieces, reduce_positions
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.steps import Step, columns_of


@dataclass(frozen=True)
class Halved:
    """A convolution as a product of scaled halves.

    Attributes:
        anchor: the convolution; what its kernel has until it is laid out as a product's.
        product: what its kernel computes.
        scales: of the operands.
        kernels, buffers: what is to be added to the program before that kernel.
        steps: the spatial axes.
        across: strides of the packed input along them.
        planes: where columns are its places, one after another, their sizes along the spatial axes; else none.
        by_positions: whether rows are positions of all samples, and columns phases of channels, so that channels are neighbours.
    """

    anchor: Convolution
    product: Product
    scales: Scales | Unscaled
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    across: tuple[int, ...]
    planes: tuple[int, ...] = ()
    by_positions: bool = False

    def value(self, builder: Builder, axes: tuple[Axis, ...]) -> Expr:
        """The element of the result at `axes`, its dimensions."""
        total = builder.reduction_result(self.product.name, 0, DType.F32)
        return self.scales.restored(builder, total, axis_index(axes[0]), axis_index(axes[1]))

    def completed(self, program: Program, builder: Builder) -> tuple[Program, Kernel]:
        """`program`, whose first kernel has the dimensions of the result as rows, with that as the product's, behind what packs."""
        kernel, *rest = program.kernels
        made = replace(program, kernels=(self._laid(kernel, builder), *rest))
        if made.kernels[0].within and self.planes and self.phases == 1 and not kernel.cols:
            made = with_room(made, builder, kernel, self.planes)
        kernels, buffers = (*self.kernels, *made.kernels), (*made.buffers, *self.buffers)
        return replace(made, kernels=kernels, buffers=buffers), made.kernels[0]

    @property
    def phases(self) -> int:
        """Of a channel: that many rows of the product."""
        return prod(step.spread for step in self.steps)

    def reduced(self, program: Program, builder: Builder, pieces: Pieces, kept: int) -> Program | None:
        """`program` with what is reduced over positions in its first kernel, which is not laid out yet; None where nothing is.

        For `kept`, see `reduce_positions`. A row has the positions of one phase, so that each phase has pieces of its own.
        """

        if self.by_positions:
            return None

        def count(made: Program, kernel: Kernel) -> int | None:
            found = pieces(*self.completed(made, builder))
            return None if found is None else found * self.phases

        return reduce_positions(program, builder, 0, count, least=self.phases, per_sample=True, kept=kept)

    def _laid(self, kernel: Kernel, builder: Builder) -> Kernel:
        if self.by_positions:
            return self._laid_by_positions(kernel, builder)
        if self.product.apart:
            return self._laid_by_phases(kernel, builder)
        if kernel.cols:
            return self._laid_by_windows(kernel, builder)
        sample, out, *spatial = kernel.rows
        row = Axis(f"{out.name}_row", out.size * self.phases)
        channel, *phases = delinearize(axis_index(row), [out.size, *(step.spread for step in self.steps)])
        column, moved, within = self._moved(spatial, phases)
        moved |= {out: channel} if out.size > 1 else {}
        rows = (Axis(f"{out.name}_piece", 1), sample, row, column)
        kernel, moved = self._pieces_of_rows(kernel, row, moved)
        return replace(rewrite_kernel(kernel, builder, moved), rows=rows, anchor=self.product, within=within)

    def _laid_by_positions(self, kernel: Kernel, builder: Builder) -> Kernel:
        """The same with positions as rows."""
        sample, out, *spatial = kernel.rows
        column = Axis(f"{out.name}_column", out.size * self.phases)
        *phases, channel = delinearize(axis_index(column), [*(step.spread for step in self.steps), out.size])
        sizes = [sample.size, *(step.positions for step in self.steps)]
        row = Axis(f"{out.name}_row", prod(sizes))
        which, *at = delinearize(axis_index(row), sizes)
        moved, within = self._places(spatial, at, phases)
        moved |= {axis: index for axis, index in ((sample, which), (out, channel)) if axis.size > 1}
        rows = (Axis(f"{out.name}_piece", 1), Axis(f"{out.name}_batch", 1), row, column)
        return replace(rewrite_kernel(kernel, builder, moved), rows=rows, anchor=self.product, within=within)

    def _laid_by_phases(self, kernel: Kernel, builder: Builder) -> Kernel:
        """The same of a kernel that reduces over channels, its columns."""
        (sample, *spatial), (out,) = kernel.rows, kernel.cols
        row = Axis(f"{out.name}_row", self.phases)
        phases = delinearize(axis_index(row), [step.spread for step in self.steps])
        column, moved, within = self._moved(spatial, phases)
        rows = (Axis(f"{out.name}_piece", 1), sample, row, column)
        return replace(rewrite_kernel(kernel, builder, moved), rows=rows, anchor=self.product, within=within)

    def _laid_by_windows(self, kernel: Kernel, builder: Builder) -> Kernel:
        """The same of a kernel that pools windows, whose points are its columns."""
        (sample, out, *spatial), inside = kernel.rows, kernel.cols
        sizes = [*(axis.size for axis in spatial), *(axis.size for axis in inside)]
        steps = [step.step * across for step, across in zip(self.steps, self.across, strict=True)]
        strides = [*(step * axis.size for step, axis in zip(steps, inside, strict=True)), *steps]
        product = replace(self.product, right=replace(self.product.right, row=nested(sizes, strides)))
        column, point = (
            Axis(f"{out.name}_column", prod(sizes[: len(spatial)])),
            Axis(f"{out.name}_point", kernel.col_count),
        )
        moved: dict[Axis, Index] = {}
        for axes, whole in ((spatial, column), (inside, point)):
            places = delinearize(axis_index(whole), [axis.size for axis in axes])
            moved |= {axis: place for axis, place in zip(axes, places, strict=True) if axis.size > 1}
        rows = (Axis(f"{out.name}_piece", 1), sample, out, column)
        return replace(rewrite_kernel(kernel, builder, moved), rows=rows, cols=(point,), anchor=product)

    def _moved(
        self, spatial: Sequence[Axis], phases: Sequence[Index]
    ) -> tuple[Axis, dict[Axis, Index], tuple[Bound, ...]]:
        """A product's columns for positions of `phases`; the `spatial` axes in terms of them; the bounds of those that exist."""
        positions = [step.positions for step in self.steps]
        count, sizes = columns_of(positions, self.planes) if self.planes else prod(positions), self.planes or positions
        column = Axis(f"{self.product.name}_column", count)
        return column, *self._places(spatial, delinearize(axis_index(column), sizes), phases)

    def _places(
        self, spatial: Sequence[Axis], at: Sequence[Index], phases: Sequence[Index]
    ) -> tuple[dict[Axis, Index], tuple[Bound, ...]]:
        """The `spatial` axes in terms of positions and phases; the bounds of those that exist."""
        places = [
            position * step.spread + step.shift + phase
            for position, step, phase in zip(at, self.steps, phases, strict=True)
        ]
        moved = {axis: place for axis, place in zip(spatial, places, strict=True) if axis.size > 1}
        bounds = tuple(Bound(place, 0, step.size) for place, step in zip(places, self.steps, strict=True))
        return moved, tuple(bound for bound in bounds if not bound.always)

    def _pieces_of_rows(self, kernel: Kernel, row: Axis, moved: dict[Axis, Index]) -> tuple[Kernel, dict[Axis, Index]]:
        """`kernel` with the pieces of a row instead of a channel, and how its axes move then."""
        if kernel.partials is None:
            return kernel, moved
        old = kernel.partials.pieces
        piece = Axis(f"{old.name}_of_row", old.size // self.phases)
        at = axis_index(piece) * self.phases + axis_index(row) % self.phases
        return replace(kernel, partials=replace(kernel.partials, pieces=piece)), moved | {old: at}
