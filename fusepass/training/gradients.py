"""Gradients as operators that fuse.

``aten.convolution_backward`` gives up to three, each of which fuses, or goes to the library, as is best for it. That of the input is a
convolution, transposed where the original is not, and that of the bias a sum. The gradient of the weight stays, alone.

The gradient of a function that bends, such as ``relu``, asks on which side of the bend a value is. So it is a choice by a bool, which can be saved
in the value's place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch._ops import OpOverload

from fusepass.codegen.lowering.anchors import asks_for_weight
from fusepass.codegen.lowering.decompositions import CORRECTED
from fusepass.codegen.passes.geometry import per_axis

aten = torch.ops.aten

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def gradients_apart(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Gradients:
    """As ``aten.convolution_backward``, by one operator for each gradient.

    Args:
        gradient: of the result, ``[samples, out, *spatial]``.
        x: the input, ``[samples, in, *spatial]``.
        weight: ``[out, in / groups, *kernel]``, transposed ``[in, out / groups, *kernel]``.
        bias_sizes: nothing depends on it.
        output_mask: which gradients are asked for: of input, weight and bias.

    The other arguments are the convolution's. Sizes are known; a transposed one has less ``output_padding`` than it has stride.
    """
    rank = weight.dim() - 2
    steps, border, apart = ([*per_axis(tuple(each), rank)] for each in (stride, padding, dilation))
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        # Where a window moves by several elements, the last of the input may be in none.
        over = [
            0 if transposed else size - ((count - 1) * step - 2 * beside + hole * (taps - 1) + 1)
            for size, count, taps, step, beside, hole in zip(
                x.shape[2:], gradient.shape[2:], weight.shape[2:], steps, border, apart, strict=True
            )
        ]
        of_input = aten.convolution(gradient, weight, None, steps, border, apart, not transposed, over, groups)
    if output_mask[1]:
        geometry = (stride, padding, dilation, transposed, output_padding, groups)
        of_weight = aten.convolution_backward(gradient, x, weight, None, *geometry, [False, True, False])[1]
    if output_mask[2]:
        of_bias = aten.sum(gradient, [0, *range(2, gradient.dim())])
    return of_input, of_weight, of_bias


def _where_it_pays(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """`gradients_apart` of known sizes, unless the weight's gradient alone is asked for."""
    _, stride, _, _, transposed, over, _, mask = rest
    sizes = (*gradient.shape, *x.shape, *weight.shape)
    known = all(isinstance(size, int) and size > 0 for size in sizes)
    # A convolution of the gradient may then have more windows than the input has elements.
    padded = transposed and max(over) >= min(stride)
    if not known or padded or asks_for_weight(mask):
        return NotImplemented
    return gradients_apart(gradient, x, weight, *rest)


def _of_log_sigmoid(gradient: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """As ``aten.log_sigmoid_backward``, of `x` alone: PyTorch's forward pass saves `buffer` on CPUs only, where it is as large as `x`."""
    return decompositions.log_sigmoid_backward(gradient, x, x.new_empty(0))  # type: ignore[no-any-return]


def _on_a_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` where memory takes longer than what is computed. On a CPU the library finds a bias's gradient on the way to the weight's, and
    eager's vectors of NaN have other gradients than its rest."""

    def applied(gradient: Tensor, *rest: Any) -> Any:
        return function(gradient, *rest) if gradient.device.type == "cuda" else NotImplemented

    return applied


BENDS: dict[OpOverload, Callable[..., Any]] = {
    aten.threshold_backward.default: decompositions.threshold_backward,
    aten.leaky_relu_backward.default: decompositions.leaky_relu_backward,
    aten.hardtanh_backward.default: decompositions.hardtanh_backward,
    aten.hardsigmoid_backward.default: CORRECTED[aten.hardsigmoid_backward.default],
}
"""Gradients that are chosen by comparing a value, as PyTorch writes them."""

ON_A_GPU: dict[OpOverload, Callable[..., Any]] = {aten.convolution_backward.default: _where_it_pays, **BENDS}
"""What is taken apart on GPUs alone."""

DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.log_sigmoid_backward.default: _of_log_sigmoid,
    **{target: _on_a_gpu(function) for target, function in ON_A_GPU.items()},
}
"""What AOTAutograd's tracing, and `make_fx`, take operators apart with."""
