"""Depthwise convolutions with what reduces over their positions, on a GPU: as far from float64 as eager is, and the same bits in every run."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.numerics.check import check

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


class OfTokens(nn.Module):
    """A causal depthwise convolution of a sequence of tokens, as state space models have before them."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(channels, channels, taps, padding=taps - 1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.convolution(x.transpose(1, 2))[..., : x.shape[1]]
        return F.silu(y).transpose(1, 2).contiguous()


class OfPositions(nn.Module):
    """A depthwise convolution, perhaps transposed, of an image whose channels are neighbours; results as the caller of `behind` wants."""

    def __init__(self, convolution: nn.Module, behind: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.convolution, self.behind = convolution, behind

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.behind(F.gelu(self.convolution(x.permute(0, 3, 1, 2))))


BEHIND: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "as it lies": lambda y: (y,),
    "channel by channel": lambda y: (y.contiguous(),),
    "both, and sums": lambda y: (y.contiguous(), y.permute(0, 2, 3, 1).contiguous(), y.sum((0, 2, 3))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 2048, 1536, 4), (3, 301, 77, 3)])
@torch.no_grad()
def test_tokens(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    samples, length, channels, taps = shape
    model = OfTokens(channels, taps).to("cuda", dtype)
    x = torch.randn(samples, length, channels, device="cuda", dtype=dtype)
    outcome = check(model, _fused(model, x), (x,))
    assert outcome.ok, outcome.explain()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("shape", [(32, 56, 56, 96, 7), (3, 29, 31, 33, 3), (64, 40, 57, 64, 3)])
@pytest.mark.parametrize("name", BEHIND)
@torch.no_grad()
def test_positions(
    name: str, shape: tuple[int, int, int, int, int], make: type[nn.Conv2d | nn.ConvTranspose2d], dtype: torch.dtype
) -> None:
    samples, height, width, channels, window = shape
    convolution = make(channels, channels, window, padding=window // 2, groups=channels)
    model = OfPositions(convolution, BEHIND[name]).to("cuda", dtype)
    x = torch.randn(samples, height, width, channels, device="cuda", dtype=dtype)
    fused = _fused(model, x)
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    for mine, eager in zip(fused(x), model(x), strict=True):
        assert mine.stride() == eager.stride()
