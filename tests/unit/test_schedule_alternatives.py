"""Other schedules than the rules' one: all fit the device, cover the kernel and give its values, and are ranked."""

from __future__ import annotations

import pytest
import torch

from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render
from fusepass.codegen.schedule import ranking, schedule
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from fusepass.codegen.schedule.rows import STATIC_SHARED, states_of_thread
from tests.support import kernels as k
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import Functional, region
from tests.support.thinned import thinned
from tests.unit.test_render_cuda import H200, PROGRAMS, SMALL, assert_close, inputs_of
from tests.unit.test_schedule import check_fits

QUICK = ("rows of 768", "mixed layouts", "softmax of 100 channels", "rows in shared memory", "half")


@pytest.mark.parametrize("name", k.SAMPLES)
@pytest.mark.thinned(6)
@pytest.mark.invariant(14)
def test_every_rival_fits_the_device_and_covers_the_kernel(name: str) -> None:
    program = k.SAMPLES[name]()
    for kernel in program.kernels:
        ranked = ranking(kernel, program, H200)
        assert ranked[0].plan == schedule(kernel, program, H200)
        assert len({each.plan for each in ranked}) == len(ranked)
        assert [each.seconds for each in ranked[1:]] == sorted(each.seconds for each in ranked[1:])
        for rank, each in enumerate(ranked):
            check_fits(each.plan, kernel)
            assert schedule(kernel, program, H200, rank=rank) == each.plan


@needs_compiler
@pytest.mark.parametrize("name", QUICK)
def test_values(name: str) -> None:
    check_rank(PROGRAMS[name](), 1)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_of_all(name: str) -> None:
    program = PROGRAMS[name]()
    for rank in range(1, len(ranking(program.kernels[0], program, SMALL))):
        check_rank(program, rank)


@needs_compiler
@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_that_leave_through_tiles_of_fewer_vectors_than_threads(dtype: torch.dtype) -> None:
    """Two channels for many groups of threads; a block must not store into the rows of others."""
    made = region(
        Functional(lambda x: x.softmax(1).permute(0, 2, 3, 1).contiguous()), torch.randn(3, 2, 65, 7, dtype=dtype)
    )
    program = made.passed(pass_options(SMALL))
    ranked = ranking(program.kernels[0], program, SMALL)
    wide = [
        rank
        for rank, each in enumerate(ranked)
        if isinstance(each.plan, Columns) and each.plan.exchanges and each.plan.groups > 2
    ]
    assert wide
    for rank in wide:
        check_rank(program, rank)


def test_states_that_meet_fit_the_shared_memory_of_every_kernel() -> None:
    made = region(
        Functional(lambda x: [torch.var(torch.relu(x - i), 0) for i in range(45)]), torch.randn(999, 8192).double()
    )
    program = made.passed(pass_options(H200))
    plans = [(kernel, each.plan) for kernel in program.kernels for each in ranking(kernel, program, H200)]
    assert any(isinstance(plan, Columns) for _, plan in plans)
    for kernel, plan in plans:
        warps = plan.groups // max(32 // plan.lanes, 1)
        if isinstance(plan, Columns) and warps > 1:
            assert warps * plan.lanes * plan.width * states_of_thread(kernel) <= STATIC_SHARED


@needs_compiler
@pytest.mark.parametrize(("cols", "dtype"), thinned([(130, k.F16), (131, k.F32), (1001, k.BF16)], 3))
def test_values_of_sums_of_rows_that_begin_anywhere(cols: int, dtype: k.DType) -> None:
    """There are threads enough for the elements before and after whole vectors."""
    program = k.row_reduction(12, cols, k.ReduceOp.SUM, dtype)
    _, *others = ranking(program.kernels[0], program, SMALL)
    assert any(isinstance(each.plan, Rows) and each.plan.ends_apart for each in others)
    for rank, _ in enumerate(others, 1):
        check_rank(program, rank)


def check_rank(program: Program, rank: int) -> None:
    """Assert that the first kernel of `program` gives its values with the schedule of this rank."""
    inputs = inputs_of(program)
    source = render(program, SMALL, overrides=ScheduleOverrides(0, rank))
    assert source.text != render(program, SMALL).text
    assert_close(program, emulate(program, source, inputs), interpret(program, inputs))
