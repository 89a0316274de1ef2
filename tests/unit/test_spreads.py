"""Variances and standard deviations on a CPU: as right as eager's far from zero, and finite wherever eager's are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusepass
from tests.support.regions import Functional

Dims = int | tuple[int, ...]
ALONG: tuple[Dims, ...] = (1, -1, (0, 1), (0, 2), (0, 1, 2))
INF, NAN = float("inf"), float("nan")


def _spreads(dims: Dims) -> Callable[[Tensor], list[Tensor]]:
    def spreads(x: Tensor) -> list[Tensor]:
        variance, mean = torch.var_mean(x, dims, correction=0)
        return [x.std(dims) * 2, x.var(dims) * 0.5, variance * 0.5, mean * 1.5]

    return spreads


def _numbers(scale: float, beside: float) -> Tensor:
    x = torch.randn(3, 16, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (x * scale + beside).float()


@pytest.mark.parametrize("dims", ALONG, ids=str)
@pytest.mark.invariant(39)
def test_a_spread_is_right_far_from_zero_and_near_the_ends_of_the_range(dims: Dims) -> None:
    spreads = _spreads(dims)
    with fusepass.override(tune="off", debug=True):
        fused = fusepass.optimize(Functional(spreads))
        for scale, beside in ((1, 1e4), (1, 100), (1e18, 0), (1e18, 3e18), (1e36, 0), (1e-18, 0)):
            x = _numbers(scale, beside)
            for number, (ours, eager, exact) in enumerate(zip(fused(x), spreads(x), spreads(x.double()), strict=True)):
                assert torch.equal(ours.isfinite(), eager.isfinite())
                finite = eager.isfinite()
                size = exact[finite].abs().clamp_min(x.double().abs().mean() if number == 3 else 0)
                assert bool(((ours[finite] - exact[finite]).abs() <= 1e-6 * size).all())


@pytest.mark.parametrize("dims", ALONG, ids=str)
def test_infinities_and_nan_make_what_they_make_in_eager(dims: Dims) -> None:
    spreads = _spreads(dims)
    with fusepass.override(tune="off", debug=True):
        fused = fusepass.optimize(Functional(spreads))
        for bad in (INF, -INF, NAN):
            x = _numbers(1, 0)
            x[1, 3, 77] = bad
            for ours, eager in zip(fused(x)[:3], spreads(x)[:3], strict=True):
                torch.testing.assert_close(ours, eager, equal_nan=True)
