"""Pooling by output tiles whose rows begin anywhere: tiles of rows that lie together, rows of points that all results share."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir import staged_windows
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule import ranking, schedule
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.schedule.plan_output_tile import WindowTile
from fusepass.codegen.source import Source
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region, tensor_of
from tests.support.windows import SMALL

Case = tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]
TOGETHER: dict[str, Case] = {
    "halves": (lambda x: F.avg_pool2d(x, 3, 1, 1), (2, 5, 35, 35), torch.float16),
    "several images": (lambda x: F.max_pool2d(x, 3, 1, 1), (3, 8, 7, 7), torch.bfloat16),
    "several images of floats": (lambda x: F.max_pool2d(x, 5, 1, 2), (2, 16, 13, 13), torch.float32),
    "bands": (lambda x: F.avg_pool2d(x, 3, 1, 1), (1, 3, 131, 61), torch.float16),
    "steps": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 6, 31, 45), torch.float16),
    "windows side by side": (lambda x: F.max_pool2d(x, 3, 3), (2, 6, 32, 47), torch.float16),
    "holes": (lambda x: F.max_pool2d(x, 3, 1, 1, 2), (2, 6, 15, 17), torch.float32),
    "a last vector of which the buffer has a part": (lambda x: F.avg_pool2d(x, 3, 1, 1), (1, 3, 33, 33), torch.float16),
    "images apart": (lambda x: F.max_pool2d(x[:, ::2], 3, 1, 1), (2, 6, 9, 9), torch.float16),
    "rows apart": (lambda x: F.max_pool2d(x[..., 2:-2], 3, 1, 1), (2, 6, 19, 25), torch.float16),
    "computed points": (lambda x: F.avg_pool2d(torch.relu(1 - x), 3, 1, 1), (2, 6, 19, 25), torch.float16),
    "two elements at a time": (lambda x: F.avg_pool2d(x, 5, 1, 2), (2, 16, 14, 14), torch.float32),
    "two elements, from the one before": (lambda x: F.avg_pool2d(x, 3, 1, 1), (2, 16, 14, 14), torch.float32),
    "rows of words, stored as vectors": (lambda x: F.max_pool2d(x, 2, 1), (2, 6, 25, 41), torch.float32),
    "two halves at a time": (lambda x: F.max_pool2d(x, 3, 1, 1), (3, 8, 10, 14), torch.float16),
}
ONE_AXIS: dict[str, Case] = {
    "one axis": (lambda x: F.max_pool1d(x, 9, 1, 4), (4, 6, 200), torch.float32),
    "one axis of halves": (lambda x: F.avg_pool1d(x, 25, 1), (3, 5, 145), torch.float16),
    "one axis, in steps": (lambda x: F.max_pool1d(x, 13, 2, 6), (3, 8, 160), torch.bfloat16),
    "one axis, one row": (lambda x: F.max_pool1d(x, 15, 1, 7), (1, 1, 900), torch.float32),
    "one axis, odd rows": (lambda x: torch.tanh(F.avg_pool1d(x, 7, 1, 3)), (5, 3, 99), torch.float32),
}
APART: dict[str, Case] = {
    "rows that begin with vectors": (lambda x: F.avg_pool2d(x, 3, 1, 1), (2, 6, 24, 40), torch.float16),
    "four halves at a time": (lambda x: F.avg_pool2d(x, 3, 1, 1), (2, 16, 12, 12), torch.float16),
    "rows far apart": (lambda x: F.max_pool2d(x[..., :13], 3, 1, 1), (2, 6, 19, 45), torch.float16),
}


@needs_compiler
@pytest.mark.parametrize("name", [*TOGETHER, *ONE_AXIS, *APART])
@pytest.mark.thinned(5)
def test_values(name: str) -> None:
    function, shape, dtype = (TOGETHER | ONE_AXIS | APART)[name]
    x = torch.randn(shape).to(dtype)
    x.view(-1)[torch.randint(x.numel(), (5,))] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1.0]).to(dtype)
    made = region(function, x)
    program = made.passed(pass_options(SMALL))
    source = _without_iterations(program)
    assert name in ONE_AXIS or ("lead" in source.text) is (name in TOGETHER)
    results = emulate(program, source, made.memory(program))
    got = tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0]))
    torch.testing.assert_close(got, made.eager()[0], equal_nan=True)


def _without_iterations(program: Program) -> Source:
    """`program`, with output tiles in which each thread reduces the rows that it needs."""
    ways = ranking(program.kernels[-1], program, SMALL)
    rank = next(number for number, each in enumerate(ways) if isinstance(each.plan, WindowTile) and not each.plan.along)
    return render(program, SMALL, overrides=ScheduleOverrides(len(program.kernels) - 1, rank))


@pytest.mark.parametrize(
    ("strides", "found"),
    [((48, 16), (16, 93)), ((16, 0), (0, 1)), ((0, 16), (0, 1)), ((64, 16), (0, 1)), ((0, 0), (0, 93))],
)
def test_images_that_lie_together(strides: tuple[int, int], found: tuple[int, int]) -> None:
    """Those that are read for several results each do not."""
    axes = Axis("sample", 31), Axis("channel", 3)
    index = sum((axis_index(axis) * stride for axis, stride in zip(axes, strides, strict=True)), Index(7))
    assert staged_windows._neighbours(index, axes) == found


def test_a_kernel_of_one_result_has_no_image() -> None:
    program = region(lambda x: F.max_pool2d(x, 5), torch.empty(1, 1, 5, 5, device="meta")).passed(pass_options(SMALL))
    assert describe(program, program.kernels[0], SMALL).startswith("pointwise")


def test_inputs_that_begin_anywhere_are_copied_element_by_element() -> None:
    function, shape, dtype = TOGETHER["halves"]
    program = region(function, torch.empty(shape, dtype=dtype, device="meta")).passed(pass_options(SMALL))
    text = render(program, SMALL, aligned=False).text
    assert "begin_copy_bytes<2>" in text
    assert "lead" not in text


def test_points_of_a_row_are_reduced_once() -> None:
    """Along the row, then down, in groups of results that share what they need; what is not there is -inf in the tile."""
    program = region(lambda x: F.max_pool2d(x, 5, 1, 2), torch.empty(2, 16, 12, 16, device="meta")).passed(
        pass_options(SMALL)
    )
    text = _without_iterations(program).text
    down, along = re.findall(r"fp::Line<(\d+), 1, 1, 5, \d+>::reduce<(\d+)>", text)
    assert int(down[0]) > 1
    assert (down[1], *along) == ("4", "4", "1")
    assert ".push(" not in text
    assert "fp::begin_copy_or<" in text
    assert "if (!(" not in text


def test_blocks_of_short_patches_have_several_rows() -> None:
    """To begin a block takes about as long as to compute a hundred results."""
    facts = DeviceFacts.h200()
    made = region(lambda x: F.avg_pool1d(x, 8, 1, 4), torch.empty(64, 128, 16384, device="meta"))
    program = made.passed(pass_options(facts))
    plan = schedule(program.kernels[0], program, facts)
    assert isinstance(plan, WindowTile)
    assert plan.tile_height > 1


def test_threads_of_long_windows_have_few_rows() -> None:
    """What they read is written out, element by element: of eight rows of a thousand points nvcc makes code for a minute. So one row at a
    time is reduced."""
    facts = DeviceFacts.h200()
    made = region(lambda x: F.avg_pool1d(x, 1001, 1, 500), torch.empty(8, 64, 4097, device="meta"))
    program = made.passed(pass_options(facts))
    plan, *others = (each.plan for each in ranking(program.kernels[0], program, facts))
    assert isinstance(plan, WindowTile)
    assert plan.along
    assert all((isinstance(each, WindowTile) and each.along) or each.unroll <= 2 for each in others)
