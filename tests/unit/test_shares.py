"""Softmaxes whose results have 16 bits: powers of two whose subtrahend is rounded, and extremes of halves; what they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region, tensor_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=2, l2_bytes=1 << 20)
HALVES = (torch.float16, torch.bfloat16)


def _rows(columns: int, dtype: torch.dtype) -> Tensor:
    """Rows that are near 0, far from it on both sides, beyond what a product with log2(e) may be, equal, and not finite."""
    torch.manual_seed(0)
    x = torch.randn(12, columns) * 3
    x[1] += 60_000
    x[2] -= 60_000
    x[3] = torch.where(x[3] > 2, torch.finfo(dtype).max, x[3])
    x[4] = torch.finfo(dtype).max
    x[5] = -torch.finfo(dtype).max
    x[6, ::3] = -torch.inf
    x[7] = -torch.inf
    x[8, 5] = torch.inf
    x[9, 7] = torch.nan
    x[10] = 1000.0
    x[11] = torch.where(x[11] > 0, 3.0e9, x[11]).clamp(max=torch.finfo(dtype).max)
    return x.to(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (lambda x: x.softmax(1), 40),  # a row has part of a warp
        (lambda x: x.softmax(1), 403),  # rows begin anywhere
        (lambda x: x.softmax(1), 2048),  # halves stay packed
        (lambda x: x.t().contiguous().softmax(0), 40),  # along columns
        (lambda x: (x.float() * 0.5).softmax(1).to(x.dtype) * 2, 256),
        (lambda x: x.amax(1), 264),
        (lambda x: x.amin(1), 403),
        (lambda x: x.amin(1) + x.amax(1).float(), 264),
    ],
)
@pytest.mark.thinned(5)
def test_values(function: Callable[[Tensor], Tensor], columns: int, dtype: torch.dtype) -> None:
    made = region(function, _rows(columns, dtype))
    program = made.passed(pass_options(SMALL))
    memory = emulate(program, render(program, SMALL), made.memory(program))
    for name, exact, eager in zip(program.outputs, made.exact(), made.eager(), strict=True):
        got = tensor_of(memory[name], program.buffer(name)).double()
        assert torch.equal(got.isnan(), eager.isnan())
        ulp = torch.finfo(eager.dtype).eps
        torch.testing.assert_close(got, exact.double(), rtol=ulp, atol=2.0**-25, equal_nan=True)


def test_a_share_takes_one_instruction_before_its_power() -> None:
    made = region(lambda x: x.softmax(1), torch.empty(4096, 4096, dtype=torch.float16, device="meta"))
    text = render(made.passed(pass_options(DeviceFacts.h200())), DeviceFacts.h200()).text
    assert text.count("fp::exp2_few((fp::cast<float>(kept_0[u][v]) * ") == 2
    assert "fp::half pushed_0[8];" in text  # of which the largest is found in pairs
