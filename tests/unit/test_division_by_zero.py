"""Integers divided by zero: a C++ kernel reports it, and the original operators raise, as in eager; other quotients are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusepass
from tests.support.regions import Functional

Operation = Callable[[torch.Tensor, torch.Tensor | int], torch.Tensor]
Function = Callable[..., Any]
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
OPERATIONS: dict[str, Operation] = {
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "//": lambda a, b: a // b,
}


def _routes(function: Function) -> list[Function]:
    return [fusepass.optimize(Functional(function)), torch.compile(function, backend="fusepass")]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.thinned(3)  # every operation and every type
@pytest.mark.invariant(40)
def test_a_zero_among_divisors_raises_and_other_quotients_are_right(name: str, dtype: torch.dtype) -> None:
    operation = OPERATIONS[name]

    def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (operation(a + 1, b) * 3 + b).float() * 0.5

    low = torch.iinfo(dtype).min
    a = torch.tensor([low, 7, -7 % 256 if low == 0 else -7, 5, 0, 100], dtype=dtype).repeat(4, 3) - 1
    b = torch.tensor([3, 2, 2, 7, 5, 1], dtype=dtype).repeat(3)
    negative = b if low == 0 else -b
    for fused in _routes(chain):
        for by in (b, negative, b.expand(4, -1).contiguous()):
            torch.testing.assert_close(fused(a, by), chain(a, by), rtol=0, atol=0)
        b_with_zero = b.clone()
        b_with_zero[17] = 0  # the last one
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            fused(a, b_with_zero)
        torch.testing.assert_close(fused(a, b), chain(a, b), rtol=0, atol=0)  # the report is not kept


@pytest.mark.parametrize("name", OPERATIONS)
def test_wherever_the_divisor_comes_from(name: str) -> None:
    operation = OPERATIONS[name]
    chains: dict[str, Function] = {
        "a number": lambda a: operation(a * 2, 0) + 1,
        "computed": lambda a: operation(a * 2, a - 4) + 1,
        "one element": lambda a: operation(a * 2, a[5] - 5) + 1,
        "into a sum": lambda a: operation(a * 2, a - 4).sum(),
        "from a sum": lambda a: operation(a.unsqueeze(0) * 2, (a.unsqueeze(0) - a.unsqueeze(0)).sum(-1, keepdim=True)),
        "behind a choice": lambda a: torch.where(a == 4, 0, operation(a * 2, a - 4)),
        "beside others": lambda a: (a * 2, operation(a[3] + 1, a[0])),
    }
    a = torch.arange(40)
    for text, chain in chains.items():
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            chain(a)
        for fused in _routes(chain):
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                print(text, fused(a))


def test_no_zero_no_fault_and_none_for_floats() -> None:
    a = torch.arange(-20, 20)

    def whole(a: torch.Tensor) -> torch.Tensor:
        return (a * 2) % 7 + (a + 1) // -3 + torch.fmod(a, 5) + torch.div(a, 4, rounding_mode="trunc")

    def floating(a: torch.Tensor) -> torch.Tensor:
        return (a * 2.0) % 0.0 + torch.fmod(a * 1.5, 0.0)

    for fused in _routes(whole):
        assert torch.equal(fused(a), whole(a))
    for fused in _routes(floating):
        torch.testing.assert_close(fused(a), floating(a), equal_nan=True)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_smallest_integer_by_minus_one_wraps(name: str) -> None:
    """As eager's does for narrow integers; for int and int64 its division may end the process, so it sees other numbers alone."""
    operation = OPERATIONS[name]

    def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return operation(a | 0, b) ^ 1

    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        low = torch.iinfo(dtype).min
        a, b = torch.full((9,), low, dtype=dtype), torch.full((9,), -1, dtype=dtype)
        fused = fusepass.optimize(Functional(chain))
        assert torch.equal(fused(a, b + 4), chain(a, b + 4))
        assert fused(a, b).tolist() == [(0 if name in ("remainder", "fmod") else low) ^ 1] * 9
