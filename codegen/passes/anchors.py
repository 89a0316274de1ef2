"""Library convolutions and matrix products that generated code does better become kernels.

What is done to each element of their results is the kernels' epilogue, and so is what reduces over a convolution's channels or
positions.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from fusepass.codegen.ir.program import Kernel, LibraryCall, Program
from fusepass.codegen.ir.transpose import near_step
from fusepass.codegen.passes.anchored import CHANNELS, AnyAnchor, anchored, in_kernel, operator_of
from fusepass.codegen.passes.depthwise import Depthwise, depthwise_of
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


def generate_anchors(
    program: Program,
    builder: Builder,
    choose: Choice,
    pieces: Pieces = lambda program, kernel: None,
    warps: int = 1,
    *,
    halves: bool = False,
    tiled: bool = False,
    held: bool = False,
    plain: bool = False,
    kept: int = 0,
    shared: Choice = lambda program, kernel: False,
    again: Rematerialise = never,
    product_seconds: Seconds | None = None,
) -> Program:
    """Replace each library convolution and product for which `choose` accepts a kernel that would do it.

    `pieces` says in how many pieces such a kernel reduces over positions, `warps` is `Convolution.warps`. With
    `halves`, convolutions that may be rounded to TF32, those of halves and those of few channels, become products of halves, scaled where they are none;
    `tiled` ones take them from a tile of the input with any number of channels, `held` ones hold weights in registers; `again` says
    whether those are computed twice, and depthwise ones. With `plain`, those to few channels, and products of few columns, are plain arithmetic. Behind a product or a
    depthwise convolution, rows of `kept` elements stay on the chip where they are read, behind the latter also those that blocks have `shared`.
    By `product_seconds`, operands of products are copied first.
    """
    for call in program.calls:
        plainly = (_in_arithmetic(program, builder, call) or _in_sums(program, builder, call)) if plain else None
        if plainly is not None:
            program = plainly if choose(plainly, plainly.kernels[0]) else program
            continue
        anchor = depthwise_of(program, call) or _convolution(program, call, warps) or product_of(program, call)
        if anchor is None:
            continue
        if isinstance(anchor, Depthwise):
            form = anchored(program, builder, call, anchor, None)
            if form is not None and choose(form, form.kernels[0]):
                program = _reduced(form, builder, pieces, kept, shared, again)
            continue
        of_halves = isinstance(anchor, Convolution) and program.buffer(anchor.source).dtype.is_half
        forms = _forms(program, builder, call, anchor, pieces, kept, product_seconds)
        if isinstance(anchor, Convolution):
            forms = _plain(program, builder, call, anchor, pieces, kept, forms)
            if not of_halves:
                forms = itertools.chain(_pooling(program, builder, call, anchor, pieces), forms)
        if halves and isinstance(anchor, Convolution) and anchor.groups == 1:
            source = program.buffer(anchor.source)
            channels, rounded = source.shape[1], call.tf32 or of_halves
            places = few_halves(channels, anchor.step) or (tiled and rounded and tiled_halves(channels, anchor.step))
            if places and warps > 1 and not (of_halves and lies_in_places(source)):
                scaled = _in_places(program, builder, call, anchor, pieces, again, held=held)
            else:
                scaled = _in_halves(program, builder, call, anchor, pieces, kept)
            forms = itertools.chain(scaled, forms)
        program = next((made for made, kernel in forms if choose(made, kernel)), program)
    return without_idle_views(program)


def _in_arithmetic(program: Program, builder: Builder, call: LibraryCall) -> Program | None:
    """`program` with a convolution to few channels as windows, in kernels in the first places; None where `call` is something else, or several
    kernels would write what others read."""
    few = few_results_of(program, call)
    made = None if few is None else anchored(program, builder, call, few, None)
    if few is None or made is None:
        return None
    first, *others = made.kernels
    computed = results_together(first, builder, few)
    if len(computed) > 1 and any(first.writes & other.reads for other in others):
        return None
    return replace(made, kernels=(*computed, *others))


def _in_sums(program: Program, builder: Builder, call: LibraryCall) -> Program | None:
    """`program` with a product of few columns as sums along rows, in a kernel in the first place; None where `call` is something else."""
    product = product_of(program, call)
    form = None if product is None else anchored(program, builder, call, product, None)
    kernel = None if form is None else sums_of_rows(form.kernels[0], builder)
    return None if form is None or kernel is None else replace(form, kernels=(kernel, *form.kernels[1:]))


def _reduced(
    program: Program, builder: Builder, pieces: Pieces, kept: int, shared: Choice, again: Rematerialise
) -> Program:
    """`program` with what reduces over positions of the first kernel's windows in it; what then reads its results alone computes them once more
    where that takes less time."""
    twice = rematerialise(program, builder, 0, pieces, again)
    return twice or reduce_positions(program, builder, 0, pieces, kept=kept, shared=shared) or program


def _in_halves(
    program: Program, builder: Builder, call: LibraryCall, anchor: Convolution, pieces: Pieces, kept: int
) -> Iterator[tuple[Program, Kernel]]:
    """The same forms as `_forms` gives, as a product of scaled halves, where there is one."""
    result = program.buffer(call.result)
    halved = halved_of(program, builder, anchor, result)
    if halved is None:
        return
    form = anchored(program, builder, call, halved, None)
    across = form is not None and _stores_channels_last(form.kernels[0])
    if any(kernel.reduction_loops and result.name in kernel.reads for kernel in program.kernels):
        for in_runs in (True, False):
            by_phases = halved_of(program, builder, anchor, result, by_phases=True, in_runs=in_runs)
            form = None if by_phases is None else anchored(program, builder, call, by_phases, CHANNELS)
            if by_phases is not None and form is not None:
                yield by_phases.completed(form, builder)
    if not across:
        yield from _pooled(program, builder, call, anchor, halved)
    halved = halved_of(program, builder, anchor, result, by_positions=across, in_runs=not across) or halved
    form = anchored(program, builder, call, halved, None)
    reduced = halved.reduced(form, builder, pieces, kept) if form is not None else None
    for each in filter(None, (reduced, form)):
        yield halved.completed(each, builder)


def _stores_channels_last(kernel: Kernel) -> bool:
    """Whether channels are neighbours in what a kernel stores, whose rows are (sample, channel, *spatial)."""
    _, channel, *spatial = kernel.rows
    return prod(axis.size for axis in spatial) > 1 and any(
        near_step(each.index, channel) == 1 for each in kernel.stores
    )


def _pooled(
    program: Program, builder: Builder, call: LibraryCall, anchor: Convolution, halved: Halved
) -> Iterator[tuple[Program, Kernel]]:
    """The form whose kernel replaces `call` and the windows over its result; nothing where there are none.

    Its columns follow each other window by window, which no border that is not stored knows.
    """
    result = program.buffer(call.result)
    found = None if halved.phases > 1 else pool_windows(program, builder, result)
    if found is None:
        return
    if any(axis.is_met for axis in halved.product.right.border):
        packed = halved_of(program, builder, anchor, result, packed=True)
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


def _pooling(
    program: Program, builder: Builder, call: LibraryCall, anchor: Convolution, pieces: Pieces
) -> Iterator[tuple[Program, Kernel]]:
    """The forms of a transposed convolution of few channels whose phases are what windows over its result pool, as `_forms` orders them."""
    if not anchor.transposed or not _has_few_channels(program, anchor):
        return
    found = pool_phases(program, builder, program.buffer(call.result), anchor.stride)
    if found is not None:
        made, result, pooled = found
        whole = replace(call, result=result.name)
        made = replace(made, calls=tuple(whole if each is call else each for each in made.calls))
        yield from _forms(made, builder, whole, replace(anchor, name=f"{result.name}_sum", pooled=pooled), pieces, 0)


def _plain(
    program: Program,
    builder: Builder,
    call: LibraryCall,
    anchor: Convolution,
    pieces: Pieces,
    kept: int,
    forms: Iterator[tuple[Program, Kernel]],
) -> Iterator[tuple[Program, Kernel]]:
    """`forms` with those of a convolution as a product of its tensors, behind what reduces over channels.

    Of output tiles of few channels what has all their weights on the chip goes before, too.
    """
    found = plain_product_of(program, anchor, program.buffer(call.result))
    form = None if found is None else anchored(program, builder, call, found, None)
    if found is None or form is None:
        yield from forms
        return
    known, of_output_tiles = [*forms], found.of_output_tiles
    if (found.by_samples or of_output_tiles) and _stores_channels_last(form.kernels[0]):
        found = found.turned(program)

    def goes_before(kernel: Kernel) -> bool:
        resident = isinstance(kernel.anchor, Convolution) and kernel.anchor.packed is None
        return bool(kernel.cols) or (of_output_tiles and resident)

    yield from (each for each in known if goes_before(each[1]))
    for each in filter(None, (found.reduced(form, builder, pieces, kept), form)):
        yield found.completed(each, builder)
    yield from (each for each in known if not goes_before(each[1]))


def _in_places(
    program: Program,
    builder: Builder,
    call: LibraryCall,
    anchor: Convolution,
    pieces: Pieces,
    again: Rematerialise,
    *,
    held: bool,
) -> Iterator[tuple[Program, Kernel]]:
    """The forms of a convolution that multiplies halves of a tile, scaled ones of float32, as `_forms` orders them.

    With many channels, what reduces over channels and then stores each element is left to a kernel of its own: the arithmetic of several
    reduction loops takes longer in the few warps that these kernels have than reading the result again. Only these reduce along the last axis.
    """
    source, weight = program.buffer(anchor.source), program.buffer(anchor.weight).shape
    few, floats = few_halves(source.shape[1], anchor.step), not source.dtype.is_half
    scaling = floats and few and scales_tiles(weight[2:])
    held = held and floats and few and anchor.pooled is None and holds_weights(anchor, weight)
    last = len(program.buffer(call.result).shape) - 1
    for over in (CHANNELS, *(() if few else (last,)), None):
        form = anchored(program, builder, call, anchor, over)
        if form is None or (over == CHANNELS and not few and form.kernels[0].stores):
            continue
        ways = [in_scaled_tiles(form, builder, held=True)] if held else []
        ways.append(in_scaled_tiles(form, builder) if scaling else in_places(form, builder))
        for made in ways:
            place = len(made.kernels) - len(form.kernels)
            reduced = None if over else reduce_positions(made, builder, place, pieces)
            twice = None
            if reduced is not None and reduced.kernels[place].stores:
                twice = rematerialise(made, builder, place, pieces, again)
            for each in filter(None, (twice, reduced, made)):
                yield each, each.kernels[place]


def _forms(
    program: Program,
    builder: Builder,
    call: LibraryCall,
    anchor: AnyAnchor,
    pieces: Pieces,
    kept: int,
    product_seconds: Seconds | None = None,
) -> Iterator[tuple[Program, Kernel]]:
    """`program` with a kernel that replaces `call`, and that kernel; first with what is reduced over channels or positions in it.

    With few input channels weights stay on the chip as they are, unless the device has no room for that. Many channels of halves, of one
    group, have no such form: products of the halves take less time.
    """
    many = pooling = False
    if isinstance(anchor, Convolution):
        pooling = anchor.pooled is not None
        many = not pooling and not _has_few_channels(program, anchor)
        if many and anchor.groups == 1 and program.buffer(anchor.source).dtype.is_half:
            return
    grouped = isinstance(anchor, Convolution) and anchor.groups > 1  # no block has all channels
    forms = [None if grouped and over else anchored(program, builder, call, anchor, over) for over in (CHANNELS, None)]
    kept = kept if isinstance(anchor, Product) else 0
    layouts = ([] if many else [False]) + ([True] if isinstance(anchor, Convolution) and not pooling else [])
    for packed in layouts:
        for form, reducing in zip(forms, (True, False), strict=True):
            if form is None:
                continue
            made, place = (pack_weights(form, builder), 1) if packed else (form, 0)
            if isinstance(anchor, Product) and product_seconds is not None:
                made, place = lay_out_operands(made, builder, place, product_seconds)
            reduced = None if reducing else reduce_positions(made, builder, place, pieces, kept=kept)
            if reduced is not None:
                yield reduced, reduced.kernels[place]
            yield made, made.kernels[place]


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
