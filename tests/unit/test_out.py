"""Operators that write to a tensor that forward names (`out=`), and tensors of which forward changes more than values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusepass
from fusepass.capture.trace import Captured, CaptureFailure, capture


class Calls(nn.Module):
    """A model of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def _another_order(x: Tensor) -> tuple[Tensor, Tensor]:
    result = torch.empty(5, 3).t()
    torch.add(x, 1, out=result)
    return result, result.relu()


def _of_another_order(x: Tensor) -> Tensor:
    return torch.add(x.t(), 1, out=torch.empty(5, 3)) * 2


def _stacked(x: Tensor) -> Tensor:
    result = torch.zeros(3, 6, 5)
    torch.stack([x, x + 1], 1, out=result[:, ::3])
    return result * 2


def _two(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = torch.empty(5, 2).t()[:, :3].t(), torch.empty(3, dtype=torch.int64)
    found = torch.max(x, 1, out=(values[:, 0], places))
    return found.values * 2, values[:, 0] + found.indices


def _of_itself(x: Tensor) -> Tensor:
    torch.mul(x, 2, out=x)
    return x + 1


def _to_a_view(x: Tensor) -> Tensor:
    torch.add(x[2:], 1, out=x[:1])
    return x.exp()


def _resized(x: Tensor) -> tuple[Tensor, Tensor]:
    result = torch.empty(0)
    torch.add(x, 1, out=result)
    return result, result.relu()


@pytest.mark.parametrize(
    "function",
    [_another_order, _of_another_order, _stacked, _two, _of_itself, _to_a_view, _resized],
)
def test_as_in_eager(function: Callable[[Tensor], Any]) -> None:
    """The graph alone, without kernels: values, strides, and the input afterwards."""
    x = torch.randn(3, 5)
    with torch.no_grad():
        captured = capture(Calls(function), (x.clone(),), {})
        assert isinstance(captured, Captured), captured
        mine, theirs = x.clone(), x.clone()
        results, expected = captured.graph(mine), pytree.tree_leaves(function(theirs))
    for result, value in zip((*results, mine), (*expected, theirs), strict=True):
        assert result.stride() == value.stride()
        torch.testing.assert_close(result, value)


def _resizes(x: Tensor, result: Tensor) -> Tensor:
    torch.add(x, 1, out=result)
    return result.sum()


def _like_another(x: Tensor, other: Tensor) -> Tensor:
    return other.resize_as_(x).copy_(x) * 2


@pytest.mark.parametrize("function", [_resizes, _like_another])
def test_an_input_that_gets_another_shape(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with torch.no_grad():
        failure = capture(Calls(function), (torch.ones(3, 5), torch.empty(0)), {})
        assert isinstance(failure, CaptureFailure)
        assert "another shape" in failure.reason
        fused, x, result = fusepass.optimize(Calls(function), tune="off"), torch.randn(3, 5), torch.empty(0)
        with pytest.warns(fusepass.FusepassWarning, match="another shape"):
            torch.testing.assert_close(fused(x, result), function(x, torch.empty(0)))
    assert result.shape == (3, 5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.resize_(2, 3).tanh(),
        lambda x: torch.ops.aten.resize_.default(x, [2, 3]).tanh(),
        lambda x: x.t().resize_(2, 2).tanh() * 2,
        lambda x: (x * 2).view(1, 4, 2, 2).resize_(1, 2, 2, 2, memory_format=torch.channels_last).tanh() * 2,
        lambda x: x.resize_as_(torch.empty(2, 2)) * 2,
        lambda x: torch.ops.aten.set_.source_Tensor(x, torch.ones(2, 2)).tanh(),
        lambda x: torch.ops.aten.set_data(x, torch.ones(2, 2)) or x.tanh(),
        lambda x: setattr(x, "data", torch.ones(2, 2)) or x.tanh(),
    ],
)
@pytest.mark.invariant(56)
def test_what_replaces_memory_is_left_to_the_original(function: Callable[[Tensor], Tensor]) -> None:
    mine, theirs = (torch.arange(16.0).reshape(4, 4) / 7 for _ in range(2))
    with torch.no_grad():
        assert fusepass.explain(Calls(function), mine).reason is not None
        assert mine.shape == (4, 4)
        fused = fusepass.optimize(Calls(function), tune="off")
        with pytest.warns(fusepass.FusepassWarning):
            result, expected = fused(mine), function(theirs)
    for value, eager in ((result, expected), (mine, theirs)):
        assert value.stride() == eager.stride()
        assert torch.equal(value, eager)
    assert fused.report().fallbacks


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x * 2).requires_grad_(), "needs gradients"),
        (lambda x: torch.randn(3, 5, out=torch.empty(5, 3).t()) + x, "random numbers"),
        (lambda x: torch.add(x, x, out=torch.empty(5).expand(3, 5)) + 1, "single memory location"),
        (lambda x: torch.sum(x, 1, out=torch.empty(3, dtype=torch.float64)) + 1, "another type"),
        (lambda x: torch.div(x, x, out=torch.empty(3, 5, dtype=torch.int64)) + 1, "can't be cast"),
    ],
)
def test_refusals(function: Callable[[Tensor], Tensor], reason: str) -> None:
    with torch.no_grad():
        failure = capture(Calls(function), (torch.ones(3, 5),), {})
    assert isinstance(failure, CaptureFailure)
    assert reason in failure.reason


def test_what_eager_raises_is_raised() -> None:
    """Fake tensors write to overlapping memory without a word."""
    fused = fusepass.optimize(Calls(lambda x: torch.mul(x, 2, out=x.t()) + 1))
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        fused(torch.randn(5, 5))


def test_a_refusal_that_lasts_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "fusepass.dispatch.making.capture", lambda *args, **kwargs: asked.append(1) or capture(*args, **kwargs)
    )
    fused, x = fusepass.optimize(Calls(lambda x: (x * 2).requires_grad_())), torch.randn(3, 5)
    with torch.no_grad(), pytest.warns(fusepass.FusepassWarning):
        results = [fused(copy.copy(x)) for _ in range(3)]
    assert all(result.requires_grad for result in results)
    assert len(asked) == 1
