"""Windows over what lies channels last: threads have neighbouring results along a line, and read each vector of it once."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render
from fusepass.codegen.schedule import ranking, schedule
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.plan_output_tile import LineTile
from tests.support.convolutions import Case as Convolution
from tests.support.convolutions import generated
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import decode, interpret
from tests.support.regions import region
from tests.support.windows import SMALL, Case, assert_as_eager, prepared
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()

POOLS: dict[str, Case] = {
    "maxima of halves": (lambda x: F.max_pool2d(x, 5, 1, 2), ((2, 16, 11, 13),), torch.float16),
    "maxima": (lambda x: F.max_pool2d(x, 3, 1, 1), ((2, 24, 35, 7),), torch.float32),
    "averages": (lambda x: F.avg_pool2d(x, 3, 1, 1), ((2, 16, 19, 21),), torch.bfloat16),
    "doubles": (lambda x: F.avg_pool2d(x, 3, 1, 1), ((2, 16, 9, 9),), torch.float64),
    "in steps": (lambda x: F.max_pool2d(x, 5, 2, 2), ((2, 16, 31, 30),), torch.float16),
    "without border": (lambda x: F.avg_pool2d(x, 4, 1), ((2, 8, 19, 21),), torch.float16),
    "computed points": (lambda x: F.avg_pool2d(torch.relu(x) * 2, 3, 1, 1), ((2, 16, 19, 21),), torch.float32),
    "wide windows": (lambda x: F.max_pool2d(x, 13, 1, 6), ((2, 8, 20, 20),), torch.float16),
    "wide averages": (lambda x: F.avg_pool2d(x, 13, 1, 6), ((2, 8, 20, 20),), torch.float32),
    "two windows": (lambda x: (F.max_pool2d(x, 3, 1, 1), F.avg_pool2d(x, 3, 1, 1)), ((2, 8, 20, 20),), torch.float16),
    "more for each result": (lambda x: F.max_pool2d(x, 3, 1, 1) - x, ((2, 8, 20, 20),), torch.float32),
}
SAME = {"channels_last": True, "result_last": True, "groups": 16}
DEPTHWISE = {
    "3 x 3": Convolution((2, 16, 12, 10), 16, (3, 3), (1, 1), (1, 1), (1, 1), **SAME),
    "7 x 7": Convolution((2, 16, 9, 10), 16, (7, 7), (1, 1), (3, 3), (1, 1), **SAME),
    "halves": Convolution((2, 16, 12, 10), 16, (3, 3), (1, 1), (1, 1), (1, 1), dtype=DType.F16, **SAME),
    "without border": Convolution((2, 16, 13, 15), 16, (5, 5), (1, 1), (0, 0), (1, 1), **SAME),
}  # fmt: skip
NOT: dict[str, Case] = {
    "few windows need a point": (lambda x: F.max_pool2d(x, 3, 2, 1), ((2, 16, 31, 30),), torch.float16),
    "long windows": (lambda x: F.max_pool2d(x, (65, 1), 1, (32, 0)), ((1, 16, 80, 3),), torch.float16),
    "windows side by side": (lambda x: F.max_pool2d(x, 2), ((2, 16, 32, 30),), torch.float16),
    "channels that are no vectors": (lambda x: F.max_pool2d(x, 3, 1, 1), ((2, 15, 32, 30),), torch.float16),
    "results channels first": (lambda x: F.max_pool2d(x, 3, 1, 1).contiguous(), ((2, 16, 32, 30),), torch.float16),
}


@pytest.fixture(autouse=True)
def _however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have fewer results than are worth it."""
    monkeypatch.setattr("fusepass.codegen.schedule.line_windows._BLOCKS", 0)


def _direct(program: Program) -> list[tuple[int, int, Schedule]]:
    """The ways to do so that are timed: the kernel, the rank among its schedules, and the schedule."""
    return [
        (number, rank, each.plan)
        for number, kernel in enumerate(program.kernels)
        for rank, each in enumerate(ranking(kernel, program, SMALL))
        if isinstance(each.plan, LineTile)
    ]


@needs_compiler
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.thinned(3)
def test_pools(name: str) -> None:
    made, program = prepared(POOLS[name], torch.channels_last)
    ((number, rank, plan),) = _direct(program)
    assert plan.unroll > 1
    results = emulate(program, render(program, SMALL, overrides=ScheduleOverrides(number, rank)), made.memory(program))
    assert_as_eager(made, program, results)


@needs_compiler
@pytest.mark.parametrize("name", DEPTHWISE)
@pytest.mark.parametrize("finite", [True, False])
def test_depthwise(name: str, *, finite: bool) -> None:
    """A weight that is not finite does not meet the border."""
    program = generated(DEPTHWISE[name])
    ((number, rank, _),) = _direct(program)
    inputs, dtype = inputs_of(program), program.buffer("y").dtype
    if not finite:
        inputs["w"][:9] = np.inf
    source = render(program, SMALL, overrides=ScheduleOverrides(number, rank))
    got, wanted = (decode(each["y"], dtype) for each in (emulate(program, source, inputs), interpret(program, inputs)))
    assert np.isfinite(wanted).all() is np.bool_(finite)
    unit = 1e-5 if dtype is DType.F32 else 2e-3
    np.testing.assert_allclose(got, wanted, rtol=unit, atol=unit * np.abs(wanted[np.isfinite(wanted)]).max())


@pytest.mark.parametrize("name", NOT)
def test_threads_have_vectors_of_their_own(name: str) -> None:
    assert not _direct(prepared(NOT[name], torch.channels_last)[1])


def test_inputs_that_begin_anywhere_are_read_element_by_element() -> None:
    _, program = prepared(POOLS["maxima"], torch.channels_last)
    assert not any(
        isinstance(each.plan, LineTile) for each in ranking(program.kernels[0], program, SMALL, aligned=False)
    )


def test_each_vector_is_read_once() -> None:
    """And maxima of halves are found in pairs."""
    images = torch.empty(64, 192, 35, 35, dtype=torch.float16, device="meta").to(memory_format=torch.channels_last)
    made = region(lambda x: F.max_pool2d(x, 5, 1, 2), images)
    program = made.passed(pass_options(H200))
    plan, text = schedule(program.kernels[0], program, H200), render(program, H200).text
    assert (type(plan), plan.width, plan.unroll) == (LineTile, 8, 5)
    assert re.findall(r"point_0 < (\d+)", text) == ["9"]
    assert text.count("fp::load_vector") == 1
    assert "fp::raise_pairs" in text


@needs_compiler
def test_places_that_need_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule._MAX_INT", 0)
    made, program = prepared(POOLS["maxima of halves"], torch.channels_last)
    ((number, rank, _),) = _direct(program)
    source = render(program, SMALL, overrides=ScheduleOverrides(number, rank))
    assert "* int64_t(point_0)" in source.text
    results = emulate(program, source, made.memory(program))
    assert_as_eager(made, program, results)


@needs_compiler
def test_results_do_not_depend_on_which_block_ends_last() -> None:
    """Sums that neighbours share are added up in another order by the threads of another block: one stores them."""
    made, program = prepared(
        (lambda x: F.avg_pool2d(x, 13, 1, 6) * 0.7, ((1, 256, 20, 8),), torch.float32), torch.channels_last
    )
    ((number, rank, plan),) = _direct(program)
    assert 20 % plan.tile_height
    source = render(program, SMALL, overrides=ScheduleOverrides(number, rank))
    assert "fp::Line<" in source.text
    turned = replace(source, text=source.text.replace("blockIdx.x", "(gridDim.x - 1 - blockIdx.x)"))
    first, second = (emulate(program, each, made.memory(program)) for each in (source, turned))
    (output,) = program.outputs
    assert (first[output] == second[output])[~np.isnan(first[output])].all()
