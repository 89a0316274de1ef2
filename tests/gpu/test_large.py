"""Tensors of more than 2^31 elements, one kind of kernel after another: 32 bits do not number them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import compare, exact, observe
from fusepass.report.report import RegionState

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(f"error::{FusepassWarning.__module__}.FusepassWarning")]

_NEEDED = 60 << 30
"""Bytes of free memory: the largest case has 9 GB of input, as much result, and scaled halves of the input."""


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@dataclass(frozen=True)
class _Case:
    """A model that computes each sample, a slice of the first axis, by itself; inputs or results have more than 2^31 elements."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float16
    samples: int = 1  # that are compared at a time


def _cases() -> dict[str, _Case]:
    convolution = lambda: nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())  # noqa: E731
    return {
        "pointwise": _Case(lambda: _Function(lambda x: x.tanh() * 2), (2_200_003, 1_000), samples=999),
        "transposition": _Case(lambda: _Function(lambda x: (x.transpose(1, 2) * 2).contiguous()), (3, 26_755, 26_755)),
        "rows": _Case(lambda: nn.LayerNorm(1_000), (2_200_003, 1_000), samples=999),
        "long rows": _Case(lambda: nn.Softmax(1), (33, 67_000_001)),
        "scans": _Case(lambda: _Function(lambda x: (x * 0.01).cumsum(1)), (2_200_003, 1_000), samples=999),
        "columns": _Case(lambda: _Function(lambda x: x - x.mean(1, keepdim=True)), (3, 40_000, 18_000)),
        "windows": _Case(lambda: nn.MaxPool2d(3, 2, 1), (40, 64, 920, 920)),
        "few channels": _Case(lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU()), (100, 3, 828, 828)),
        "transposed": _Case(
            lambda: nn.Sequential(nn.ConvTranspose2d(16, 32, 4, 2, 1), nn.Hardswish()), (64, 16, 520, 520)
        ),
        "many channels": _Case(convolution, (128, 64, 516, 516)),
        "many channels, float32": _Case(convolution, (128, 64, 516, 516), torch.float32),
        "product": _Case(lambda: nn.Sequential(nn.Linear(512, 32_768), nn.GELU()), (66_001, 512), samples=999),
        "product, float32": _Case(
            lambda: nn.Sequential(nn.Linear(256, 32_768), nn.ReLU()), (66_001, 256), torch.float32, 999
        ),
    }


def _problem(case: _Case) -> str:
    """What is wrong with the first, the middle and the last samples; nothing is an empty string."""
    torch.manual_seed(0)
    model = case.model().to("cuda", case.dtype)
    x = torch.randn(case.shape, device="cuda", dtype=case.dtype)
    optimised = fusepass.optimize(model, tune="off")
    with torch.no_grad():
        poisoned = torch.full_like(model(x), float("nan"))
        assert max(x.numel(), poisoned.numel()) > 1 << 31
        del poisoned
        result = optimised(x)
    (region,) = optimised.report().regions
    if region.state is not RegionState.FUSED:
        return f"{region.state.value}: {region.reason}"
    size, last = case.samples, len(x) - case.samples
    for first in {0, last // 2, last}:
        part = x[first : first + size].clone()
        with torch.no_grad():
            found = {"output": result[first : first + size].clone()}
            eager = {"output": observe(model, (part,))["output"]}
            outcome = compare(found, eager, {"output": exact(model, (part,))["output"]})
        if not outcome.ok:
            return f"samples from {first}: {outcome.explain()}"
    return ""


def test_elements_beyond_2_to_the_31() -> None:
    """One test of all, as several at a time would not fit the device."""
    if torch.cuda.mem_get_info()[0] < _NEEDED:
        pytest.skip("less than 60 GiB of memory are free")
    problems = {}
    for name, case in _cases().items():
        problems[name] = _problem(case)
        torch.cuda.empty_cache()
    assert not {name: problem for name, problem in problems.items() if problem}
