"""A convolution of few input channels that makes scaled halves of each tile of its input by itself: its weights alone are packed before.

With scales s of each tile, t of each input channel and u of each output channel, as in `halves`::

    x = s t[c] x^        w[o, c, ..] t[c] = u[o] w^[o, c, ..]        result = s u[o] sum(x^ w^)

Here t says how large the weights of a channel are, ``1 / max |w[:, c]|``, so that x^ is what a channel may contribute; s is found by the
kernel, for each tile. A tile in which a channel has so much smaller numbers than another that halves would lose digits of it is computed
by the convolution's definition.
"""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.convolution import Convolution, ScaledWeights, halves_of_place, parts_apart
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Program
from fusepass.codegen.passes.chunks import weight_layout
from fusepass.codegen.passes.halves import LOW_SHIFT, weight_scales_of


def in_scaled_tiles(program: Program, builder: Builder, position: int, *, held: bool = False) -> Program:
    """`program` with the kernels that pack the weights of the convolution at `position` before it; see `few_halves`, and `held` of `ScaledWeights`."""
    kernel = program.kernels[position]
    anchor = kernel.anchor
    assert isinstance(anchor, Convolution)
    source, weight = program.buffer(anchor.source), program.buffer(anchor.weight)
    name = program.unused_prefix(f"{anchor.source}_scaled")
    scales = weight_scales_of(builder, name, weight, transposed=anchor.transposed)
    filled = halves_of_place(source.shape[1], anchor.parts)[-1]
    shift = 0 if parts_apart(source.shape[1], anchor.parts) and not held else LOW_SHIFT
    weights, pack_weights = scales.pack_weight(builder, f"{name}_weight", weight_layout(weight, anchor, filled), shift)
    halves = ScaledWeights(weights.name, scales.channel.name, scales.out.name, held)
    multiplying = replace(kernel, anchor=replace(anchor, halves=halves))
    kernels = list(program.kernels)
    kernels[position : position + 1] = [*scales.kernels, pack_weights, multiplying]
    return replace(program, buffers=(*program.buffers, *scales.buffers, weights), kernels=tuple(kernels))
