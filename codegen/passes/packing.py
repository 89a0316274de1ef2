"""A convolution's weights in the order in which tensor cores take them, written once per call by a kernel of its own."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.convolution import DEPTH, ROWS, Convolution
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.expr import Builder, Expr, Op
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Role, Store


def pack_weights(program: Program, builder: Builder, position: int) -> Program:
    """`program` with a kernel before the convolution at `position` that writes its weights in slices; see `Convolution.packed_shape`.

    Weights change between calls, so this is done in each: it moves them once, which is little beside the convolution.
    """
    kernel = program.kernels[position]
    anchor = kernel.anchor
    assert isinstance(anchor, Convolution)
    name = program.unused_name(f"{anchor.weight}_packed")
    weight = program.buffer(anchor.weight)
    shape = anchor.packed_shape(weight.shape)
    packed = Buffer(name, DType.F32, shape, contiguous_strides(shape), Role.TEMP)
    packing = _kernel(anchor, weight, packed, builder)
    kernels = list(program.kernels)
    kernels[position : position + 1] = [packing, replace(kernel, anchor=replace(anchor, packed=name))]
    return replace(program, buffers=(*program.buffers, packed), kernels=tuple(kernels))


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
