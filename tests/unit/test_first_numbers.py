"""Calls whose first operand is a number, and spreads of numbers far from zero along an axis in the middle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fusepass


class _Of(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_a_number_may_be_the_first_operand() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        y = torch.div(42, x) * 2 + torch.mul(3, x)
        y = y + torch.sub(1, x) * 2 + torch.add(1, x, alpha=2) + torch.pow(2, x) + torch.remainder(5, x)
        return torch.where(x > 1, 1, y) + torch.rsub(x, 4)

    x = torch.rand(4, 8) + 0.5
    with fusepass.override(tune="off", debug=True):
        torch.testing.assert_close(fusepass.optimize(_Of(chain))(x), chain(x))


@pytest.mark.parametrize("dims", [1, (0, 1)])
def test_a_spread_along_a_middle_axis_is_right_far_from_zero(dims: int | tuple[int, ...]) -> None:
    x = torch.randn(3, 16, 256, generator=torch.Generator().manual_seed(0)) + 1e4
    with fusepass.override(tune="off", debug=True):
        fused = fusepass.optimize(_Of(lambda x: x.std(dims) * 2))(x)
    torch.testing.assert_close(fused.double(), x.double().std(dims) * 2, rtol=1e-6, atol=0)
