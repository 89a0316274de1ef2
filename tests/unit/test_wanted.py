"""Products behind a mask: tiles of which it leaves nothing are not multiplied, and all values stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.ir.wanted import Wanted, wanted
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import Region, region, tensor_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=1)
SIZE = 300

Function = Callable[[Tensor, Tensor], Tensor]
MASKED: dict[str, tuple[Function, tuple[int, int], int]] = {
    "upper triangle": (lambda a, b: torch.triu(a @ b), (-1, 1), 0),
    "lower triangle": (lambda a, b: torch.tril(a @ b), (1, -1), 0),
    "lower triangle, scaled": (lambda a, b: torch.tril(a @ b, -3) * 2 + 1, (1, -1), 3),
    "causal": (lambda a, b: (a @ b / 8).masked_fill(_ones(a, torch.bool).triu(1), -torch.inf), (1, -1), 0),
    "not causal": (lambda a, b: torch.where(~_ones(a, torch.bool).tril(4), a @ b, 0.5), (-1, 1), 5),
    "numbers": (lambda a, b: torch.where(_ones(a).tril() == 0, -1e9, a @ b), (1, -1), 0),
    "other numbers": (lambda a, b: torch.where(_ones(a).triu(2) != 0, torch.relu(a @ b), 3.0), (-1, 1), 2),
    "both": (lambda a, b: torch.where(_ones(a, torch.bool).tril() & (a[:, :1] > 0), a @ b, 0.0), (1, -1), 0),
    "a band": (lambda a, b: torch.tril(torch.triu(a @ b, -5), 5), (1, -1), -5),
}
ALL: dict[str, Function] = {
    "no mask": lambda a, b: torch.relu(a @ b),
    "both sides": lambda a, b: torch.where(_ones(a, torch.bool).tril(), a @ b, -(a @ b)),
    "the product's own mask": lambda a, b: (lambda c: torch.where(c > 0, c, 0.0))(a @ b),
    "a place beside infinity": lambda a, b: torch.where(
        torch.arange(1.0 * SIZE, device=a.device) < torch.inf, a @ b, 0.0
    ),
    "added": lambda a, b: a @ b + _ones(a).tril(),
    "two results": lambda a, b: torch.triu(a @ b) + torch.tril(a @ b),
}


def _ones(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(SIZE, SIZE, dtype=dtype, device=like.device)


def made_of(function: Function) -> tuple[Region, Kernel]:
    torch.manual_seed(0)
    made = region(function, torch.randn(SIZE, 40), torch.randn(40, SIZE))
    program = made.passed(pass_options(SMALL, AnchorSource.GENERATED))
    kernel = next(kernel for kernel in program.kernels if isinstance(kernel.anchor, Product))
    return made, kernel


@pytest.mark.parametrize("name", MASKED)
def test_what_a_mask_leaves_is_wanted(name: str) -> None:
    function, factors, least = MASKED[name]
    _, kernel = made_of(function)
    found = wanted(kernel)
    assert isinstance(found, Wanted)
    assert tuple(found.index.stride(axis) for axis in kernel.rows[2:]) == factors
    assert found.least - found.index.constant == least


@pytest.mark.parametrize("name", ALL)
def test_without_a_mask_all_is_wanted(name: str) -> None:
    assert wanted(made_of(ALL[name])[1]) is None


@needs_compiler
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("number", [1.0, torch.inf, torch.nan])
@pytest.mark.thinned(5)
def test_values(name: str, number: float) -> None:
    """Numbers that are not finite stay out of what is masked, whether its tile is multiplied or not."""
    made, _ = made_of(MASKED[name][0])
    program = made.passed(pass_options(SMALL, AnchorSource.GENERATED))
    memory = made.memory(program)
    for values in memory.values():
        values[7] = number
    source = render(program, SMALL)
    assert "= Tile::run" in source.text
    assert "if (" in source.text.split("Tile::run")[0].splitlines()[-1]
    results = emulate(program, source, memory)
    x, y = (
        torch.from_numpy(memory[given]).view(shape)
        for given, shape in zip(program.inputs, ((SIZE, 40), (40, SIZE)), strict=True)
    )
    want = MASKED[name][0](x.double(), y.double()).float()
    got = tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0]))
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-4)
