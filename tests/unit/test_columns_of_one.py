"""Rows of one element: what is reduced over them takes no reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate, pass_options
from tests.support.regions import region

H200 = DeviceFacts.h200()

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sums": lambda x: (x.sum(1), x.mean(1, keepdim=True), x.prod(1)),
    "extremes": lambda x: (x.amax(1), x.amin(1)),
    "places": lambda x: (*x.max(1), x.argmin(1)),
    "variances": lambda x: (x.var(1, correction=0), x.std(1)),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(1), x.logsumexp(1)),
    "layer norm": lambda x: F.layer_norm(x, (1,), x[:1, 0] * 0 + 2, x[:1, 0] * 0 + 3),
    "unit": lambda x: F.normalize(x, dim=1) * 3,
    "cosine": lambda x: F.cosine_similarity(x, x.sin(), 1),
    "one after another": lambda x: F.layer_norm(x.softmax(1), (1,)).sum(1),
    "between two axes": lambda x: x.reshape(4, 1, -1).sum(1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 1).to(dtype)
    made = region(FUNCTIONS[name], x)
    program = made.passed(pass_options(H200))
    assert not any(kernel.reduction_loops for kernel in program.kernels)
    made.check(program)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "layer norm"])
def test_what_is_not_finite(name: str) -> None:
    x = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)[:, None]
    made = region(FUNCTIONS[name], x)
    made.check(made.passed(pass_options(H200)))


def test_such_rows_are_loaded_in_vectors() -> None:
    made = region(lambda x: F.normalize(x, dim=1), torch.empty(1 << 22, 1, device="meta"), cuda=True)
    (kernel,) = generate(made.program, made.builder, H200).kernels
    assert "vectors of 4" in kernel.schedule


def test_a_column_stays() -> None:
    made = region(lambda x: x.sum(0), torch.randn(24, 1))
    program = made.passed()
    assert any(kernel.reduction_loops for kernel in program.kernels)
    made.check(program)
