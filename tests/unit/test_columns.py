"""Long columns in registers: pieces of lines, whole runs of rows, halves that stay packed; what schedules they get and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.passes.split import SplitPolicy
from fusepass.codegen.render import render, render_general
from fusepass.codegen.render.numbers import plain
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_rows import Columns
from tests.support.emulate import emulate, needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import region, tensor_of

INF, NAN = float("inf"), float("nan")
H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1, l2_bytes=4096)  # which few rows fill

Case = tuple[tuple[int, ...], torch.dtype, tuple[int, int, int, int, bool]]
# shape; width, lanes, groups, blocks of a multiprocessor, whether packed
CASES: dict[str, Case] = {
    "lines": ((2, 560, 64), torch.float32, (2, 16, 32, 2, False)),
    "lines, a row a thread": ((2, 700, 64), torch.float32, (1, 32, 16, 2, False)),
    "half lines": ((2, 1100, 64), torch.float32, (1, 16, 32, 2, False)),
    "half lines, one block": ((2, 2000, 64), torch.float32, (2, 8, 64, 1, False)),
    "quarters of lines": ((2, 3200, 64), torch.float32, (2, 4, 128, 1, False)),
    "lines of halves": ((2, 530, 128), torch.bfloat16, (2, 32, 16, 2, True)),
    "half lines of halves": ((2, 1100, 64), torch.float16, (2, 16, 32, 2, True)),
    "short runs": ((40, 100, 49), torch.float32, (1, 49, 4, 0, False)),
    "quarters of lines of halves": ((2, 2000, 64), torch.bfloat16, (2, 8, 64, 2, True)),
    "half lines of short runs": ((8, 1100, 49), torch.float32, (1, 16, 32, 1, False)),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "function", [lambda x: x.softmax(1), lambda x: x - x.amax(1, keepdim=True)], ids=["softmax", "maximum"]
)
@pytest.mark.thinned(5)
def test_values(name: str, function: Callable[[Tensor], Tensor]) -> None:
    shape, dtype, said = CASES[name]
    torch.manual_seed(0)
    made = region(function, (4 * torch.randn(shape)).to(dtype))
    program = made.passed(pass_options(SMALL))
    plan = schedule(program.kernels[0], program, SMALL)
    assert isinstance(plan, Columns)
    assert plan.keep.in_registers
    assert (plan.width, plan.lanes, plan.groups, plan.resident, plan.keep is Keep.PACKED) == said
    results = emulate(program, render(program, SMALL), made.memory(program))
    for output, want in zip(program.outputs, made.exact(), strict=True):
        torch.testing.assert_close(tensor_of(results[output], program.buffer(output)), want)


@needs_compiler
@pytest.mark.parametrize("name", ["half lines of halves", "half lines, one block", "short runs"])
def test_sizes_that_come_at_run_time(name: str) -> None:
    shape, dtype, _ = CASES[name]
    torch.manual_seed(0)
    made = region(lambda x: x.softmax(1), (4 * torch.randn(shape)).to(dtype))
    program = made.passed(pass_options(SMALL))
    source = render_general(program, SMALL)
    results = emulate(program, replace(source, text=plain(source.text)), made.memory(program))
    for output, want in zip(program.outputs, made.exact(), strict=True):
        torch.testing.assert_close(tensor_of(results[output], program.buffer(output)), want)


def test_few_rows_are_shared_by_more_threads() -> None:
    made = region(lambda x: x.softmax(1), torch.empty(2, 512, 49, device="meta"))
    program = made.passed(pass_options(H200))
    assert schedule(program.kernels[0], program, H200).lanes == 8


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1024, 1030])
def test_long_columns_that_are_only_reduced_are_read_once(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (4 * torch.randn(2, size, 35)).to(dtype)
    x[0, 3, 1], x[0, :, 2], x[1, 5, 3], x[1, 6, 4] = INF, -INF, -INF, NAN
    made = region(lambda x: x.logsumexp(1), x)
    program = made.passed(pass_options(SMALL))
    assert (program.kernels[0].reduction_loops[0][0].op is ReduceOp.SOFTMAX) is (size > 1024)
    results = emulate(program, render(program, SMALL), made.memory(program))
    for output, want in zip(program.outputs, made.exact(), strict=True):
        torch.testing.assert_close(tensor_of(results[output], program.buffer(output)), want, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "wanted"),
    [
        ((32, 4096, 4095), torch.float32, (512, 8, 256)),
        ((32, 4096, 4095), torch.float16, (512, 16, 256)),
        ((145, 64, 1023), torch.float32, (128, 8, 1159)),  # more threads would leave some multiprocessors idle
        ((290, 64, 512), torch.float32, (32, 4, 1160)),  # vectors of four: four threads share a column
    ],
)
def test_blocks_of_single_columns(shape: tuple[int, ...], dtype: torch.dtype, wanted: tuple[int, int, int]) -> None:
    made = region(lambda x: x.amax(1), torch.empty(shape, dtype=dtype, device="meta"))
    program = made.passed(pass_options(H200))
    plan = schedule(program.kernels[0], program, H200)
    assert (plan.lanes, plan.unroll, plan.blocks) == wanted


@needs_compiler
@pytest.mark.parametrize("shape", [(2, 20003, 16), (3, 50003)])
@pytest.mark.parametrize("function", [lambda x: x.var(1), lambda x: x.logsumexp(1)], ids=["variance", "logarithm"])
def test_what_is_costly_is_found_for_all_steps_at_once_but_the_last(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    made = region(function, torch.randn(shape), cuda=True)
    program = made.passed(replace(pass_options(SMALL), split=SplitPolicy(1, 1 << 20, 1)))
    text = render(program, SMALL).text
    assert ".push_many(" in text
    assert ".push(" in text
    check_emulated(made, program, SMALL, 2e-6)
