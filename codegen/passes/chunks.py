"""A convolution that multiplies halves of tiles of its input: its operands are packed by kernels before it, in each call, and scaled where they
are no halves."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.convolution import Convolution, ScaledHalves, halves_of_place
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.ir.program import Buffer, Program
from fusepass.codegen.passes.halves import Layout, as_halves, channels_last


def in_places(program: Program, builder: Builder, position: int) -> Program:
    """`program` with the kernels that pack the operands of the convolution at `position` before it; see `few_halves`."""
    kernel = program.kernels[position]
    anchor = kernel.anchor
    assert isinstance(anchor, Convolution)
    source, weight = program.buffer(anchor.source), program.buffer(anchor.weight)
    name, parts = program.unused_prefix(f"{anchor.source}_scaled"), anchor.parts
    filled = halves_of_place(source.shape[1], parts)[-1]
    scales = as_halves(builder, name, source, weight, transposed=anchor.transposed)
    none = (0,) * len(anchor.stride)
    packed, pack = scales.pack_source(builder, f"{name}_source", channels_last(source.shape, none, none, filled, parts))
    weights, pack_weights = scales.pack_weight(builder, f"{name}_weight", weight_layout(weight, anchor, filled))
    halves = ScaledHalves(packed.name, weights.name, tuple(each.name for each in scales.result))
    kernels = list(program.kernels)
    multiplying = replace(kernel, anchor=replace(anchor, halves=halves))
    kernels[position : position + 1] = [*pack, *scales.kernels, pack_weights, multiplying]
    buffers = (*program.buffers, *scales.buffers, packed, weights)
    return replace(program, buffers=buffers, kernels=tuple(kernels))


def weight_layout(weight: Buffer, anchor: Convolution, filled: int) -> Layout:
    """(out, *kernel, [part,] channel)."""
    sizes = (weight.shape[int(anchor.transposed)], *weight.shape[2:], filled)
    out, *places, channel = (Axis(f"w{number}", size) for number, size in enumerate(sizes))
    part = Axis("part", anchor.parts)
    axes = (out, *places, *((part,) if anchor.parts > 1 else ()), channel)
    channels = [axis_index(axis) for axis in ((channel, out) if anchor.transposed else (out, channel))]
    return Layout(axes, (*channels, *map(axis_index, places)), axis_index(part) if anchor.parts > 1 else None)
