"""Vectors of neighbouring points: what their lanes load together, and which conditions hold for all of them or for none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index
from fusepass.codegen.ir.vectors import split_index, split_value
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region, tensor_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=1, l2_bytes=4096)
ROW = Axis("row", 240)


@pytest.mark.parametrize(
    ("low", "high", "modulus", "same"),
    [
        (0, 8, 12, True),
        (4, 12, 12, True),
        (4, 100, 12, True),  # all of them are below 100
        (0, 6, 12, False),
        (2, 12, 12, False),
        (0, 8, 10, False),  # vectors lie in two rows
    ],
)
def test_conditions_of_whole_vectors(low: int, high: int, modulus: int, same: bool) -> None:
    builder, lane = Builder(), Axis("lane", 4)
    place = axis_index(ROW) % modulus
    value = builder.masked(
        (Bound(place, low, high),), builder.position(place), builder.const(-1, builder.position(place).dtype)
    )
    moved = split_value(value, ROW, lane, builder)
    assert all(lane not in bound.index.axes for bound in moved.mask) is same  # type: ignore[attr-defined]
    for first in range(0, ROW.size, 4):
        for number in range(4):
            at = {ROW: first, lane: number}
            (bound,) = moved.mask  # type: ignore[attr-defined]
            index = bound.index.substitute({axis: Index(count) for axis, count in at.items()}).constant
            assert (bound.low <= index < bound.high) is (low <= (first + number) % modulus < high)


@pytest.mark.parametrize(
    ("factor", "constant", "divisor", "alone"),
    [(2, 3, 4, True), (2, -1, 4, True), (2, 5, 8, True), (1, 3, 4, True), (2, 3, 16, False), (3, 1, 8, False)],
)
def test_quotients_of_whole_vectors(factor: int, constant: int, divisor: int, alone: bool) -> None:
    """Where vectors begin at whole quotients, what a lane adds is told by its number alone, whatever is added to all."""
    lane = Axis("lane", 4)
    place = axis_index(ROW) % 12 * factor + constant
    for index in (place // divisor, place % divisor):
        moved = split_index(index, ROW, lane)
        mixed = [atom for atom, _ in moved.terms if not isinstance(atom, Axis) and {ROW, lane} <= atom.index.axes]
        assert (not mixed) is alone
        for first in range(0, ROW.size, 4):
            for number in range(4):
                there = moved.substitute({ROW: Index(first), lane: Index(number)})
                assert there == index.substitute({ROW: Index(first + number)})


PADDED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype, str]] = {
    "behind": (lambda x: F.pad(x, (0, 2)), (61, 4), torch.float16, "load_vector<2>"),
    "on both sides": (lambda x: F.pad(x, (4, 8)), (30, 12), torch.float32, "load_vector<4>"),
    "by no whole vectors": (lambda x: F.pad(x, (1, 3)), (30, 12), torch.float32, ""),
    "side by side": (lambda x: torch.cat([x, x * 2], 1), (30, 12), torch.float32, "load_vector<4>"),
}


@needs_compiler
@pytest.mark.parametrize("name", PADDED)
def test_vectors_that_are_there_or_not_are_loaded_whole(name: str) -> None:
    function, shape, dtype, load = PADDED[name]
    made = region(function, torch.randn(shape).to(dtype))
    program = made.passed(pass_options(SMALL))
    source = render(program, SMALL)
    assert (load in source.text) if load else ("load_vector" not in source.text)
    results = emulate(program, source, made.memory(program))
    got = tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0]))
    torch.testing.assert_close(got, made.eager()[0])
