"""Strips of rows that a team's blocks take together: when they do, and what their kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan_rows import Columns
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import NO_SPLIT, region, tensor_of

H200 = DeviceFacts.h200()
MODELS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, int, int], str]] = {
    "columns": (
        lambda x, *w: F.batch_norm(x, None, None, *w, True), (200, 384), (384,), (2, 2, 128), "strips of 128 rows"
    ),
    "a part of a strip": (lambda x, *_: x - x.mean(0), (150, 300), (), (2, 1, 128), "strips of 128 rows"),
    "a strip, and another input": (
        lambda x, y, _: F.relu((x * 2 + y) / x.std(1, keepdim=True)), (3, 190, 128), (3, 190, 128), (3, 2, 64),
        "strips of 64 rows",
    ),
    "small images": (
        lambda x, *w: (F.batch_norm(x, None, None, *w, True), x.mean((0, 2, 3))), (70, 16, 7, 7), (16,), (2, 2, 4),
        "49 lanes of rows x 9 groups of columns",
    ),
    "small images, a part of a strip": (
        lambda x, w, _: x / (x * w[:, None, None]).square().sum((0, 2, 3), keepdim=True), (40, 12, 5, 5), (12,), (2, 1, 8),
        "strips of 8 rows",
    ),
    "halves": (lambda x, *w: F.batch_norm(x, None, None, *w, True), (300, 256), (256,), (3, 1, 128), "vectors of 8"),
    "small images of halves": (
        lambda x, *_: x - x.amax((0, 2, 3), keepdim=True), (90, 16, 7, 7), (), (4, 2, 8), "49 lanes of rows",
    ),
    "more members than rows": (lambda x, *_: x - x.amin(0), (100, 128), (), (25, 1, 16), "strips of 16 rows"),
}  # fmt: skip
"""A function of a tensor and two weights, the tensor's shape, the weights', blocks of a team, teams and rows of a strip."""


@needs_compiler
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(5)
def test_values(name: str) -> None:
    """No further from float64 than the numeric policy lets them be."""
    function, shape, weights, size, words = MODELS[name]
    random = torch.Generator().manual_seed(1)
    dtype = torch.float16 if "halves" in name else torch.float32
    x, *others = (torch.randn(size, generator=random).to(dtype) for size in (shape, weights, weights))
    made = region(function, x * 2 + 5, *others)
    program = made.passed(replace(NO_SPLIT, strips=lambda program, kernel: size, longest_cached_row=1))
    assert words in describe(program, program.kernels[0], H200)
    results = emulate(program, render(program, H200), made.memory(program))
    for number, (eager, exact) in enumerate(zip(made.eager(), made.exact(), strict=True)):
        got = tensor_of(results[program.outputs[number]], program.buffer(program.outputs[number])).double()
        digits = 2**-24 if dtype is torch.float32 else 2**-12
        allowed = 2 * (eager.double() - exact.double()).abs().max() + 8 * digits * exact.double().abs().max()
        assert (got - exact.double()).abs().max() <= allowed


@needs_compiler
def test_operands_that_begin_anywhere_are_read_by_each_block_for_itself() -> None:
    x = torch.randn(100, 128, generator=torch.Generator().manual_seed(1))
    made = region(lambda x: x - x.mean(0), x)
    program = made.passed(replace(NO_SPLIT, strips=lambda program, kernel: (2, 1, 64), longest_cached_row=1))
    source = render(program, H200, aligned=False)
    assert "launch_teams" not in source.text
    results = emulate(program, source, made.memory(program), shift=1)
    (exact,) = made.exact()
    torch.testing.assert_close(tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0])), exact)


def strip(function: Callable[..., Any], shape: tuple[int, ...], facts: DeviceFacts = H200, **kind: Any) -> str:
    """How the kernel that reads a tensor of this shape first is laid out."""
    program = region(function, torch.empty(shape, device="meta", **kind)).passed(pass_options(facts))
    return describe(program, program.kernels[0], facts)


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, None, None, True)


def test_strips_are_for_what_memory_would_be_read_twice_for() -> None:
    assert "teams of 33, strips of 64 rows" in strip(norm, (16_384, 8192))
    assert "strips of 128 rows" in strip(norm, (4096, 32_768))  # that a multiprocessor holds, in pieces of 32 bytes
    assert "strips of 8 rows" in strip(norm, (1024, 2048, 7, 7))
    assert "strips" not in strip(norm, (1024, 8192))  # columns stay on the chip
    assert "strips" not in strip(norm, (16_384, 256))  # the cache has all of it
    assert "strips" in strip(norm, (256, 2048, 7, 7), dtype=torch.float16)  # not beside the results
    assert "strips" not in strip(norm, (64, 2048, 7, 7))
    assert "strips" not in strip(norm, (2_000_000, 64))  # too long for any team
    assert "strips" not in strip(norm, (64, 2048, 32, 32))  # planes are long enough by themselves
    assert "strips" not in strip(norm, (16_384, 8191))  # rows that begin anywhere
    assert "strips" not in strip(lambda x: x.softmax(0), (16_384, 8192))
    assert "strips" not in strip(lambda x: x.sum(0), (16_384, 8192))
    assert "strips" not in strip(norm, (16_384, 8192), replace(H200, arch="sm_70"))


def test_all_members_are_as_far_as_the_places_for_their_states_let_them_be() -> None:
    program = region(norm, torch.empty((16_384, 8192), device="meta")).passed(pass_options(H200))
    plan = schedule(program.kernels[0], program, H200)
    assert isinstance(plan, Columns)
    assert plan.buffer is not None
    assert plan.iterations <= plan.buffer.ahead < min(3 * plan.iterations, plan.buffer.places - 1)
    assert plan.lanes * plan.width == plan.strip == 64
