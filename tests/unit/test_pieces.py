"""Loops of a CPU kernel are cut where one piece of a concatenation ends: values stay, and nothing is asked of each element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def images(*channels: int) -> list[Tensor]:
    return [torch.randn(2, each, 5, 3).contiguous(memory_format=torch.channels_last) for each in channels]


CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int]] = {
    "joined": (lambda *x: torch.cat(x, 1).relu() * 2, (32, 16, 48), 3),
    "nested": (lambda a, b, c: torch.cat([torch.cat([a, b], 1).sigmoid(), c.exp()], 1) + 1, (32, 16, 16), 3),
    "padded": (lambda a, b: F.pad(torch.cat([a, b], 1), (0, 0, 0, 0, 8, 24)).tanh() + 1, (32, 32), 4),
    "parts": (lambda a, b: torch.cat([a[:, 8:40], b[:, ::2]], 1) * torch.cat([b, a[:, :16]], 1)[:, :48], (48, 32), 2),
    "short": (lambda *x: torch.cat(x, 1).relu() * 2, (3, 5, 8), 1),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_values_stay(name: str) -> None:
    function, channels, loops = CASES[name]
    inputs = images(*channels)
    fused = fusepass.optimize(Model(function), tune="off")
    torch.testing.assert_close(fused(*inputs), function(*inputs))
    (region,) = fused.report().regions
    assert region.sources[0].text.count("#pragma omp simd") == loops
    assert ("masked_" in region.sources[0].text) == (loops == 1)
