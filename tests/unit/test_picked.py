"""Elements that the lanes of a vector pick out of one access: pairs, steps, turned round, for several lanes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.vectors import picked
from fusepass.codegen.render import render
from tests.support.emulate import needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import region

ROW, LANE = Axis("row", 64), Axis("lane", 4)
row, lane = axis_index(ROW), axis_index(LANE)


@pytest.mark.parametrize(
    ("index", "extent", "expected"),
    [
        (row // 2 + lane // 2, 32, (row // 2, 2, [0, 0, 1, 1])),
        (row + lane // 2 * 2, 64, (row, 4, [0, 0, 2, 2])),
        (row + lane // 2 * 2 + 1, 64, (row, 4, [1, 1, 3, 3])),
        (row * -1 - lane + 63, 64, (row * -1 + 60, 4, [3, 2, 1, 0])),
        (row * 2 + lane * 2 + 1, 128, (row * 2, 8, [1, 3, 5, 7])),
        (row * 2 + lane * 2 + 1, 127, None),  # the last access would end behind the buffer
        (row * 4 + lane * 4, 256, None),  # of an access, a quarter is needed
        (row // 4, 16, None),  # one element for all lanes
        (row + lane // 2 * 2 + 2, 66, None),  # accesses of 4 would begin between two of them
    ],
)
def test_access(index: Index, extent: int, expected: tuple[Index, int, list[int]] | None) -> None:
    found = picked(index, ROW, LANE, 8, extent)
    if expected is None:
        assert found is None
        return
    assert found is not None
    places = [found.place.substitute({LANE: Index(number)}).constant for number in range(4)]
    assert (found.start, found.count, places) == expected


def _turned_pairs(x: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * 0.6 - b * 0.8, a * 0.8 + b * 0.6), -1).flatten(-2)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "pairs": (_turned_pairs, 2),
    "turned round": (lambda x: x.flip(-1) + 1, 1),
    "every second": (lambda x: x[..., 1::2] * 2, 1),
    "each twice": (lambda x: x.repeat_interleave(2, -1) + 1, 1),
    "pairs swapped": (lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * 2, 1),
    "of an odd number": (lambda x: x[..., :63].flip(-1) + 1, 0),
}
"""Functions, with the accesses out of which something is picked."""


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, accesses = CASES[name]
    x = (torch.randn(48, 64) * 20).abs().to(dtype)
    _check(function, x, accesses)


@needs_compiler
def test_no_access_ends_behind_the_buffer() -> None:
    _check(lambda x: x[::2] * 2, torch.arange(3072.0), 1)
    _check(lambda x: x[::2] * 2, torch.arange(3071.0), 0)


def _check(function: Callable[[Tensor], Tensor], x: Tensor, accesses: int) -> None:
    made = region(function, x)
    facts = DeviceFacts.h200()
    program = made.passed(pass_options(facts))
    assert render(program, facts).text.count("_of_0 = fp::load_vector") == accesses
    check_emulated(made, program, facts, 2e-2 if x.dtype.itemsize == 2 else 1e-5)
