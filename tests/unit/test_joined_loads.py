"""Pieces of a concatenation that take turns in one load."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.guards import guarded_loads
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render import render
from tests.support.emulate import needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import region

H200 = DeviceFacts.h200()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((_rotated(x[..., :32], cos[:, :16], sin[:, :16]), x[..., 32:]), -1)


def _quarters(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([x[..., at : at + 16].exp() + at for at in (48, 16, 32, 0)], -1)


CASES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int, int]] = {
    "halves": (_rotated, 4, 0),
    "part of a row": (_partly, 1, 3),
    "swapped": (lambda x, c, s: torch.cat((x[..., 32:], x[..., :32]), -1) * 2, 1, 0),
    "the second one shorter": (lambda x, c, s: torch.cat((x[..., :40] + 1, x[..., 44:60] * 2), -1), 1, 0),
    "further on": (lambda x, c, s: torch.cat((x[..., :16] + 1, x[..., 40:56] * 2), -1), 1, 0),
    "backwards": (lambda x, c, s: torch.cat((x[..., :32].flip(-1) + 1, x[..., 32:].flip(-1) * 2), -1), 1, 0),
    "of odd length": (lambda x, c, s: torch.cat((x[..., 9:18] + 1, x[..., :9] * 2), -1), 1, 0),
    "summed": (lambda x, c, s: _rotated(x, c, s).sum(-1), 4, 0),
    "the second one longer": (lambda x, c, s: torch.cat((x[..., :24] + 1, x[..., 30:60] * 2), -1), 0, 2),
    "four": (_quarters, 0, 2),
    "of other tensors": (lambda x, c, s: torch.cat((c, s), -1) * 2, 0, 2),
}
"""Functions, with their loads that always happen and those that do not."""


def _loads(kernel: Kernel) -> tuple[int, int]:
    always = [guard == () for _, guard in guarded_loads(kernel.roots)]
    return sum(always), len(always) - sum(always)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_pieces(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, *loads = CASES[name]
    made = region(function, *(torch.randn(shape).to(dtype) for shape in ((3, 40, 64), (40, 32), (40, 32))))
    program = made.passed(pass_options(H200))
    (kernel,) = program.kernels
    assert _loads(kernel) == tuple(loads)
    check_emulated(made, program, H200, 1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize(("length", "loads"), [(127, (1, 0)), (128, (0, 2))])
def test_pieces_that_a_warp_fills_stay(length: int, loads: tuple[int, int]) -> None:
    def swapped(x: Tensor) -> Tensor:
        return torch.cat((x[:, length:] + 1, x[:, :length]), 1)

    (kernel,) = region(swapped, torch.empty(64, 2 * length)).passed(pass_options(H200)).kernels
    assert _loads(kernel) == loads


def test_a_processor_branches() -> None:
    made = region(_rotated, torch.empty(64, 64), torch.empty(64, 32), torch.empty(64, 32))
    (kernel,) = made.passed(pass_options(DeviceFacts.cpu(2))).kernels
    assert _loads(kernel) == (1, 6)


PIECES: dict[str, tuple[Callable[[Tensor, Tensor, int], Tensor], int]] = {
    "one tensor each": (lambda a, b, at: a.abs(), 0),
    "two tensors each": (lambda a, b, at: a * b, 9),
    "one or two": (lambda a, b, at: a * b if at % 2 else a.relu(), 4),
}
"""Pieces of tensors, and how many of nine have a second one."""


@needs_compiler
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("count", [6, 9])
def test_many_pieces_take_turns(name: str, count: int) -> None:
    """Under conditions of their own, more of them than six take a compiler minutes."""
    torch.manual_seed(0)
    function, second = PIECES[name]

    def whole(*given: Tensor) -> Tensor:
        x = torch.cat([function(given[at], given[count + at], at) for at in range(count)], 1)
        return x - x.mean((0, 2), keepdim=True)

    made = region(whole, *(torch.randn(10, 3, 490) for _ in range(2 * count)))
    program = made.passed(pass_options(H200))
    turns = len(re.findall(r"^ *else if ", render(program, H200).text, re.MULTILINE))
    assert turns == (0 if count == 6 else 8 + max(second - 1, 0))
    check_emulated(made, program, H200, 1e-5)
