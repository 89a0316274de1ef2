"""A convolution's operands in the order in which tensor cores take them, written in each call by kernels before it: weights in slices, or
weights and input as halves, scaled where they are none, or weights alone where the kernel scales tiles of its input itself.

With scales s of each tile, t of each input channel and u of each output channel, the last is as in `halves`::

    x = s t[c] x^        w[o, c, ..] t[c] = u[o] w^[o, c, ..]        result = s u[o] sum(x^ w^)

Here t says how large the weights of a channel are, ``1 / max |w[:, c]|``, so that x^ is what a channel may contribute; s is found by the
kernel, for each tile. A tile in which a channel has so much smaller numbers than another that halves would lose digits of it is computed
by the convolution's definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.convolution import (
    DEPTH,
    ROWS,
    Convolution,
    ScaledHalves,
    ScaledWeights,
    halves_of_place,
    parts_apart,
)
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.expr import Builder, Expr, Op
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Role, Store
from fusepass.codegen.passes.halves import LOW_SHIFT, Layout, as_halves, channels_last, weight_scales_of


def pack_weights(program: Program, builder: Builder) -> Program:
    """`program`, which begins with a convolution, with a kernel before it that writes its weights in slices; see `Convolution.packed_shape`.

    Weights change between calls, so this is done in each: it moves them once, which is little beside the convolution.
    """
    anchor = _convolution(program)
    name = program.unused_name(f"{anchor.weight}_packed")
    weight = program.buffer(anchor.weight)
    shape = anchor.packed_shape(weight.shape)
    packed = Buffer(name, DType.F32, shape, contiguous_strides(shape), Role.TEMP)
    packing = _kernel(anchor, weight, packed, builder)
    return _packed(program, replace(anchor, packed=name), [packing], [packed])


def _convolution(program: Program) -> Convolution:
    anchor = program.kernels[0].anchor
    assert isinstance(anchor, Convolution)
    return anchor


def _packed(program: Program, anchor: Convolution, kernels: Sequence[Kernel], buffers: Sequence[Buffer]) -> Program:
    """`program` with `kernels` that write `buffers` before its first one, whose anchor reads them."""
    first, *others = program.kernels
    found = (*kernels, replace(first, anchor=anchor), *others)
    return replace(program, buffers=(*program.buffers, *buffers), kernels=found)


def _kernel(anchor: Convolution, weight: Buffer, packed: Buffer, builder: Builder) -> Kernel:
    out_channels, in_channels = anchor.group_channels(weight.shape)
    sizes = (packed.shape[0] // anchor.groups, *packed.shape[1:])
    axes = tuple(Axis(f"p{number}", size) for number, size in enumerate(sizes))
    at = [axis_index(axis) for axis in axes]
    group = Axis("group", anchor.groups)
    if anchor.parts:
        high_out, high_in, *places, part, half_out, half_in, low_out, low_in = at
    else:
        high_out, high_in, *places, low_out, low_in, half_in, half_out = at
        part = None
    out = high_out * ROWS + low_out + half_out * (ROWS // 2)
    within = high_in * DEPTH + low_in + half_in * (DEPTH // 2)
    beside = axis_index(group) * (in_channels if anchor.transposed else out_channels)  # of the weight's first dimension
    channels = [beside + within, out] if anchor.transposed else [beside + out, within]
    loaded = builder.load(weight.name, linear([*channels, *places], weight.strides), weight.dtype)
    value = builder.cast(loaded, DType.F32)
    if anchor.precision is Precision.TF32:
        value = builder.apply(Op.TF32, value)
    elif part is not None:
        value = _part(builder, value, part)
    real = (Bound(out, 0, out_channels), Bound(within, 0, in_channels))
    value = builder.masked(real, value, builder.const(0.0, DType.F32))
    place = linear(at, packed.strides) + axis_index(group) * (sizes[0] * packed.strides[0])
    store = Store(packed.name, place, value)
    rows = (group, *axes) if anchor.groups > 1 else axes
    return Kernel(f"{packed.name}_kernel", rows, (), (), (), (store,), ("packed weights",))


def _part(builder: Builder, value: Expr, part: Index) -> Expr:
    """Part 0 of a number, its leading digits, or part 1, the rest."""
    high = builder.apply(Op.TF32, value)
    return builder.masked((Bound(part, 0, 1),), high, builder.apply(Op.SUB, value, high))


def in_places(program: Program, builder: Builder) -> Program:
    """`program`, which begins with a convolution, with the kernels that pack its operands before it; see `few_halves`."""
    anchor = _convolution(program)
    source, weight = program.buffer(anchor.source), program.buffer(anchor.weight)
    name, parts = program.unused_prefix(f"{anchor.source}_scaled"), anchor.parts
    filled = halves_of_place(source.shape[1], parts)[-1]
    scales = as_halves(builder, name, source, weight, transposed=anchor.transposed)
    none = (0,) * len(anchor.stride)
    packed, pack = scales.pack_source(builder, f"{name}_source", channels_last(source.shape, none, none, filled, parts))
    weights, pack_weights = scales.pack_weight(builder, f"{name}_weight", weight_layout(weight, anchor, filled))
    halves = ScaledHalves(packed.name, weights.name, tuple(each.name for each in scales.result))
    kernels, buffers = [*pack, *scales.kernels, pack_weights], [*scales.buffers, packed, weights]
    return _packed(program, replace(anchor, halves=halves), kernels, buffers)


def weight_layout(weight: Buffer, anchor: Convolution, filled: int) -> Layout:
    """(out, *kernel, [part,] channel)."""
    sizes = (weight.shape[int(anchor.transposed)], *weight.shape[2:], filled)
    out, *places, channel = (Axis(f"w{number}", size) for number, size in enumerate(sizes))
    part = Axis("part", anchor.parts)
    axes = (out, *places, *((part,) if anchor.parts > 1 else ()), channel)
    channels = [axis_index(axis) for axis in ((channel, out) if anchor.transposed else (out, channel))]
    return Layout(axes, (*channels, *map(axis_index, places)), axis_index(part) if anchor.parts > 1 else None)


def in_scaled_tiles(program: Program, builder: Builder, *, held: bool = False) -> Program:
    """`program`, which begins with a convolution, with the kernels that pack its weights before it; see `few_halves`, and `held` of `ScaledWeights`."""
    anchor = _convolution(program)
    source, weight = program.buffer(anchor.source), program.buffer(anchor.weight)
    name = program.unused_prefix(f"{anchor.source}_scaled")
    scales = weight_scales_of(builder, name, weight, transposed=anchor.transposed)
    filled = halves_of_place(source.shape[1], anchor.parts)[-1]
    shift = 0 if parts_apart(source.shape[1], anchor.parts) and not held else LOW_SHIFT
    weights, pack_weights = scales.pack_weight(builder, f"{name}_weight", weight_layout(weight, anchor, filled), shift)
    halves = ScaledWeights(weights.name, scales.channel.name, scales.out.name, held)
    kernels, buffers = [*scales.kernels, pack_weights], [*scales.buffers, weights]
    return _packed(program, replace(anchor, halves=halves), kernels, buffers)
