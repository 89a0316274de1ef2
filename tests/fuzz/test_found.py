"""Models that were wrong when random ones were tried, made smaller; with compiled kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.config import override
from fusepass.numerics import check

pytestmark = pytest.mark.models


class WindowOverRows(nn.Module):
    """A pool over what rows were reduced to reads other rows than its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_max_pool3d(x.prod(4, keepdim=True), 1)


class ConditionalSum(nn.Module):
    """Unrolled and vectorised, `condition ? a * b + c : d * 2` is miscompiled by GCC 12 where it knows the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return torch.cat([y, y * 2], 3)


@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [
        (WindowOverRows(), (1, 1, 2, 3, 8), torch.bfloat16),
        (WindowOverRows(), (2, 3, 2, 3, 8), torch.float32),
        (ConditionalSum(), (1, 8, 1, 7), torch.bfloat16),
        (ConditionalSum(), (1, 8, 1, 4), torch.float32),
        (ConditionalSum(), (1, 8, 1, 7), torch.float16),
    ],
)
def test_once_wrong(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model, x = model.to(dtype), torch.rand(shape).to(dtype)
    with override(debug=True, algebra="off"):
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert fused.report().fused_share == 1
