"""Convolutions as matrix products of scaled halves; see `fusepass.codegen.passes.halves`.

Each sample is a product: its rows are output channels, its columns positions of the result, its terms kernel positions and input
channels. The packed input is its right operand as it lies: a column begins at its position, and its terms are further on by the
same steps everywhere, so that columns overlap in memory. Where neighbouring positions read neighbours, the packed input has planes of
8 channels each, and all of its places are columns, those between two rows of the result among them: so columns are neighbours in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from fusepass.codegen.ir.convolution import HALVES, Convolution, fill_halves
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.expr import Builder, Expr
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, contiguous_strides, delinearize
from fusepass.codegen.ir.product import PLACE, Filling, Operand, Product, Runs, nested
from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.passes.halves import Layout, Scales, Unscaled, channels_last, in_places, scales_of
from fusepass.codegen.passes.partials import Pieces, reduce_positions
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.room import with_room
from fusepass.codegen.passes.runs import columns_of, runs_of
from fusepass.codegen.passes.steps import Step, border_of, has_even_phases, planes_of, step_of

_VECTOR = 4  # float32 numbers that are read at once
_MOST_ADDED = 1 / 8  # of the packed input
_MOST_TERMS = 32  # kernel positions along all axes, of an input that is not packed


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
        total = builder.stat(self.product.name, 0, DType.F32)
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


def halved_of(
    program: Program,
    builder: Builder,
    anchor: Convolution,
    result: Buffer,
    *,
    by_phases: bool = False,
    by_positions: bool = False,
    in_runs: bool = False,
) -> Halved | None:
    """A product of halves for a convolution of halves, or one whose operands may be rounded to TF32; None where it would not pay or is
    not known.

    Rows are channels, each with its phases; if `by_phases`, phases, but for those along the last axis, each with its channels; if
    `by_positions`, positions of all samples. If `in_runs`, columns are neighbours in memory; see `Runs`.
    """
    source, weight = program.buffer(anchor.source), program.buffer(anchor.weight)
    channels, are_halves = source.shape[1], source.dtype.is_half
    padded = -(-channels // HALVES) * HALVES
    if not are_halves and (anchor.precision is not Precision.TF32 or not fill_halves(channels)):
        return None
    if anchor.transposed and not has_even_phases(anchor, weight):
        return None
    steps = tuple(step_of(anchor, source, weight, result, axis) for axis in range(len(anchor.stride)))
    name = _free_name(program, result.name)
    scales = (
        Unscaled(source, weight)
        if are_halves
        else scales_of(builder, name, source, weight, transposed=anchor.transposed)
    )
    before, after = ([getattr(step, side) for step in steps] for side in ("before", "after"))
    first, runs = before[-1], _runs(source, steps, padded) if in_runs else None
    if in_runs and runs is None:
        return None
    lies = are_halves and not in_runs and _lies_in_places(source) and sum(step.taps for step in steps) <= _MOST_TERMS
    if runs is None:
        before[-1], after[-1] = _aligned(source.shape[-1], before[-1], after[-1])
    lying = in_places if runs else channels_last
    image, pack_image = source, tuple[Kernel, ...]()
    if not lies:
        image, pack_image = scales.pack_source(builder, f"{name}_input", lying(source.shape, before, after))
    some = runs.planes * PLACE if runs else padded
    taps, pack_taps = scales.pack_weight(
        builder,
        f"{name}_weight",
        _weight_layout(anchor, weight, steps, (padded, some), by_phases, by_positions),
    )
    planes = planes_of(source, steps) if runs else ()
    across = image.strides[2:] if lies else image.strides[2:-1] if runs else image.strides[1:-1]
    sizes = [step.taps for step in steps]
    terms = prod(sizes) * padded
    sizes_and_strides = [(step.positions, step.step * s) for step, s in zip(steps, across, strict=True)]
    if by_positions:
        sizes_and_strides.insert(0, (source.shape[0], image.strides[0]))
    positions = nested(*zip(*sizes_and_strides, strict=True))
    *outer, last = (step.apart * s for step, s in zip(steps, across, strict=True))
    inner = nested([*sizes[:-1], padded // some, sizes[-1], some], [*outer, some, last, 1])
    weights = Operand(taps.name, 0, terms, 1)
    if lies:
        offset = -sum(step.before * stride for step, stride in zip(steps, across, strict=True))
        border = border_of(steps, source.shape[2:], across, padded)
        found = Operand(image.name, image.strides[0], positions, inner, offset, border)
    else:
        found = Operand(
            image.name,
            image.strides[0],
            PLACE if runs else positions,
            runs.inner if runs else inner,
            (before[-1] - first) * across[-1],
        )
    product = Product(
        name=anchor.name,
        left=found if by_positions else weights,
        right=weights if by_positions else found,
        inner=terms,
        length=terms,
        dtype=image.dtype,
        apart=steps[-1].spread if by_phases else 0,
        runs=runs,
        filling=_filling(source, steps, scales, runs),
    )
    kernels = (*pack_image, *scales.kernels, pack_taps)
    buffers = (*scales.buffers, taps, *(() if lies else (image,)))
    return Halved(anchor, product, scales, kernels, buffers, steps, across, planes, by_positions)


def _filling(source: Buffer, steps: tuple[Step, ...], scales: Scales | Unscaled, runs: Runs | None) -> Filling | None:
    """What a product could make its right operand of; None where the scales are not guessed, or images do not lie in one piece."""
    if runs is None or isinstance(scales, Unscaled) or not scales.again or runs.planes * PLACE != source.shape[1]:
        return None
    image = source.shape[2:]
    if source.strides[2:] != contiguous_strides(image) or any(min(step.before, step.after) < 0 for step in steps):
        return None
    padded = planes_of(source, steps)
    return Filling(
        source=source.name,
        sample=source.strides[0],
        channel=source.strides[1],
        image=tuple((size, step.before, whole) for size, step, whole in zip(image, steps, padded, strict=True)),
        factors=(scales.factors[0].name, scales.factors[1].name),
        alarm=scales.flag,
    )


def _lies_in_places(source: Buffer) -> bool:
    """Whether the channels of each position of a tensor are neighbours, and whole places."""
    _, channels, *_ = source.shape
    steps = (source.strides[0], *source.strides[2:])
    return channels % PLACE == 0 and source.strides[1] == 1 and not any(step % PLACE for step in steps)


def _runs(source: Buffer, steps: tuple[Step, ...], padded: int) -> Runs | None:
    """How the columns lie if they are neighbours in memory; None where that is not known to pay."""
    if any(step.step > 1 for step in steps):
        return None
    planes = planes_of(source, steps)
    taps = [(step.taps, step.apart) for step in steps]
    return runs_of(planes, [step.positions for step in steps], taps, padded)


def _aligned(size: int, before: int, after: int) -> tuple[int, int]:
    """The border before and after rows of `size` numbers so that they are read in vectors, if that adds little to it."""
    wide = -(-before // _VECTOR) * _VECTOR
    rest = -(-(size + wide + after) // _VECTOR) * _VECTOR - size - wide
    fits = size % _VECTOR == 0 and before >= 0 and rest >= 0
    little = wide + rest - before - after <= _MOST_ADDED * (size + before + after)
    return (wide, rest) if fits and little else (before, after)


def _weight_layout(
    anchor: Convolution,
    weight: Buffer,
    steps: tuple[Step, ...],
    channels: tuple[int, int],
    by_phases: bool,
    by_positions: bool,
) -> Layout:
    """(output channel, *phases, *taps, input channel), or the channel before the last axis' phases, or behind all.

    Of all input `channels`, some stand together behind the taps of the last axis, the others before these.
    """
    padded, some = channels
    out, block, channel = Axis("ho", weight.shape[int(anchor.transposed)]), Axis("hb", padded // some), Axis("hc", some)
    at = axis_index(block) * some + axis_index(channel)
    taps = tuple(Axis(f"ht{number}", step.taps) for number, step in enumerate(steps))
    phases = tuple(Axis(f"hs{number}", step.spread) for number, step in enumerate(steps))
    places = [
        axis_index(tap) * step.along_tap + axis_index(phase) * step.along_phase + step.start
        for tap, phase, step in zip(taps, phases, steps, strict=True)
    ]
    both = [at, axis_index(out)] if anchor.transposed else [axis_index(out), at]
    inside = len(phases) if by_positions else len(phases) - 1 if by_phases else 0
    rows = (*phases[:inside], out, *phases[inside:])
    blocks = (block,) if block.size > 1 else ()
    return Layout((*rows, *taps[:-1], *blocks, taps[-1], channel), (*both, *places))


def _free_name(program: Program, wanted: str) -> str:
    """A name that no buffer of `program` begins with."""
    names = (f"{wanted}_halves{suffix}" for suffix in itertools.chain([""], itertools.count()))
    taken = [buffer.name for buffer in program.buffers]
    return next(name for name in names if not any(each.startswith(name) for each in taken))
