"""Regions under ``torch.autocast``: the types and values that eager gives, whatever is fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.config import override
from fusepass.numerics.check import check
from tests.support.interpreted import interpreted

pytestmark = pytest.mark.models


class Mixed(nn.Module):
    """Operators that autocast narrows, widens, promotes and leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
        self.linear, self.layer = nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.gelu(self.norm(self.convolution(x)))
        pooled = F.adaptive_avg_pool2d(y, 1).flatten(1)
        z = self.layer(F.silu(self.linear(pooled)))
        scores = torch.softmax(z * 2, -1)
        joined = torch.cat([z, scores], 1)
        return y, scores, joined, torch.addcmul(z, z, scores), z.pow(2).sum(), scores.to(torch.bfloat16) + z


class Inside(nn.Module):
    """Switches autocast itself, on and off again."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Mixed()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = self.model(x)
            with torch.autocast("cpu", enabled=False):
                second = self.model(x * 2)
        return (*first, *second, first[0].float().tanh() + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_call_under_autocast(dtype: torch.dtype) -> None:
    model, x = Mixed().eval(), torch.randn(4, 3, 6, 5)
    with interpreted(), override(debug=True):
        fused = fusepass.optimize(model)
        with torch.autocast("cpu", dtype=dtype):
            outcome = check(model, fused, (x,))
            wanted = [result.dtype for result in model(x)]
            with torch.no_grad():
                assert [result.dtype for result in fused(x)] == wanted
        assert outcome.ok, outcome.explain()
        assert dtype in wanted
        assert fused.report().fused_share > 0.5
        outcome = check(model, fused, (x,))  # and without it
        assert outcome.ok, outcome.explain()


def test_autocast_inside_of_the_model() -> None:
    model, x = Inside().eval(), torch.randn(4, 3, 6, 5)
    with interpreted(), override(debug=True):
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
        assert outcome.ok, outcome.explain()
        with torch.no_grad():
            assert [result.dtype for result in fused(x)] == [result.dtype for result in model(x)]
    assert fused.report().fused_share > 0.5
    assert not fused.report().fallbacks


class Within(nn.Module):
    """Writes, so that it is exported, under autocast to a type of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x.view(-1)[:4].mul_(0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                return narrow, self.norm(narrow.float()), self.linear(x).tanh() * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_exported_under_another_autocast(dtype: torch.dtype) -> None:
    model, x = Within(), torch.randn(4, 8)
    with interpreted(), override(debug=True), torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        results, expected = fusepass.optimize(model)(x.clone()), model(x.clone())
    for result, value in zip(results, expected, strict=True):
        assert result.dtype is value.dtype
        torch.testing.assert_close(result, value)
