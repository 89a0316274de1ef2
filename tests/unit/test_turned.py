"""Copies that turn a tensor so that elements of one vector repeat along an axis: tiles of what is loaded or stored across have each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.ir.vectors import at_whole, split_index
from fusepass.codegen.render import render
from tests.support.emulate import needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import region

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)


def turned(x: Tensor) -> Tensor:
    return x.sin().transpose(0, -1).clone(memory_format=torch.contiguous_format)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "two samples last": (turned, (2, 8, 16, 64)),
    "two samples last, rows that begin anywhere": (turned, (2, 8, 16, 67)),
    "four samples last": (turned, (4, 16, 68)),
    "three samples last": (turned, (3, 16, 68)),
    "eight samples last": (turned, (8, 16, 68)),
    "halves of rows beside each other": (lambda x: x.view(2, 32, 64).flip(0).permute(2, 1, 0).sin().contiguous(), (64, 64)),
    "sines and cosines in turn": (lambda x: torch.stack((x.sin(), x.cos()), -1).transpose(0, 1).contiguous(), (64, 48)),
    "twice each": (lambda x: x.repeat_interleave(2, 0).t().sin().contiguous(), (24, 64)),
    "softmax": (lambda x: x.softmax(-1).transpose(0, -1).contiguous(), (2, 32, 64)),
    "pixels of four channels": (lambda x: torch.pixel_shuffle(x, 2).permute(0, 3, 2, 1).sin().contiguous(), (2, 8, 12, 16)),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("facts", [SMALL, H200], ids=["small", "h200"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(7)
def test_values(name: str, facts: DeviceFacts, dtype: torch.dtype) -> None:
    function, shape = CASES[name]
    torch.manual_seed(0)
    given = region(function, torch.randn(shape).to(dtype), cuda=True)
    program = generate(given.program, given.builder, facts).program
    check_emulated(given, program, facts, 1e-5 if dtype is torch.float32 else 2e-3)


@needs_compiler
@pytest.mark.parametrize("name", ["two samples last", "halves of rows beside each other"])
def test_what_is_loaded_across_is_exchanged(name: str) -> None:
    function, shape = CASES[name]
    torch.manual_seed(0)
    given = region(function, torch.randn(shape), cuda=True)
    program = generate(given.program, given.builder, SMALL).program
    assert "exchanged" in render(program, SMALL).text
    check_emulated(given, program, SMALL, 1e-5)


@pytest.mark.parametrize(("period", "width"), list(itertools.product([2, 3, 4, 6, 8, 16], [2, 4, 8])))
def test_an_index_at_all_positions(period: int, width: int) -> None:
    """What a split has told the lane of is told the position of."""
    axis, lane, whole = Axis("row", 96), Axis("lane", width), Axis("along", 96)
    index = axis_index(axis) % period * 100 + axis_index(axis) // period * 3 + 5
    found = at_whole(split_index(index, axis, lane), axis, lane, whole)
    for position in range(axis.size):
        at, expected = (
            each.substitute({of: axis_index(axis) * 0 + position}) for each, of in ((found, whole), (index, axis))
        )
        assert at == expected
    assert at_whole(split_index(axis_index(axis), axis, lane), axis, lane, whole) == axis_index(whole)
