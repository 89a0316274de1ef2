"""Rows that are written across: blocks of so many that stores fill cache lines, with their tiles in shared memory of either kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.render import render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.rows import STATIC_SHARED
from tests.support.emulate import needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import region

FEW = replace(DeviceFacts.h200(), multiprocessors=2)


def _turned(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],)).transpose(1, 2).contiguous()


@needs_compiler
@pytest.mark.parametrize(
    ("columns", "dtype", "rows", "dynamic"),
    [
        (512, torch.float32, 32, True),
        (384, torch.float32, 32, True),
        (320, torch.float32, 32, False),
        (129, torch.float32, 32, False),
        (512, torch.bfloat16, 64, True),
        (256, torch.float16, 64, False),
        (512, torch.float64, 16, True),
    ],
)
def test_blocks_have_rows_for_whole_lines(columns: int, dtype: torch.dtype, rows: int, dynamic: bool) -> None:
    torch.manual_seed(0)
    made = region(_turned, torch.randn(7, 52, columns).to(dtype))
    program = made.passed(pass_options(FEW))
    (kernel,) = program.kernels
    plan = schedule(kernel, program, FEW)
    assert plan.exchanges
    assert plan.groups == rows
    assert (plan.shared_bytes > STATIC_SHARED) is dynamic
    assert ("extern __shared__" in render(program, FEW).text) is dynamic
    check_emulated(made, program, FEW, 2e-2 if dtype.itemsize == 2 else 1e-5)


@pytest.mark.parametrize(("samples", "rows"), [(64, 32), (32, 16), (16, 8), (2, 8)])
def test_fewer_where_there_are_few(samples: int, rows: int) -> None:
    facts = DeviceFacts.h200()
    program = region(_turned, torch.empty(samples, 196, 512, device="meta")).passed(pass_options(facts))
    (kernel,) = program.kernels
    plan = schedule(kernel, program, facts)
    assert plan.exchanges
    assert plan.groups == rows
