"""Forwards that branch on the values of tensors: a graph per branch, chosen before anything runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.capture.trace import Captured, CaptureFailure, capture
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import check
from fusepass.report.report import CaptureRoute
from tests.support.interpreted import interpreted

Forward = Callable[..., Any]


class Model(nn.Module):
    def __init__(self, call: Forward) -> None:
        super().__init__()
        self.call = call
        self.bias = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("open", torch.tensor(True))

    def forward(self, *args: Tensor) -> Any:
        return self.call(self, *args)


def captured(call: Forward, *args: Tensor, branches: int = 8) -> Captured | CaptureFailure:
    with torch.no_grad():
        return capture(Model(call), args, {}, branches=branches)


def optimised(call: Forward) -> OptimizedModule:
    made = fusepass.optimize(Model(call))
    assert isinstance(made, OptimizedModule)
    return made


def made(optimised: OptimizedModule) -> int:
    return len(list(optimised._specialiser.table))


def padded(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    """As attention does where nothing is padded."""
    if mask.all():
        return (x + self.bias).relu() * 2
    return (x + self.bias).masked_fill(~mask, 0.0).tanh()


FULL, HALF = torch.ones(6, dtype=torch.bool), torch.arange(6) < 3


def test_each_branch_has_its_graph() -> None:
    model, x = optimised(padded), torch.randn(4, 6)
    with interpreted():
        for mask in (FULL, HALF, FULL, HALF, HALF.flip(0)):
            outcome = check(model.original, model, (x, mask))
            assert outcome.ok, outcome.explain()
    assert made(model) == 2
    assert model.report().capture is CaptureRoute.TRACED
    assert model.report().fallbacks == ()


def test_a_condition_is_what_forward_asked() -> None:
    found = captured(padded, torch.randn(4, 6), FULL)
    assert isinstance(found, Captured)
    (condition,) = found.conditions
    assert condition.answer is True
    asked = [node.target for node in condition.graph.graph.nodes if node.op == "call_function"]
    assert asked == [torch.ops.aten.all.default]
    for mask, answer in ((FULL, True), (HALF, False)):
        assert condition.holds((torch.ones(6), torch.randn(4, 6), mask)) is answer


def _of_places(self: Any, x: Tensor) -> Tensor:
    """As transformers look for sequences that are packed."""
    places = torch.arange(x.shape[-1], device=x.device)
    return x.relu() * 2 if (places.diff() == 1).all() else x.tanh()


def test_what_is_asked_of_constants_alone_is_no_condition() -> None:
    found = captured(_of_places, torch.randn(4, 6))
    assert isinstance(found, Captured)
    assert found.conditions == ()
    assert [node.target for node in found.graph.graph.nodes if node.op == "call_function"][:1] == [
        torch.ops.aten.relu.default
    ]


def _by_state(self: Any, x: Tensor) -> Tensor:
    return x.relu() + 1 if self.open else x.tanh() + 1


def test_a_buffer_that_only_a_branch_reads() -> None:
    model, x = optimised(_by_state), torch.randn(6)
    with interpreted(), torch.no_grad():
        assert torch.equal(model(x), x.relu() + 1)
        model.original.open.fill_(False)
        torch.testing.assert_close(model(x), x.tanh() + 1)
        model.original.open.fill_(True)
        assert torch.equal(model(x), x.relu() + 1)
    assert made(model) == 2


def _first_steps(self: Any, x: Tensor) -> Tensor:
    self.seen += 1
    if self.seen > 2:
        return x * 2 + 1
    return x.relu() + self.seen


def test_what_is_asked_of_a_buffer_that_forward_has_written() -> None:
    model, twin, x = optimised(_first_steps), Model(_first_steps), torch.randn(6)
    with interpreted(), torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(model(x), twin(x))
    assert model.original.seen == twin.seen == 5
    assert made(model) == 2


def _guarded(self: Any, x: Tensor, index: Tensor) -> Tensor:
    """The second question makes sense only where the first one was answered so."""
    if (index < 6).all() and (x[index] > 0).any():
        return x.relu() * 2
    return x.tanh() * 3


def test_questions_are_asked_in_order() -> None:
    model, x = optimised(_guarded), torch.arange(6.0)
    with interpreted(), torch.no_grad():
        assert torch.equal(model(x, torch.tensor([1, 2])), x.relu() * 2)
        torch.testing.assert_close(model(x, torch.tensor([7, 8])), x.tanh() * 3)
        assert torch.equal(model(x, torch.tensor([1, 2])), x.relu() * 2)
    assert made(model) == 2
    assert model.report().capture is CaptureRoute.TRACED


def _deep(self: Any, x: Tensor) -> Tensor:
    y = x
    for _ in range(40):
        y = y.sin()
    return y.relu() if y.sum() > 0 else -y


def _large(self: Any, x: Tensor) -> Tensor:
    y = x.expand(2**14, 6).relu()
    return y + 1 if y.sum() > 0 else y


def _drawn(self: Any, x: Tensor) -> Tensor:
    return x + 1 if torch.rand(1) > 0.5 else x


def _loop(self: Any, x: Tensor) -> Tensor:
    while x.abs().max() > 1:
        x = x / 2
    return x.relu() + 1


@pytest.mark.parametrize("forward", [_deep, _large, _drawn, _loop, lambda self, x: x * x.sum().item()])
def test_what_is_not_asked_again(forward: Forward) -> None:
    found = captured(forward, torch.full((6,), 1e9))
    assert isinstance(found, CaptureFailure)
    assert "depends on the values of a tensor" in found.reason


def test_few_questions_of_a_loop_are_asked() -> None:
    x = torch.full((6,), 3.0)
    assert isinstance(captured(_loop, x), Captured)
    assert isinstance(captured(_loop, x, branches=2), CaptureFailure)


def test_ever_new_branches_are_left_to_dynamo() -> None:
    model, twin = optimised(_loop), Model(_loop)
    with interpreted(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        for power in (*range(7), 3):
            x = torch.linspace(0.5, 1, 6) * 2**power
            torch.testing.assert_close(model(x), twin(x))
    assert made(model) == 4
    # On Python 3.14 Dynamo (PyTorch 2.15) finds no graph in such a loop.
    later = CaptureRoute.DYNAMO if sys.version_info < (3, 14) else CaptureRoute.UNTOUCHED
    assert model.report().capture is later


def test_tracers_see_the_branch() -> None:
    model, x = optimised(padded), torch.randn(4, 6)
    with interpreted(), torch.no_grad():
        model(x, FULL)
        assert next(iter(model._specialiser.table)).inline is None
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(x, HALF), model.original(x, HALF))
