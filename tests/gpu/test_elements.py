"""Values that are stored and reduced by one kernel, along rows and over them, and pools that are reduced, on a GPU: as far from float64 as eager
is, the same bits in every run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.numerics.check import check

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


class Of(nn.Module):
    """A function of two inputs and of a number for each feature or channel."""

    def __init__(self, function: Function, features: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return self.function(x, y, self.weight)


def norm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    z = x + y
    return z, F.layer_norm(z, weight.shape, weight, weight)


def norms(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    z = x + F.rms_norm(y, weight.shape, weight)
    return z, F.rms_norm(z, weight.shape, weight)


def sums(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    z = F.gelu(x + weight) * y
    return z, z.sum(0)


def error(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    z = (x - y) * weight
    return (z * z).mean(), z * 2


def gap(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    z = (x + y).relu()
    return z, z.mean((2, 3)) * weight


def batch(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    z = x + y
    return z, F.batch_norm(z, None, None, weight, weight, training=True).relu()


def groups(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    z = x + y
    return z, F.silu(F.group_norm(z, 8, weight, weight))


def mixer(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Between two layers of a network that mixes positions by pooling."""
    z = F.group_norm(x, 1, weight, weight)
    z = y + weight[:, None, None] * (F.avg_pool2d(z, 3, 1, 1, count_include_pad=False) - z)
    return z, F.group_norm(z, 1, weight, weight)


def pooled(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    z = F.max_pool2d(x, 3, 1, 1)
    return F.batch_norm(z, None, None, weight, weight, training=True), F.avg_pool2d(F.gelu(y), 5, 1, 2).mean((2, 3))


def tokens(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (F.layer_norm(x + y, weight.shape, weight, weight).mean(1),)


def load(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    shares = F.softmax(x * weight, -1)
    return shares, shares.float().mean(0), shares.amax(0)


def gradients(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Of LayerNorm's input, weight and bias."""
    wide = x if x.dtype is torch.float64 else x.float()
    mean, rstd = wide.mean(-1, keepdim=True), (wide.var(-1, keepdim=True) + 1e-5).rsqrt()
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(y, x, weight.shape, mean, rstd, weight, weight, [True, True, True])


ROWS = ((4096, 768), (8190, 1023), (300, 9000), (1, 64), (100_000, 24))
IMAGES = ((32, 64, 56, 56), (16, 48, 113, 111), (64, 512, 7, 7), (2, 8, 301, 35))
TOKENS = ((64, 197, 768), (128, 49, 96), (7, 700, 1023), (2, 9000, 8), (1, 40, 64))
MANY = ((16_384, 1024), (100_000, 24), (8190, 1023), (1000, 9000), (4096, 3), (2, 64))
CASES = [
    *((function, shape) for function in (norm, norms, sums, error) for shape in ROWS),
    *((tokens, shape) for shape in TOKENS),
    *((function, shape) for function in (load, gradients) for shape in MANY),
    *((function, shape) for function in (gap, batch, groups, mixer, pooled) for shape in IMAGES),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("function", "shape"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
@torch.no_grad()
def test_values(function: Function, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = Of(function, shape[-1] if function is tokens else shape[1]).to("cuda", dtype)
    inputs = tuple(torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    fused = fusepass.optimize(model, tune="off")
    outcome = check(model, fused, inputs)
    assert outcome.ok, outcome.explain()
    assert fused.report().regions
    assert all(torch.equal(a, b) for a, b in zip(fused(*inputs), fused(*inputs), strict=True))


@pytest.mark.parametrize("function", [norm, sums, error, load, gradients])
@torch.no_grad()
def test_misaligned_inputs(function: Function) -> None:
    model = Of(function, 768).cuda()
    inputs = tuple(torch.randn(2048 * 768 + 1, device="cuda")[1:].view(2048, 768) for _ in range(2))
    outcome = check(model, fusepass.optimize(model, tune="off"), inputs)
    assert outcome.ok, outcome.explain()
