"""Output tiles whose rows are reduced in a turn of their own, and threads that stand below each other."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.render import render
from fusepass.codegen.schedule import ranking, schedule
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.plan_output_tile import OutputTile, WindowTile
from fusepass.codegen.schedule.shape import ceil
from fusepass.codegen.schedule.two_stage_windows import iterations_of_access
from tests.support.convolutions import DEPTHWISE, generated
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region
from tests.support.windows import SMALL, Case, assert_as_eager, prepared, ways
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()

CASES: dict[str, Case] = {
    "wide windows": (lambda x: F.max_pool2d(x, 13, 1, 6), ((2, 8, 20, 20),), torch.float32),
    "pairs of halves": (lambda x: F.max_pool2d(x, 13, 1, 6), ((2, 8, 20, 20),), torch.bfloat16),
    "odd images": (lambda x: F.max_pool2d(x, 5, 1, 2), ((2, 16, 13, 13),), torch.float32),
    "odd images of halves": (lambda x: F.avg_pool2d(x, 3, 1, 1), ((3, 8, 7, 7),), torch.float16),
    "rows of three": (lambda x: F.avg_pool2d(x, 3, 1, 1), ((4, 40, 9, 3),), torch.float16),
    "doubles": (lambda x: F.avg_pool2d(x, 3, 1, 1), ((2, 6, 13, 13),), torch.float64),
    "images apart": (lambda x: F.max_pool2d(x[:, ::2], 3, 1, 1), ((2, 6, 9, 9),), torch.float16),
    "channels apart in two ways": (lambda x: F.max_pool2d(x[:, :3], 3, 1, 1), ((4, 5, 9, 9),), torch.float32),
    "rows apart": (lambda x: F.max_pool2d(x[..., 2:-2], 3, 1, 1), ((2, 6, 19, 25),), torch.float16),
    "in steps": (lambda x: F.max_pool2d(x, 5, 2, 2), ((2, 6, 31, 45),), torch.float16),
    "without border": (lambda x: F.avg_pool2d(x, 4, 1), ((3, 6, 17, 21),), torch.float32),
    "holes": (lambda x: F.max_pool2d(x, 3, 1, 1, 2), ((2, 6, 15, 17),), torch.float32),
    "bands of an image": (lambda x: F.max_pool2d(x, 7, 1, 3), ((1, 3, 90, 150),), torch.float32),
    "parts of rows": (lambda x: F.max_pool2d(x, 9, 1, 4), ((1, 2, 40, 600),), torch.float32),
    "computed points": (
        lambda x, a: F.avg_pool2d(torch.relu(x * a), 3, 1, 1),
        ((2, 8, 13, 13), (8, 1, 1)),
        torch.float32,
    ),
    "two inputs": (lambda x, y: F.avg_pool2d(x * y, 5, 1, 2), ((2, 8, 13, 13), (2, 8, 13, 13)), torch.float32),
    "two windows": (
        lambda x: (F.avg_pool2d(x, 3, 1, 1), F.max_pool2d(x, 3, 1, 1)),
        ((2, 6, 17, 17),),
        torch.float16,
    ),
    "more for each result": (lambda x: F.avg_pool2d(x, 5, 1, 2) - x, ((2, 6, 12, 12),), torch.float32),
    "one axis": (lambda x: F.avg_pool1d(x, 25, 1, 12), ((8, 7, 721),), torch.float32),
    "one axis of halves": (lambda x: F.avg_pool1d(x, 25, 1, 12), ((2, 7, 1440),), torch.float16),
    "one row": (lambda x: F.max_pool1d(x, 15, 1, 7), ((1, 1, 900),), torch.float32),
}


def along_of(plan: Schedule) -> int:
    """Of how many neighbouring results a thread finds at once what a row comes to; 0 for none."""
    return plan.along if isinstance(plan, WindowTile) else 0


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(5)
def test_values(name: str) -> None:
    """Of all ways to do it that are timed: for results of one to four neighbours that leave by themselves or together."""
    made, program = prepared(CASES[name])
    ranks = [rank for rank, plan in enumerate(ways(program)) if along_of(plan)]
    assert ranks
    for rank in ranks:
        source = render(program, SMALL, overrides=ScheduleOverrides(len(program.kernels) - 1, rank))
        assert "_rows" in source.text
        assert_as_eager(made, program, emulate(program, source, made.memory(program)))


@needs_compiler
def test_inputs_that_begin_anywhere() -> None:
    made, program = prepared(CASES["wide windows"])
    source = render(program, SMALL, aligned=False)
    assert "begin_copy_bytes<4>" in source.text or "begin_copy_or<1>" in source.text
    assert_as_eager(made, program, emulate(program, source, made.memory(program), shift=1))


@needs_compiler
def test_places_that_need_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule._MAX_INT", 0)
    made, program = prepared(CASES["odd images"])
    source = render(program, SMALL)
    assert "const int64_t first_image" in source.text
    assert "_rows" in source.text
    assert_as_eager(made, program, emulate(program, source, made.memory(program)))


@needs_compiler
def test_what_is_reduced_over_positions() -> None:
    made = region(lambda x: F.max_pool2d(x, 5, 1, 2).mean((2, 3)), torch.randn(4, 16, 28, 28))
    program = made.passed(pass_options(SMALL))
    assert along_of(schedule(program.kernels[0], program, SMALL))
    assert_as_eager(made, program, emulate(program, render(program, SMALL), made.memory(program)))


def test_each_row_is_read_and_reduced_once() -> None:
    """Of images that lie together only what is there comes to shared memory; who has a whole row knows where it ends."""
    shape = (64, 512, 20, 20)
    made = region(lambda x: F.max_pool2d(x, 13, 1, 6), torch.empty(shape, device="meta"))
    program = made.passed(pass_options(H200))
    plan, text = schedule(program.kernels[0], program, H200), render(program, H200).text
    assert plan.along == 20
    assert [found[:3] for found in re.findall(r"fp::Line<(\d+), 1, 1, (\d+), \d+>::reduce<(\d+)>", text)] == [
        ("20", "13", "1"),
        (str(plan.unroll), "13", "4"),
    ]
    (is_there,) = re.findall(r"is_there_\d+\[32\] = \{(.*)\};", text)
    assert is_there.split(", ") == ["false"] * 6 + ["true"] * 20 + ["false"] * 6
    (nbytes,) = re.findall(r"reinterpret_cast<fp::Max<float>\*>\(\w+ \+ (\d+)\)", text)
    assert int(nbytes) < plan.planes * 20 * 20 * 4 + 100


def test_windows_that_take_iterations_and_those_that_do_not() -> None:
    """Threads that share little of what rows come to find it themselves; a depthwise convolution has other weights for each row."""
    wide = region(lambda x: F.avg_pool1d(x, 25, 1, 12), torch.empty(64, 321, 721, device="meta"))
    program = wide.passed(pass_options(H200))
    assert along_of(schedule(program.kernels[0], program, H200))
    pairs = region(lambda x: F.max_pool2d(x, 2), torch.empty(64, 64, 112, 112, device="meta"))
    program = pairs.passed(pass_options(H200))
    assert not isinstance(schedule(program.kernels[0], program, H200), OutputTile)
    depthwise = generated(DEPTHWISE["depthwise, wide"])
    assert not any(along_of(each.plan) for each in ranking(depthwise.kernels[0], depthwise, H200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_computed_before_is_so_about_once(dtype: torch.dtype) -> None:
    """So it is not stored before."""
    images = torch.empty(32, 96, 112, 112, dtype=dtype, device="meta")
    made = region(lambda x: F.avg_pool2d(F.gelu(x), 3, 1, 1), images, cuda=True)
    program = made.passed(pass_options(H200))
    (kernel,) = program.kernels
    plan = schedule(kernel, program, H200)
    assert plan.along
    strips = ceil(112, plan.along)
    assert strips * (plan.along + 2) * (plan.tile_height + 2) < 1.4 * 112 * plan.tile_height


@needs_compiler
@pytest.mark.parametrize("name", ["depthwise", "depthwise, odd", "depthwise, 1d, odd"])
def test_threads_below_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of odd lengths lie in different banks of shared memory; values are the same."""
    program = generated(DEPTHWISE[name])
    inputs = inputs_of(program)
    timed = ranking(program.kernels[0], program, SMALL)
    rank = next(
        number
        for number, each in enumerate(timed)
        if isinstance(each.plan, WindowTile) and each.plan.exchanges and each.plan.groups > 1
    )
    plan = timed[rank].plan
    found = []
    for upright in (False, True):
        turned = replace(plan, upright=upright)
        monkeypatch.setattr("fusepass.codegen.schedule.output_tiles", lambda *_, turned=turned, **__: [(turned, 0.0)])
        source = render(program, SMALL)
        assert (f"lane = threadIdx.x / {plan.groups}" in source.text) is upright
        found.append(emulate(program, source, inputs)["y"])
    assert (found[0] == found[1]).all()


def test_images_that_are_reduced_have_their_threads_beside_each_other() -> None:
    made = region(lambda x: (y := F.max_pool2d(x, 3, 1, 1), y.mean((2, 3))), torch.empty(256, 832, 7, 7, device="meta"))
    program = made.passed(pass_options(H200))
    plans = [each.plan for kernel in program.kernels for each in ranking(kernel, program, H200)]
    assert any(isinstance(plan, WindowTile) and plan.planes > 1 for plan in plans)
    assert not any(isinstance(plan, WindowTile) and plan.upright and plan.planes > 1 for plan in plans)


@pytest.mark.parametrize(
    ("step", "nbytes", "cycles"),
    [
        (4, 4, 1),
        (0, 4, 1),
        (8, 4, 2),
        (128, 4, 32),
        (52, 4, 1),
        (2, 2, 1),
        (14, 2, 2),
        (16, 16, 4),
        (80, 16, 4),
        (128, 16, 32),
        (8, 8, 2),
    ],
)
def test_repeated_accesses(step: int, nbytes: int, cycles: int) -> None:
    """Neighbouring threads that read `nbytes` each, `step` bytes apart."""
    assert iterations_of_access([thread * step for thread in range(32)], nbytes) == cycles
