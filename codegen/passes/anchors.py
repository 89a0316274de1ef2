"""Library convolutions and matrix products that generated code does better become kernels.

What is done to each element of their results is the kernels' epilogue, and so is what reduces over a convolution's channels or
positions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

from fusepass.codegen.ir.convolution import (
    Convolution,
    few_channels,
    few_halves,
    holds_weights,
    scales_tiles,
    tiled_halves,
)
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Buffer, Kernel, LibraryCall, Program
from fusepass.codegen.ir.transpose import near_step
from fusepass.codegen.passes.anchored import CHANNELS, AnyAnchor, anchored, in_kernel, operator_of
from fusepass.codegen.passes.depthwise import depthwise_of
from fusepass.codegen.passes.few_columns import sums_of_rows
from fusepass.codegen.passes.few_results import few_results_of, results_together
from fusepass.codegen.passes.geometry import geometry_of
from fusepass.codegen.passes.halved import halved_of, lies_in_places
from fusepass.codegen.passes.halved_kernel import Halved
from fusepass.codegen.passes.operands import Seconds, lay_out_operands
from fusepass.codegen.passes.packing import in_places, in_scaled_tiles, pack_weights
from fusepass.codegen.passes.partials import Pieces, reduce_positions
from fusepass.codegen.passes.plain_product import plain_product_of
from fusepass.codegen.passes.products import product_of, without_idle_views
from fusepass.codegen.passes.rematerialisation import Rematerialise, never, rematerialise
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.windows import pool_phases, pool_windows

Choice = Callable[[Program, Kernel], bool]


class AnchorSource(enum.Enum):
    """Who computes a region's anchor."""

    PREFERRED = "preferred"  # whoever is expected to be the faster one
    LIBRARY = "library"
    GENERATED = "generated"  # generated code wherever it can, else the library
    ARITHMETIC = "plain arithmetic"  # the same, convolutions to few channels as windows over all channels, products of few columns as sums
    HALVES = "scaled halves"  # generated code wherever it can, convolutions as products of halves wherever they can be
    TILED_HALVES = "tiled scaled halves"  # the same, with all halves of a tile of the input on the chip wherever they have the room
    REGISTER_STATIONARY = "held scaled halves"  # the same, weights of few channels in registers where they fit and results are only reduced

    @property
    def multiplies_halves(self) -> bool:
        """Whether convolutions become products of halves: those that may be rounded to TF32, of halves, or of few channels."""
        return self in (AnchorSource.HALVES, AnchorSource.TILED_HALVES, AnchorSource.REGISTER_STATIONARY)


@dataclass(frozen=True)
class AnchorOptions:
    """Which anchors become kernels, and how.

    Attributes:
        choose: whether a kernel with an anchor is better than the library's call.
        source: who is to compute anchors, and in which way.
        warps: that multiply together in a convolution; see `Convolution.warps`.
        again: whether a convolution, or windows, are computed twice rather than written for who reads them behind their statistics.
        product_seconds: how long a kernel takes with those that copy its product's operands; None where these are never copied.
        pieces: in how many pieces a kernel reduces over positions.
        kept: elements of a row, at most, that stays on the chip where it is read behind a product or a depthwise convolution.
        shared: whether blocks share the rows of a kernel behind a depthwise convolution, so that these stay on the chip, too.
    """

    choose: Choice
    source: AnchorSource = AnchorSource.GENERATED
    warps: int = 1
    again: Rematerialise = never
    product_seconds: Seconds | None = None
    pieces: Pieces = lambda program, kernel: None
    kept: int = 0
    shared: Choice = lambda program, kernel: False


def generate_anchors(program: Program, builder: Builder, options: AnchorOptions) -> Program:
    """Replace each library convolution and product for which a kernel that would do it is chosen."""
    for call in program.calls:
        program = _Replacing(program, builder, call, options).replaced()
    return without_idle_views(program)


Form = tuple[Program, Kernel]
"""A program with a kernel in the place of a library call, and that kernel."""


@dataclass(frozen=True)
class _Replacing:
    """A library call of a program, and the forms that may replace it, each of which comes before those that it is better than."""

    program: Program
    builder: Builder
    call: LibraryCall
    options: AnchorOptions

    @property
    def result(self) -> Buffer:
        """What the call writes."""
        return self.program.buffer(self.call.result)

    def replaced(self) -> Program:
        """The first form that is chosen, or the program as it is."""
        choose = self.options.choose
        arithmetic = self.options.source is AnchorSource.ARITHMETIC
        if arithmetic and (plain := self._in_arithmetic() or self._in_sums()) is not None:
            return plain if choose(plain, plain.kernels[0]) else self.program
        depthwise = depthwise_of(self.program, self.call)
        if depthwise is None:
            return next((made for made, kernel in self._forms() if choose(made, kernel)), self.program)
        form = self._anchored(depthwise)
        return self.program if form is None or not choose(form, form.kernels[0]) else self._reduced(form)

    def _forms(self) -> Iterator[Form]:
        anchor = _convolution(self.program, self.call, self.options.warps)
        if anchor is None:
            product = product_of(self.program, self.call)
            yield from () if product is None else self._of_anchor(product)
            return
        source = self.program.buffer(anchor.source)
        if self.options.source.multiplies_halves and anchor.groups == 1:
            yield from self._in_places(anchor) if self._takes_places(anchor, source) else self._in_halves(anchor)
        if not source.dtype.is_half:
            yield from self._pooling(anchor)
        yield from self._plain(anchor)

    def _anchored(self, anchor: AnyAnchor, over: int | None = None) -> Program | None:
        return anchored(self.program, self.builder, self.call, anchor, over)

    # ---- plain arithmetic

    def _in_arithmetic(self) -> Program | None:
        """The program with a convolution to few channels as windows, in kernels in the first places; None where the call is something else, or
        several kernels would write what others read."""
        few = few_results_of(self.program, self.call)
        made = None if few is None else self._anchored(few)
        if few is None or made is None:
            return None
        first, *others = made.kernels
        computed = results_together(first, self.builder, few)
        if len(computed) > 1 and any(first.writes & other.reads for other in others):
            return None
        return replace(made, kernels=(*computed, *others))

    def _in_sums(self) -> Program | None:
        """The program with a product of few columns as sums along rows, in a kernel in the first place; None where the call is something else."""
        product = product_of(self.program, self.call)
        form = None if product is None else self._anchored(product)
        kernel = None if form is None else sums_of_rows(form.kernels[0], self.builder)
        return None if form is None or kernel is None else replace(form, kernels=(kernel, *form.kernels[1:]))

    def _reduced(self, form: Program) -> Program:
        """`form` with what reduces over positions of the first kernel's windows in it; what then reads its results alone computes them once more
        where that takes less time."""
        builder, options = self.builder, self.options
        twice = rematerialise(form, builder, 0, options.pieces, options.again)
        return (
            twice
            or reduce_positions(form, builder, 0, options.pieces, kept=options.kept, shared=options.shared)
            or form
        )

    # ---- halves

    def _takes_places(self, anchor: Convolution, source: Buffer) -> bool:
        """Whether halves lie in a tile of the input for all kernel positions: with few channels, or more where that is asked for."""
        channels, of_halves = source.shape[1], source.dtype.is_half
        tiled = self.options.source is AnchorSource.TILED_HALVES and (self.call.tf32 or of_halves)
        places = few_halves(channels, anchor.step) or (tiled and tiled_halves(channels, anchor.step))
        return places and self.options.warps > 1 and not (of_halves and lies_in_places(source))

    def _in_halves(self, anchor: Convolution) -> Iterator[Form]:
        """The same forms as `_of_anchor` gives, as a product of scaled halves, where there is one."""
        program, builder, result = self.program, self.builder, self.result
        halved = halved_of(program, builder, anchor, result)
        if halved is None:
            return
        form = self._anchored(halved)
        across = form is not None and _stores_channels_last(form.kernels[0])
        if any(kernel.reduction_loops and result.name in kernel.reads for kernel in program.kernels):
            for in_runs in (True, False):
                by_phases = halved_of(program, builder, anchor, result, by_phases=True, in_runs=in_runs)
                form = None if by_phases is None else self._anchored(by_phases, CHANNELS)
                if by_phases is not None and form is not None:
                    yield by_phases.completed(form, builder)
        if not across:
            yield from self._pooled(anchor, halved)
        halved = halved_of(program, builder, anchor, result, by_positions=across, in_runs=not across) or halved
        form = self._anchored(halved)
        reduced = halved.reduced(form, builder, self.options.pieces, self.options.kept) if form is not None else None
        for each in filter(None, (reduced, form)):
            yield halved.completed(each, builder)

    def _pooled(self, anchor: Convolution, halved: Halved) -> Iterator[Form]:
        """The form whose kernel replaces the call and the windows over its result; nothing where there are none.

        Its columns follow each other window by window, which no border that is not stored knows.
        """
        builder, call, result = self.builder, self.call, self.result
        found = None if halved.phases > 1 else pool_windows(self.program, builder, result)
        if found is None:
            return
        if any(axis.is_met for axis in halved.product.right.border):
            packed = halved_of(self.program, builder, anchor, result, packed=True)
            assert packed is not None
            halved = packed
        made, load = found
        first, *rest = made.kernels
        value = halved.value(builder, first.rows)
        kernel = rewrite_kernel(first, builder, leaf=lambda node: value if node is load else None)
        kernel = replace(kernel, anchor=in_kernel(halved), origin=(operator_of(call), *kernel.origin))
        calls = tuple(other for other in made.calls if other is not call)
        buffers = tuple(buffer for buffer in made.buffers if buffer.name != result.name)
        yield halved.completed(replace(made, calls=calls, kernels=(kernel, *rest), buffers=buffers), builder)

    def _in_places(self, anchor: Convolution) -> Iterator[Form]:
        """The forms of a convolution that multiplies halves of a tile, scaled ones of float32, as `_of_anchor` orders them.

        With many channels, what reduces over channels and then stores each element is left to a kernel of its own: the arithmetic of several
        reduction loops takes longer in the few warps that these kernels have than reading the result again. Only these reduce along the last axis.
        """
        builder, options = self.builder, self.options
        source, weight = self.program.buffer(anchor.source), self.program.buffer(anchor.weight).shape
        few, floats = few_halves(source.shape[1], anchor.step), not source.dtype.is_half
        scaling = floats and few and scales_tiles(weight[2:])
        held = options.source is AnchorSource.REGISTER_STATIONARY and floats and few and anchor.pooled is None
        held = held and holds_weights(anchor, weight)
        last = len(self.result.shape) - 1
        for over in (CHANNELS, *(() if few else (last,)), None):
            form = self._anchored(anchor, over)
            if form is None or (over == CHANNELS and not few and form.kernels[0].stores):
                continue
            ways = [in_scaled_tiles(form, builder, held=True)] if held else []
            ways.append(in_scaled_tiles(form, builder) if scaling else in_places(form, builder))
            for made in ways:
                place = len(made.kernels) - len(form.kernels)
                reduced = None if over else reduce_positions(made, builder, place, options.pieces)
                twice = None
                if reduced is not None and reduced.kernels[place].stores:
                    twice = rematerialise(made, builder, place, options.pieces, options.again)
                for each in filter(None, (twice, reduced, made)):
                    yield each, each.kernels[place]

    # ---- numbers as they are

    def _pooling(self, anchor: Convolution) -> Iterator[Form]:
        """The forms of a transposed convolution of few channels whose phases are what windows over its result pool, as `_of_anchor` orders them."""
        if not anchor.transposed or not _has_few_channels(self.program, anchor):
            return
        found = pool_phases(self.program, self.builder, self.result, anchor.stride)
        if found is not None:
            made, result, pooled = found
            whole = replace(self.call, result=result.name)
            calls = tuple(whole if each is self.call else each for each in made.calls)
            inside = replace(self, program=replace(made, calls=calls), call=whole)
            yield from inside._of_anchor(replace(anchor, name=f"{result.name}_sum", pooled=pooled))

    def _plain(self, anchor: Convolution) -> Iterator[Form]:
        """The forms of a convolution, and those as a product of its tensors, behind what reduces over channels.

        Of output tiles of few channels what has all their weights on the chip goes before, too.
        """
        found = plain_product_of(self.program, anchor, self.result)
        form = None if found is None else self._anchored(found)
        if found is None or form is None:
            yield from self._of_anchor(anchor)
            return
        known, of_output_tiles = [*self._of_anchor(anchor)], found.of_output_tiles
        if (found.by_samples or of_output_tiles) and _stores_channels_last(form.kernels[0]):
            found = found.turned(self.program)

        def goes_before(kernel: Kernel) -> bool:
            resident = isinstance(kernel.anchor, Convolution) and kernel.anchor.packed is None
            return bool(kernel.cols) or (of_output_tiles and resident)

        yield from (each for each in known if goes_before(each[1]))
        for each in filter(None, (found.reduced(form, self.builder, self.options.pieces, self.options.kept), form)):
            yield found.completed(each, self.builder)
        yield from (each for each in known if not goes_before(each[1]))

    def _of_anchor(self, anchor: Convolution | Product) -> Iterator[Form]:
        """Forms with the anchor in a kernel, first with what is reduced over channels or positions in it.

        With few input channels weights stay on the chip as they are, unless the device has no room for that. Many channels of halves, of one
        group, have no such form: products of the halves take less time.
        """
        builder, options = self.builder, self.options
        kept, layouts, grouped = options.kept, [False], False
        if isinstance(anchor, Convolution):
            pooling = anchor.pooled is not None
            many = not pooling and not _has_few_channels(self.program, anchor)
            if many and anchor.groups == 1 and self.program.buffer(anchor.source).dtype.is_half:
                return
            kept, layouts = 0, ([] if many else [False]) + ([] if pooling else [True])
            grouped = anchor.groups > 1  # no block has all channels
        forms = [None if grouped and over else self._anchored(anchor, over) for over in (CHANNELS, None)]
        for packed in layouts:
            for form, reducing in zip(forms, (True, False), strict=True):
                if form is None:
                    continue
                made, place = (pack_weights(form, builder), 1) if packed else (form, 0)
                if isinstance(anchor, Product) and options.product_seconds is not None:
                    made, place = lay_out_operands(made, builder, place, options.product_seconds)
                reduced = None if reducing else reduce_positions(made, builder, place, options.pieces, kept=kept)
                if reduced is not None:
                    yield reduced, reduced.kernels[place]
                yield made, made.kernels[place]


def _stores_channels_last(kernel: Kernel) -> bool:
    """Whether channels are neighbours in what a kernel stores, whose rows are (sample, channel, *spatial)."""
    _, channel, *spatial = kernel.rows
    return prod(axis.size for axis in spatial) > 1 and any(
        near_step(each.index, channel) == 1 for each in kernel.stores
    )


def _convolution(program: Program, call: LibraryCall, warps: int) -> Convolution | None:
    """The call as a convolution that a kernel could do: of float32 or halves, of inputs of the region."""
    of, dtype = geometry_of(program, call), program.buffer(call.result).dtype
    if of is None or any(each.dtype is not dtype for each in (of.source, of.weight)):
        return None
    if (dtype is not DType.F32 and not dtype.is_half) or not 1 <= len(of.stride) <= 3:
        return None
    rounded = call.tf32 or dtype.is_half  # each half is a number of TF32
    spread = of.stride if of.transposed else (1,) * len(of.stride)
    few = few_channels(of.source.shape[1] // of.groups, spread)
    return Convolution(
        name=f"{call.result}_sum",
        source=of.source.name,
        weight=of.weight.name,
        stride=of.stride,
        padding=of.padding,
        dilation=of.dilation,
        transposed=of.transposed,
        precision=Precision.TF32 if rounded and (warps > 1 or not few) else Precision.FLOAT32,
        warps=warps,
        groups=of.groups,
    )


def _has_few_channels(program: Program, anchor: Convolution) -> bool:
    return few_channels(program.buffer(anchor.source).shape[1] // anchor.groups, anchor.spread)
