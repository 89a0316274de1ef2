"""How fast the hardware could run a workload: operations and compulsory bytes over measured H200 rates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.layers import Size, Workload

COPY_RATE = 4.27e12
"""Bytes per second that a large device-to-device copy moves, read and written bytes counted."""

CONVOLUTION_RATE = 374e12
"""TF32 operations per second: cuDNN's float32 convolutions may use TF32 by PyTorch's defaults."""

MATMUL_RATE = 125e12
"""A third of the TF32 rate: float32 matrix products may not use TF32, three TF32 products reach float32."""

HALF_RATE = 788e12
"""float16 and bfloat16 operations per second of a large matrix product."""


@dataclass(frozen=True)
class Cost:
    """What a workload must do at least.

    Attributes:
        convolution_flops: operations of convolutions, a multiply-add counted as two.
        matmul_flops: likewise of matrix products.
        bytes: parameters and inputs read once, outputs written once.
        dtype: of the workload.
        largest: elements of the largest tensor that eager makes.
    """

    convolution_flops: int
    matmul_flops: int
    bytes: int
    dtype: torch.dtype
    largest: int

    @property
    def limit_ms(self) -> float:
        """Milliseconds that no implementation can beat: the larger of memory time and tensor-core time."""
        half = self.dtype in (torch.float16, torch.bfloat16)
        convolution = self.convolution_flops / (HALF_RATE if half else CONVOLUTION_RATE)
        matmul = self.matmul_flops / (HALF_RATE if half else MATMUL_RATE)
        return 1e3 * max(self.bytes / COPY_RATE, convolution + matmul)


class _Outputs:
    """Remembers the largest output of any module."""

    def __init__(self, model: nn.Module) -> None:
        self.largest = 0
        for module in model.modules():
            module.register_forward_hook(self._see)

    def _see(self, module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        sizes = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])


def cost(workload: Workload, size: Size = Size.FULL) -> Cost:
    """Counts on tensors of the meta device: nothing is computed and no memory is taken.

    Attention counts every pair of places, those that a causal mask leaves out, too.
    """
    with torch.no_grad():
        model, inputs = workload.model(size, "meta"), workload.inputs(size, "meta")
        outputs = _Outputs(model)
        with FlopCounterMode(display=False) as counter:
            results = tree_leaves(model(*inputs))
    convolutions = matmuls = 0
    for operator, flops in counter.get_flop_counts().get("Global", {}).items():
        if "convolution" in str(operator):
            convolutions += flops
        else:
            matmuls += flops
    return Cost(
        convolution_flops=convolutions,
        matmul_flops=matmuls,
        bytes=sum(t.numel() * t.element_size() for t in (*inputs, *results, *model.parameters())),
        dtype=workload.dtype,
        largest=max(outputs.largest, *(x.numel() for x in inputs)),
    )
