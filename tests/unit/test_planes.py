"""Windows over three axes that overlap: blocks that go through planes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.planes import Planes
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan_output_tile import PlaneTile
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region, tensor_of
from tests.support.thinned import thinned

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)
DEVICES = {"small": SMALL, "h200": H200}

Case = tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]
CASES: dict[str, Case] = {
    "average": (lambda x: F.avg_pool3d(x, 3, 1, 1), (2, 3, 6, 9, 16), torch.float32),
    "average of what is there": (
        lambda x: F.avg_pool3d(x, 3, 1, 1, count_include_pad=False),
        (2, 2, 5, 8, 12),
        torch.float32,
    ),
    "maximum of halves, odd rows": (lambda x: F.max_pool3d(x, 3, 1, 1), (2, 4, 7, 9, 13), torch.float16),
    "planes that begin anywhere": (lambda x: F.max_pool3d(x, 3, 1, 1), (2, 8, 5, 5, 9), torch.bfloat16),
    "rows apart": (lambda x: F.max_pool3d(x[..., 2:-2], 3, 1, 1), (2, 2, 6, 9, 21), torch.float16),
    "no border": (lambda x: F.avg_pool3d(x, 2, 1), (1, 3, 9, 10, 17), torch.float32),
    "steps of two": (lambda x: F.max_pool3d(x, 5, 2, 2), (2, 8, 11, 12, 16), torch.float32),
    "steps of two, an even input": (lambda x: F.avg_pool3d(x, 4, 2, 1), (2, 8, 12, 12, 16), torch.float32),
    "steps of two, odd rows of halves": (lambda x: F.max_pool3d(x, 5, (2, 1, 1), 2), (1, 2, 9, 14, 15), torch.float16),
    "planes apart": (lambda x: F.max_pool3d(x, 3, 1, 1, (2, 1, 1)), (1, 3, 9, 8, 12), torch.float32),
    "planes that no result needs": (lambda x: F.avg_pool3d(x, (2, 3, 3), (3, 1, 1)), (1, 3, 11, 9, 12), torch.float32),
    "a last window that is cut off": (
        lambda x: F.max_pool3d(x, 5, 2, 1, ceil_mode=True),
        (1, 2, 10, 10, 15),
        torch.float32,
    ),
    "small images": (lambda x: F.max_pool3d(x, 3, 1, 1), (4, 8, 3, 4, 4), torch.float32),
    "wide images": (lambda x: F.avg_pool3d(x, 3, 1, 1), (1, 1, 4, 6, 520), torch.float32),
    "two planes": (lambda x: F.max_pool3d(x, 3, 1, 1), (4, 8, 2, 9, 12), torch.float32),
    "what is computed before and behind": (
        lambda x: torch.tanh(F.max_pool3d(x * 2 + 1, 3, 1, 1)) + x,
        (1, 8, 6, 8, 12),
        torch.float32,
    ),
    "two pools": (lambda x: F.max_pool3d(x, 3, 1, 1) - F.avg_pool3d(x, 3, 1, 1), (1, 8, 6, 8, 12), torch.float32),
    "in float64": (lambda x: F.avg_pool3d(x, 3, 1, 1), (1, 8, 6, 8, 12), torch.float64),
}


def _with_what_is_not_finite(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape).to(dtype)
    x.view(-1)[torch.randint(x.numel(), (5,))] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1.0]).to(dtype)
    return x


@needs_compiler
@pytest.mark.parametrize(
    ("name", "device"), [*((name, "small") for name in CASES), *thinned(((name, "h200") for name in CASES), 4)]
)
@pytest.mark.thinned(3)
def test_values(name: str, device: str) -> None:
    (function, shape, dtype), facts = CASES[name], DEVICES[device]
    made = region(function, _with_what_is_not_finite(shape, dtype), cuda=True)
    program = made.passed(pass_options(facts))
    (kernel,) = program.kernels
    plan = schedule(kernel, program, facts)
    assert isinstance(plan, PlaneTile)
    source = render(program, facts)
    results = emulate(program, source, made.memory(program))
    got = tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0]))
    torch.testing.assert_close(got, made.eager()[0], equal_nan=True)


@needs_compiler
@pytest.mark.parametrize(
    "name", ["average", "maximum of halves, odd rows", "steps of two", "steps of two, odd rows of halves"]
)
def test_inputs_may_begin_anywhere(name: str) -> None:
    function, shape, dtype = CASES[name]
    made = region(function, _with_what_is_not_finite(shape, dtype))
    program = made.passed(pass_options(SMALL))
    source = render(program, SMALL, aligned=False)
    results = emulate(program, source, made.memory(program), shift=1)
    got = tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0]))
    torch.testing.assert_close(got, made.eager()[0], equal_nan=True)


def test_what_a_plane_has_is_found_once() -> None:
    """Along a row, then down, then added to the three results that need the plane."""
    program = region(lambda x: F.avg_pool3d(x, 3, 1, 1), torch.empty(2, 3, 6, 9, 16, device="meta")).passed(
        pass_options(SMALL)
    )
    lines = render(program, SMALL).text.splitlines()
    merged = [line.split("[")[0].strip() for line in lines if ".merge(" in line]
    assert sum("fp::Line<" in line for line in lines) == 2
    assert merged == ["sum_0", "sum_1", "sum_2"]


def test_few_images_are_shared_by_blocks_along_their_planes() -> None:
    program = region(lambda x: F.avg_pool3d(x, 3, 1, 1), torch.empty(1, 2, 96, 32, 32, device="meta")).passed(
        pass_options(H200)
    )
    (kernel,) = program.kernels
    plan = schedule(kernel, program, H200)
    assert isinstance(plan, PlaneTile)
    assert 0 < plan.depth < 96
    assert plan.blocks >= 24
    assert f"patches of {plan.depth} x" in describe(program, kernel, H200)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool3d(x, 3, 2, 1),  # elements are needed by 3.4 points
        lambda x: F.avg_pool3d(x, 2, 2),
        lambda x: F.max_pool3d(x.to(memory_format=torch.channels_last_3d), 3, 1, 1),
    ],
)
def test_what_shares_little_or_lies_otherwise_does_not(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.empty(2, 4, 8, 16, 16, device="meta")
    program = region(function, x).passed(pass_options(H200))
    assert not any(
        isinstance(schedule(kernel, program, H200), PlaneTile) for kernel in program.kernels if kernel.is_pointwise
    )


@pytest.mark.parametrize(
    ("size", "step", "dilation", "points"),
    [
        (3, 1, 1, {(0, 0): 0, (1, 0): 1, (2, 0): 2}),
        (5, 2, 1, {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3, (2, 0): 4}),
        (2, 3, 1, {(0, 0): 0, (0, 1): 1}),
        (2, 1, 2, {(0, 0): 0, (2, 0): 1}),
    ],
)
def test_points_of_a_iteration(size: int, step: int, dilation: int, points: dict[tuple[int, int], int]) -> None:
    planes = Planes(Axis("z", 9), Axis("tap", size), step, dilation)
    pairs = ((result, plane) for result in range(planes.open) for plane in range(planes.iteration))
    assert {pair: found for pair in pairs if (found := planes.point(*pair)) is not None} == points
