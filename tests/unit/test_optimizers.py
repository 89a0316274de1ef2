"""Compiled optimisers, clipping and moving averages: eager's parameters and states after several steps, and its few launches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from fusepass.compile import pipeline
from fusepass.compile.foreach import write_lists_in_place
from fusepass.training.backend import Backend
from tests.support.aten import same_bits

aten = torch.ops.aten


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what rewritten graphs call, of the last one that was made."""
    found: list[str] = []
    shorten = pipeline.shorten

    def note(graph: Any) -> None:
        found[:] = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        shorten(graph)

    monkeypatch.setattr(pipeline, "shorten", note)
    torch._dynamo.reset()
    return found


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 8))


def _compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend=Backend("graph", {"tune": "off"}))


OPTIMISERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "adam": lambda p: Adam(p, 1e-2, foreach=True),
    "adamw one by one": lambda p: AdamW(p, 1e-2, foreach=False),
    "adamw": lambda p: AdamW(p, 1e-2, foreach=True, amsgrad=True),
    "rmsprop": lambda p: RMSprop(p, 1e-2, momentum=0.5, foreach=True),
    "nadam": lambda p: NAdam(p, 1e-2, foreach=True),
    "adagrad": lambda p: Adagrad(p, 1e-2, foreach=True),
}


MOST_CALLS = 4
"""Of a step: one for all parameters, and a few for counts of steps."""


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_steps_are_eager_s(name: str, called: list[str]) -> None:
    model = _model()
    twin = copy.deepcopy(model)
    mine, eager = (OPTIMISERS[name](each.parameters()) for each in (model, twin))
    step = _compiled(lambda: mine.step())
    for number in range(5):
        x = torch.randn(4, 8)
        for each in (model, twin):
            each.zero_grad()
            each(x).square().sum().backward()
        step()
        eager.step()
        if number == 2:  # as schedules do
            for optimiser in (mine, eager):
                optimiser.param_groups[0]["lr"] = 5e-3
        for parameter, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-5)
            wanted.data.copy_(parameter.data)  # or rounding errors grow where gradients nearly vanish
    for state, wanted in zip(mine.state.values(), eager.state.values(), strict=True):
        for key, value in wanted.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(state[key], value, rtol=1e-3, atol=1e-4, check_device=False)
    assert not [each for each in called if each in ("aten.copy_.default", "aten.full_like.default")], called
    assert len([each for each in called if "getitem" not in each]) <= MOST_CALLS, called


def test_clipping_is_a_norm_and_a_product(called: list[str]) -> None:
    model = _model()
    model(torch.randn(4, 8)).square().sum().backward()
    twin = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = parameter.grad.clone()  # type: ignore[union-attr]
    wanted = clip_grad_norm_(twin.parameters(), 0.5)
    found = _compiled(lambda parameters: clip_grad_norm_(parameters, 0.5))(list(model.parameters()))
    torch.testing.assert_close(found, wanted)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    assert [each for each in called if "foreach" in each] == ["aten._foreach_norm.Scalar", "aten._foreach_mul_.Tensor"]
    assert not [each for each in called if "copy_" in each]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_moving_average_is_written_in_place(dtype: torch.dtype, called: list[str]) -> None:
    """Dynamo takes it apart up to PyTorch 2.13, and returns what was written from 2.14 on."""
    averages = [torch.randn(4, 5, dtype=dtype), torch.randn(7, dtype=dtype), torch.randn(1, dtype=dtype)]
    values = [torch.randn_like(each) for each in averages]
    wanted = [each.double().lerp(value.double(), 0.01) for each, value in zip(averages, values, strict=True)]
    with torch.no_grad():
        _compiled(lambda a, b: torch._foreach_lerp_(a, b, 0.01))(averages, values)
    for found, exact in zip(averages, wanted, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    calls = [each for each in called if "getitem" not in each]
    assert calls in (["aten._foreach_lerp_.Scalar"], ["aten._foreach_sub.List", "aten._foreach_add_.List"])


def test_lists_that_are_returned_are_written_in_place(called: list[str]) -> None:
    values, others = [torch.randn(4, 5), torch.randn(7)], [torch.randn(4, 5), torch.randn(7)]
    wanted = [each.double() - other.double() for each, other in zip(values, others, strict=True)]

    def subtracted(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        torch._foreach_sub_(a, b)
        return [a[1].view(7, 1), a[0]]

    with torch.no_grad():
        column, same = _compiled(subtracted)(values, others)
    assert called == ["aten._foreach_sub_.List"] or called == ["aten._foreach_sub_.List", "aten.view.default"]
    assert same is values[0]
    assert column.data_ptr() == values[1].data_ptr()
    for found, exact in zip((*values, column.flatten()), (*wanted, wanted[1]), strict=True):
        torch.testing.assert_close(found.double(), exact)


def test_a_scaler_s_steps_are_eager_s() -> None:
    model, x = _model(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    for each, compiled in ((model, True), (twin, False)):
        optimiser = SGD(each.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        call = _compiled(each) if compiled else each
        step = (
            _compiled(lambda o=optimiser, s=scaler: s.step(o)) if compiled else lambda o=optimiser, s=scaler: s.step(o)
        )
        for number in range(4):
            optimiser.zero_grad()
            scaler.scale(call(x).square().sum() * (float("inf") if number == 1 else 1)).backward()
            scaler.unscale_(optimiser)
            clip_grad_norm_(each.parameters(), 1.0)
            step()
            scaler.update()
    for parameter, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-5)


# ---- which lists are written


def _chain(x: Sequence[Tensor], y: Sequence[Tensor]) -> Any:
    torch._foreach_mul_(x, 2)
    torch._foreach_add_(x, y)
    return [each + 1 for each in x]


def _old_value(x: Sequence[Tensor], y: Sequence[Tensor]) -> Any:
    new = torch._foreach_mul(x, y)
    old = [each + 1 for each in x]
    torch._foreach_copy_(x, new)
    return old


def _read_before(x: Sequence[Tensor], y: Sequence[Tensor]) -> Any:
    old = [each.sin() for each in x]
    torch._foreach_mul_(x, y)
    return old


def _read_between(x: Sequence[Tensor], y: Sequence[Tensor]) -> Any:
    torch._foreach_mul_(x, y)
    between = [each.t() + 1 for each in x]
    torch._foreach_add_(x, y)
    return between


def _crossed(x: Sequence[Tensor], y: Sequence[Tensor]) -> Any:
    torch._foreach_add_(x, [each.clone() for each in reversed(x)])
    torch._foreach_copy_(x, torch._foreach_add(x, list(reversed(x))))


def _partly(x: Sequence[Tensor], y: Sequence[Tensor]) -> Any:
    return torch._foreach_add([x[0].mul_(3), y[1]], y)


def _two(x: Sequence[Tensor], y: Sequence[Tensor]) -> Any:
    torch._foreach_addcmul_(x, x, y, value=0.5)
    torch._foreach_mul_(y, x)


IN_PLACE: dict[str, tuple[Callable[..., Any], int]] = {
    "one after the other": (_chain, 2),
    "an old value is read behind it": (_old_value, 0),
    "an old value is read before": (_read_before, 1),
    "a value is read in between": (_read_between, 0),
    "each reads the other": (_crossed, 0),
    "nothing is written": (_partly, 0),
    "its own operand, and another list": (_two, 1),
}
"""Functions of two lists, and how many operators write over their first list."""


@pytest.mark.parametrize("name", IN_PLACE)
def test_lists_are_written_where_nobody_needs_what_was_there(name: str, called: list[str]) -> None:
    function, count = IN_PLACE[name]
    x, y = ([torch.randn(3, 3) for _ in range(2)] for _ in range(2))
    mine, eager = copy.deepcopy((x, y)), copy.deepcopy((x, y))
    with torch.no_grad():
        found, wanted = _compiled(function)(*mine), function(*eager)
    for left, right in zip(
        torch.utils._pytree.tree_leaves((found, mine)), torch.utils._pytree.tree_leaves((wanted, eager)), strict=True
    ):
        assert right is None or same_bits(left, right)
    written = [each for each in called if each.startswith("aten._foreach_") and "_." in each and "copy_" not in each]
    assert len(written) == count, called


def test_graphs_without_lists_stay_as_they_are() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    before = str(graph.graph)
    write_lists_in_place(graph)
    assert str(graph.graph) == before
