"""Enlarged images, of which a thread computes several lines, and reductions of few rows side by side, on a GPU: as far from float64 as eager is."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusepass
from benchmarks.layers import Apply
from fusepass.numerics.check import check

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def enlarged(mode: str, *, corners: bool = False, factor: float = 2) -> Callable[[Tensor], Tensor]:
    return lambda x: F.gelu(F.interpolate(x, scale_factor=factor, mode=mode, align_corners=corners))


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "bilinear": (enlarged("bilinear"), (5, 65, 64, 64)),
    "bilinear, odd": (enlarged("bilinear"), (7, 65, 53, 61)),
    "bilinear, ten lines": (enlarged("bilinear"), (7, 65, 55, 63)),
    "bilinear, four times": (enlarged("bilinear", factor=4), (5, 33, 40, 41)),
    "bilinear, by a half more": (enlarged("bilinear", factor=1.5), (5, 65, 80, 82)),
    "corners": (enlarged("bilinear", corners=True), (5, 65, 50, 51)),
    "bicubic": (enlarged("bicubic"), (5, 65, 64, 63)),
    "trilinear": (enlarged("trilinear"), (3, 17, 20, 22, 24)),
    "channels last": (lambda x: enlarged("bilinear")(x.permute(0, 3, 1, 2)), (5, 50, 51, 64)),
    "added to": (lambda x: enlarged("bilinear")(x) + x.repeat(1, 1, 2, 2), (5, 65, 64, 50)),
}


def checked(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> None:
    """Assert that a model of `function` is fused, and right for each of the `inputs`."""
    model = Apply(function)
    fused = fusepass.optimize(model, tune="off")
    for x in inputs:
        outcome = check(model, fused, (x,))
        assert outcome.ok, outcome.explain()
    assert fused.report().regions


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_enlarged(name: str, dtype: torch.dtype) -> None:
    """Also where memory does not begin at 16 bytes."""
    function, shape = FUNCTIONS[name]
    size = prod(shape)
    x = torch.randn(size + 1, device="cuda").to(dtype)
    checked(function, x[:size].view(shape), x[1:].view(shape))


SIDE_BY_SIDE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "sum": (lambda x: x.sum(0), (700_001, 8)),
    "moments": (lambda x: torch.stack(torch.var_mean(x, 0)), (700_001, 16)),
    "shares": (lambda x: x.log_softmax(0), (300_007, 4)),
    "extremes": (lambda x: x.amax(1), (5, 200_003, 2)),
    "six": (lambda x: F.normalize(x, dim=0), (300_007, 6)),
    "long rows": (lambda x: x.var(1), (50, 200_003)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIDE_BY_SIDE)
@torch.no_grad()
def test_few_rows_side_by_side(name: str, dtype: torch.dtype) -> None:
    function, shape = SIDE_BY_SIDE[name]
    checked(function, torch.randn(shape, device="cuda").to(dtype))
