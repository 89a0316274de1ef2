"""Variances on a GPU, far from zero and near the ends of the range, however their rows are divided among threads, blocks and kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusepass
from fusepass.numerics.comparison import compare
from tests.support.regions import Functional

pytestmark = pytest.mark.gpu

CASES: list[tuple[tuple[int, ...], int | tuple[int, ...]]] = [
    ((3, 16, 256), 1),
    ((3, 16, 256), (0, 2)),
    ((3, 16, 256), (0, 1, 2)),
    ((2, 1_000_003), -1),
    ((1_000_003, 8), 0),
    ((300_001, 3), 0),
    ((32, 77, 56, 56), (0, 2, 3)),
    ((32, 56, 56, 77), (0, 1, 2)),
    ((40_000, 40), -1),
    ((7, 5_000, 33), 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "dims"), CASES, ids=str)
@torch.no_grad()
def test_a_spread_is_right_far_from_zero(
    shape: tuple[int, ...], dims: int | tuple[int, ...], dtype: torch.dtype
) -> None:
    def spreads(x: Tensor) -> list[Tensor]:
        y = (x if x.dtype == torch.float64 else x.float()) * 0.5
        return [y.std(dims) * 2, y.var(dims) * 0.5]

    fused = fusepass.optimize(Functional(spreads), tune="off")
    for scale, beside in ((1, 1e4), (1, 100), (1e18, 3e18)):
        x = (torch.randn(shape, device="cuda", dtype=torch.float64) * scale + beside).to(dtype)
        outcome = compare(fused(x), spreads(x), spreads(x.double()))
        assert outcome.ok, f"{scale}, {beside}: {outcome.explain()}"
    assert fused.report().regions
