"""Rows of which few lie together, such as two numbers of each point: threads stand along the columns, or along the rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from tests.support.emulate import needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import region

H200 = DeviceFacts.h200()


def total(x: Tensor) -> Tensor:
    return x.sum(1)


def shares(x: Tensor) -> Tensor:
    return x.softmax(1)


def running(x: Tensor) -> Tensor:
    return x.cumsum(1)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype, type[Schedule]]] = {
    "two, reduced": (total, (2000, 64, 2), torch.float32, Rows),
    "two of halves, reduced twice": (lambda x: x.logsumexp(1), (2000, 32, 2), torch.bfloat16, Rows),
    "seven, reduced": (total, (500, 200, 7), torch.float32, Rows),
    "a sector, reduced": (total, (500, 200, 8), torch.float32, Columns),
    "sixteen halves, reduced": (total, (500, 200, 16), torch.float16, Columns),
    "two, long, reduced": (total, (500, 4000, 2), torch.float32, Columns),
    "eight of halves, long, reduced": (lambda x: x.logsumexp(1), (500, 2000, 8), torch.bfloat16, Columns),
    "seven, long, reduced": (total, (500, 4000, 7), torch.float32, Rows),
    "three, short, stored": (shares, (3000, 20, 3), torch.float32, Rows),
    "three, longer, stored": (shares, (3000, 64, 3), torch.float32, Columns),
    "two that a thread has whole, stored": (shares, (3000, 10, 2), torch.float32, Columns),
    "three, scanned": (running, (200, 1000, 3), torch.float32, Rows),
    "four of halves, scanned": (running, (200, 1000, 4), torch.float16, Rows),
    "six, scanned": (running, (200, 1000, 6), torch.float32, Columns),
    "one": (lambda x: x.squeeze(-1).sum(1), (2000, 64, 1), torch.float32, Rows),
}


@pytest.mark.parametrize("name", CASES)
def test_walks(name: str) -> None:
    function, shape, dtype, walk = CASES[name]
    given = region(function, torch.zeros(shape, dtype=dtype), cuda=True)
    program = generate(given.program, given.builder, H200).program
    assert {type(schedule(kernel, program, H200)) for kernel in program.kernels} == {walk}


@needs_compiler
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][-1] is Rows and name != "one"])
def test_values(name: str) -> None:
    """Of fewer and shorter rows, in blocks that have some past the end."""
    function, (samples, columns, together), dtype, walk = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(samples // 100 + 3, min(columns, 70), together).to(dtype)
    given = region(function, x, cuda=True)
    program = generate(given.program, given.builder, H200).program
    assert {type(schedule(kernel, program, H200)) for kernel in program.kernels} == {walk}
    check_emulated(given, program, H200, 2e-5 if dtype is torch.float32 else 1e-2)


def test_a_transposed_depthwise_convolution_is_written_as_it_is_read() -> None:
    """Of the input, neighbours along the image are read by several elements; channels are no neighbours."""
    model = nn.Sequential(nn.ConvTranspose3d(32, 32, 2, 2, groups=32), nn.ReLU()).requires_grad_(False)
    given = region(model, torch.empty(4, 32, 32, 32, 32), cuda=True)
    program = generate(given.program, given.builder, H200, AnchorSource.GENERATED).program
    (kernel,) = program.kernels
    assert not program.calls
    assert kernel.stores[0].index.stride(kernel.rows[-1]) == 1
