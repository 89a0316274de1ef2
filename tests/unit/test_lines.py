"""Lines that are interpolated from the same lines of an input: how many a point of the kernel computes, and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.expr import Gather, Load
from fusepass.codegen.ir.program import Kernel
from tests.support.emulate import needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import NO_SPLIT, region

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)
TOGETHER = replace(NO_SPLIT, access=16)

twice = partial(F.interpolate, scale_factor=2, mode="bilinear")


def channels_last(x: Tensor) -> Tensor:
    return twice(x.permute(0, 3, 1, 2))


def lookups(kernel: Kernel) -> int:
    return sum(isinstance(node, Load | Gather) for node in kernel.nodes)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], int, int]] = {
    "twice": (twice, (2, 3, 6, 6), 6, 12),
    "twice, to an even number of lines that is no multiple of four": (twice, (2, 3, 5, 6), 2, 8),
    "twice, by long vectors": (twice, (2, 3, 8, 8), 8, 14),
    "twice, then a function": (lambda x: twice(x).tanh(), (2, 3, 6, 6), 6, 12),
    "four times": (lambda x: F.interpolate(x, scale_factor=4, mode="bilinear"), (1, 2, 4, 4), 8, 10),
    "corners": (lambda x: F.interpolate(x, (8, 9), mode="bilinear", align_corners=True), (2, 3, 5, 6), 4, 16),
    "three times": (lambda x: F.interpolate(x, scale_factor=3, mode="bilinear"), (1, 2, 4, 5), 6, 24),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (1, 2, 6, 6), 6, 28),
    "trilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (1, 2, 3, 4, 6), 4, 20),
    "channels last": (channels_last, (2, 4, 6, 8), 6, 12),
}
"""A function, what it is called with, lines of a point and what is looked up for all of them."""


@pytest.mark.parametrize("name", CASES)
def test_lines_of_a_point(name: str) -> None:
    """What is infinite or no number shows in the same places as in eager."""
    function, shape, lines, looked_up = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    flat = x.view(-1)
    places = torch.arange(5) * (flat.numel() // 5)
    flat[places] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf], dtype=torch.float64)
    made = region(function, x)
    program = made.passed(TOGETHER)
    (kernel,) = program.kernels
    assert (len(kernel.stores), lookups(kernel)) == (lines, looked_up)
    assert {store.index.constant for store in kernel.stores} == {
        n * kernel.stores[1].index.constant for n in range(lines)
    }
    made.check(program)


STAYS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "to fewer": (lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"), (torch.empty(2, 3, 8, 8),)),
    "one line": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (torch.empty(1, 8, 9),)),
    "an odd number of lines": (lambda x: F.interpolate(x, (7, 8), mode="bilinear"), (torch.empty(2, 3, 5, 6),)),
    "places from data": (lambda x, i: x[i], (torch.empty(4, 6), torch.zeros(16, dtype=torch.int64))),
    "places from data, inside": (lambda x, y: x[(y * 3).long().clamp(0, 3)], (torch.empty(4, 6), torch.empty(16, 6))),
    "reduced": (lambda x: twice(x).amax(1), (torch.empty(2, 3, 6, 6),)),
}


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    function, inputs = STAYS[name]
    for kernel in region(function, *inputs).passed(TOGETHER).kernels:
        assert len(kernel.stores) <= 1


def test_points_fill_the_device() -> None:
    def stores(samples: int) -> int:
        made = region(twice, torch.empty(samples, 64, 32, 32, device="meta"), cuda=True)
        (kernel,) = generate(made.program, made.builder, H200).program.kernels
        return len(kernel.stores)

    assert [stores(samples) for samples in (1, 4, 64)] == [1, 2, 8]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("side", [20, 21])
def test_values(dtype: torch.dtype, side: int) -> None:
    torch.manual_seed(0)
    made = region(lambda x: F.gelu(twice(x)), torch.randn(3, 7, side, side + 3).to(dtype), cuda=True)
    program = generate(made.program, made.builder, SMALL).program
    assert len(program.kernels[0].stores) > 1
    check_emulated(made, program, SMALL, 2e-6 if dtype is torch.float32 else 2e-3)


def test_images_of_many_sizes_need_few_libraries() -> None:
    forms, texts = Forms(), set[str]()
    for height in range(60, 90, 4):
        made = region(twice, torch.empty(8, 64, height, 97 - height % 7, device="meta"), cuda=True)
        forms.next_round()
        texts.add(forms.shared(generate(made.program, made.builder, H200)).source.text)
    assert len(texts) <= 8
