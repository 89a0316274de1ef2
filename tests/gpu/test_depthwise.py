"""Depthwise convolutions with what reduces over their positions, on a GPU: as far from float64 as eager is, and the same bits in every run."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.numerics import check

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Gate(nn.Module):
    """What squeeze and excitation needs: a value, and its mean in each plane."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.convolution(x))
        return y * torch.sigmoid(y.mean((2, 3), keepdim=True))


def depthwise(channels: int, window: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(channels, channels, window, stride, window // 2, groups=channels)


Behind = Callable[[int], nn.Module]
MODELS: dict[str, Behind] = {
    "batch": lambda c: nn.Sequential(depthwise(c, 3), nn.BatchNorm2d(c), nn.ReLU6()),
    "groups": lambda c: nn.Sequential(depthwise(c, 5), nn.GroupNorm(c // 4, c), nn.GELU()),
    "samples": lambda c: nn.Sequential(depthwise(c, 7), nn.GroupNorm(1, c)),
    "planes": lambda c: nn.Sequential(depthwise(c, 3), nn.InstanceNorm2d(c), nn.SiLU()),
    "means": lambda c: nn.Sequential(depthwise(c, 3), nn.Hardswish(), nn.AdaptiveAvgPool2d(1)),
    "gate": lambda c: Gate(depthwise(c, 3)),
    "strided": lambda c: nn.Sequential(depthwise(c, 5, 2), nn.BatchNorm2d(c)),
}
SHAPES = ((32, 96, 112, 112), (64, 384, 14, 14), (128, 512, 7, 7), (16, 48, 113, 111), (3, 8, 301, 35), (5, 64, 28, 30))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_values(name: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    model, x = MODELS[name](shape[1]).to("cuda", dtype), torch.randn(shape, device="cuda", dtype=dtype)
    fused = _fused(model, x)
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert torch.equal(fused(x), fused(x))


def _fused(model: nn.Module, x: Tensor) -> nn.Module:
    """`model` optimised, its candidates compared with eager; what disagrees would warn."""
    fused = fusepass.optimize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusepass.FusepassWarning)
        fused(x)
    return fused


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_what_is_not_finite(name: str, bad: float) -> None:
    model, x = MODELS[name](48).cuda(), torch.randn(16, 48, 113, 111, device="cuda")
    x[3, 5, 60, 70] = bad
    fused = _fused(model, torch.randn_like(x))
    assert torch.equal(fused(x).isfinite(), model(x).isfinite())
