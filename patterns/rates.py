"""How fast devices compute and move bytes, in round numbers: for comparisons of costs only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

aten = torch.ops.aten

_TF32_CHANNELS = 32
"""Input channels from which on cuDNN was seen to round every convolution to TF32 that may be (H200, cuDNN 9)."""


def tf32_convolutions() -> bool:
    """Whether float32 convolutions on CUDA may be rounded to TF32; a signature compares the setting."""
    # Unlike `torch.backends.cudnn.allow_tf32` this does not raise where convolutions and RNNs are set differently.
    return bool(torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32")


@dataclass(frozen=True)
class Rates:
    """A class of devices in round numbers, so that a model is rewritten in the same way on each of them.

    Attributes:
        products: floating-point operations per second in float32 and float64 convolutions and matrix products.
        tf32_products: the same in float32 convolutions that the library may round to TF32, of enough channels that it does.
        half_products: the same in float16 and bfloat16.
        scalar: operations per second elsewhere.
        bandwidth: bytes per second.
        launch: seconds to start a kernel or to call a library.
    """

    products: float
    tf32_products: float
    half_products: float
    scalar: float
    bandwidth: float
    launch: float

    def of_product(self, node: fx.Node) -> float:
        """Operations per second of a convolution or matrix product."""
        value = node.all_input_nodes[0].meta["val"]
        if value.dtype.itemsize == 2:
            return self.half_products
        tensor_cores = node.target is aten.convolution.default and value.dtype is torch.float32
        if tensor_cores and value.dim() > 2 and value.shape[1] >= _TF32_CHANNELS and tf32_convolutions():
            return self.tf32_products
        return self.products


RATES = {
    "cpu": Rates(products=1e11, tf32_products=1e11, half_products=1e11, scalar=2e10, bandwidth=2e10, launch=2e-6),
    "cuda": Rates(products=5e13, tf32_products=2e14, half_products=4e14, scalar=2e13, bandwidth=3e12, launch=4e-6),
}
"""By type of device; another type counts as a GPU."""
