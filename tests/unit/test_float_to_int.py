"""Numbers that an integer type cannot hold, and NaN, become the integer that eager makes of them, wherever it goes on to."""

from __future__ import annotations

import itertools
import platform

import pytest
import torch
from torch import nn

import fusepass

NAN, INF = float("nan"), float("inf")
NUMBERS = [NAN, INF, -INF, 70000.5, -70000.5, -300.7, 300.2, 3e9, -3e9, 5e9, 4294967297.0, 2.0**31, -(2.0**31)]
NUMBERS += [-(2.0**31) - 1, 2.0**31 - 128, 9.3e18, -9.3e18, 2.0**63, -(2.0**63), 1e30, -1e30, 0.5, -0.5, -0.0, -1.5]
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _ThereAndBack(nn.Module):
    """Each integer type of a value that a kernel computes: as it is, as a float again, and as what a sum and an extreme read."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = -x
        wholes = [y.to(dtype) for dtype in (*INTEGERS, torch.bool)]
        back = [whole.to(wide) for whole, wide in itertools.product(wholes, (torch.float32, torch.float64))]
        halves = [y.int().half().isinf(), y.to(torch.int16).bfloat16() * 2, y.long() + 1, y.long() // 1000 % 7]
        return [*wholes, *back, *halves, y.int().double().sum(-1), y.int().float().amax(0), y.byte().float().cumsum(-1)]


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="NUMBERS are integers that vectors of x86 make"
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("route", ["optimize", "compile"])
@pytest.mark.invariant(40)
def test_what_an_integer_cannot_hold_is_as_in_eager(dtype: torch.dtype, route: str) -> None:
    module = _ThereAndBack()
    x = torch.tensor(NUMBERS, dtype=dtype).repeat(3, 7)  # 175 columns: whole vectors, and what is left
    with fusepass.override(tune="off", debug=True):
        fused = fusepass.optimize(module) if route == "optimize" else torch.compile(module, backend="fusepass")
        for ours, theirs in zip(fused(x), module(x), strict=True):
            assert ours.dtype is theirs.dtype
            assert torch.equal(ours, theirs) or torch.equal(ours.isnan(), theirs.isnan())
            if ours.is_floating_point():
                assert torch.equal(ours.signbit(), theirs.signbit())
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_one_number_and_what_is_known_beforehand_too() -> None:
    def chain(x: torch.Tensor) -> list[torch.Tensor]:
        known = torch.full((2,), NAN).int().float() + torch.full((2,), 1e30).long().float()
        return [(x * 2).int().float() * 1.5, (x[:1] / 0).long().float() + x.numel(), known + x[:2].int()]

    for number in (NAN, INF, 3e9, -1e30):
        x = torch.full((3,), number)
        with fusepass.override(tune="off", debug=True):
            for ours, theirs in zip(torch.compile(chain, backend="fusepass")(x), chain(x), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
