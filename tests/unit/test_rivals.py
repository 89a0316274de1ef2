"""Other schedules than the rules' one: all fit the device, cover the kernel and give its values, and are ranked."""

from __future__ import annotations

import pytest

from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render
from fusepass.codegen.schedule import ranking, schedule
from fusepass.codegen.schedule.arrangement import Arrangement
from tests.support import kernels as k
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.unit.test_render_cuda import H200, PROGRAMS, SMALL, assert_close, inputs_of
from tests.unit.test_schedule import check_fits

QUICK = ("rows of 768", "mixed layouts", "softmax of 100 channels", "rows in shared memory", "half")


@pytest.mark.parametrize("name", k.SAMPLES)
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


def check_rank(program: Program, rank: int) -> None:
    """Assert that the first kernel of `program` gives its values with the schedule of this rank."""
    inputs = inputs_of(program)
    source = render(program, SMALL, arrangement=Arrangement(0, rank))
    assert source.text != render(program, SMALL).text
    assert_close(program, emulate(program, source, inputs), interpret(program, inputs))
