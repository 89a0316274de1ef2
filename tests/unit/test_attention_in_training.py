"""Attention that is written out, in training: the library's takes its place before gradients are taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusepass.compile.pipeline import CompiledGraph
from fusepass.training import attention
from fusepass.training.backend import Backend
from tests.unit.test_rules_attention import FIRES, RULE, K, Q, V, attend

OTHER_PRODUCTS = {"baddbmm", "added before"}
"""Spellings of which one product is no plain one."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this CPU be one of the devices where the library's gradients are fast."""
    monkeypatch.setattr(attention, "_is_served", lambda value: True)


def trained(function: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> tuple[list[Tensor], set[str]]:
    """The result and the gradients of those of `inputs` that ask for one, and the rules that were applied."""
    made: list[CompiledGraph] = []
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=Backend("graph", {"tune": "off", **options}, observe=made.append))
    return stepped(compiled, inputs), {rewrite.rule for graph in made for rewrite in graph.report.rewrites}


def stepped(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    given = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    result = function(*given)
    result.backward(torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape))
    return [result.detach(), *(each.grad for each in given if each.grad is not None)]


def check(found: list[Tensor], function: Callable[..., Tensor], inputs: list[Tensor], times: int = 2) -> None:
    """Assert that results and gradients err at most so many `times` what eager's err, and are laid out alike."""
    eager, exact = stepped(function, inputs), stepped(function, [each.double() for each in inputs])
    for got, theirs, wanted in zip(found, eager, exact, strict=True):
        assert got.stride() == theirs.stride()
        assert (got - wanted).norm() <= times * (theirs - wanted).norm() + 2e-7 * wanted.norm()


def drawn(*shapes: tuple[int, ...], gradients: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(shape).sub(0.3).requires_grad_(number < gradients) for number, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", FIRES)
@pytest.mark.thinned(3)
def test_every_spelling(name: str) -> None:
    if name == "in another type":
        pytest.skip("float64, in which the library does not compute for float32")
    function, shapes = FIRES[name]
    inputs = drawn(*shapes)
    found, rules = trained(function, inputs)
    assert (RULE in rules) is (name not in OTHER_PRODUCTS)
    check(found, function, inputs)


HIDDEN = torch.ones(16, 16, dtype=torch.bool).triu(1)
MULTI_HEAD: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "batch first": ({"batch_first": True}, {}, True),
    "masked": ({}, {"attn_mask": HIDDEN}, True),
    "padded": ({"batch_first": True}, {"key_padding_mask": HIDDEN[8:12]}, True),
    "without weights": ({}, {"need_weights": False}, False),
    "dropout": ({"dropout": 0.5}, {}, False),
}
"""Options of the module and of its call, and whether it becomes the library's."""


@pytest.mark.parametrize("name", MULTI_HEAD)
def test_a_module_that_makes_weights_which_nobody_reads(name: str) -> None:
    options, given, becomes = MULTI_HEAD[name]
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(24, 3, **options)
    x = torch.randn((4, 16, 24) if options.get("batch_first") else (16, 4, 24), requires_grad=True)
    found, rules = trained(lambda x: layer(x, x, x, **given)[0], [x])
    assert (RULE in rules) is becomes
    if becomes:
        for got, wanted in zip(found, stepped(lambda x: layer(x, x, x, **given)[0], [x]), strict=True):
            assert got.stride() == wanted.stride()
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)


def test_a_module_whose_weights_are_read() -> None:
    layer = nn.MultiheadAttention(24, 3)
    _, rules = trained(lambda x: torch.cat(layer(x, x, x), -1), [torch.randn(4, 4, 24).requires_grad_()])
    assert RULE not in rules


def weights_too(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return torch.cat((weights @ v, weights), -1)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    scores /= 3
    return scores.masked_fill_(torch.ones(16, 17, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ v


def written_beside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.linspace(0, 1, 17)
    scores = q @ k.transpose(-2, -1) + bias
    bias.zero_()
    return scores.softmax(-1) @ v + bias.sum()


def test_writes_to_scores_are_none_behind_tracing() -> None:
    inputs = drawn(Q, K, V)
    found, rules = trained(in_place, inputs)
    assert RULE in rules
    check(found, in_place, inputs)


def scores_without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        scores = q @ k.transpose(-2, -1)
    return scores.softmax(-1) @ v


LEFT: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "a bias that is learned": (
        lambda q, k, v, b: attend(q, k, v, lambda s: s + b),
        drawn(Q, K, V, (3, 16, 17), gradients=4),
    ),
    "dropout": (lambda q, k, v: F.dropout((q @ k.transpose(-2, -1)).softmax(-1), 0.1) @ v, drawn(Q, K, V)),
    "weights that are read": (weights_too, drawn(Q, K, V)),
    "scores without gradients": (scores_without_gradients, drawn(Q, K, V)),
    "weights that are detached": (lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-1).detach() @ v, drawn(Q, K, V)),
    "one sample at a time": (lambda q, k, v: torch.vmap(attend)(q, k, v), drawn(Q, K, V)),
    "a mask that is written to": (written_beside, drawn(Q, K, V)),
    "no softmax": (lambda q, k, v: (q @ k.transpose(-2, -1)).relu() @ v, drawn(Q, K, V)),
    "a softmax of queries": (lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-2) @ v, drawn(Q, K, V)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name: str) -> None:
    function, inputs = LEFT[name]
    found, rules = trained(function, inputs)
    assert RULE not in rules
    if name != "dropout":
        check(found, function, inputs)


def test_switched_off() -> None:
    _, rules = trained(attend, drawn(Q, K, V), disable="attention")
    assert RULE not in rules


def test_not_where_results_must_be_the_same_in_each_run() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        _, rules = trained(attend, drawn(Q, K, V))
    finally:
        torch.use_deterministic_algorithms(False)
    assert RULE not in rules


def test_under_autocast() -> None:
    inputs = drawn((2, 3, 32, 16), (2, 3, 32, 16), (2, 3, 32, 16))
    with torch.autocast("cpu", torch.bfloat16):
        found, rules = trained(attend, inputs)
        eager = stepped(attend, inputs)
    assert RULE in rules
    for got, theirs in zip(found, eager, strict=True):
        assert got.dtype is theirs.dtype
        assert (got - theirs).norm() <= 2e-2 * theirs.norm()


def autocast_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return attend(q, k, v)


def test_autocast_within_a_graph_is_not_looked_into() -> None:
    found, rules = trained(autocast_inside, drawn(Q, K, V))
    assert found[0].dtype is torch.bfloat16
    assert RULE not in rules


def test_without_gradients_the_graph_behind_is_rewritten() -> None:
    inputs = drawn(Q, K, V, gradients=0)
    made: list[CompiledGraph] = []
    torch._dynamo.reset()
    result = torch.compile(attend, backend=Backend("graph", {"tune": "off"}, observe=made.append))(*inputs)
    torch.testing.assert_close(result, attend(*inputs))
    assert [rewrite.rule for rewrite in made[0].report.rewrites].count(RULE) == 1


def test_layers_one_behind_the_other() -> None:
    def layers(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = x + attend(x @ w, x @ w, x) * 0.5
        return x

    inputs = drawn((2, 3, 16, 16), (16, 16))
    found, rules = trained(layers, inputs)
    assert RULE in rules
    check(found, layers, inputs, times=4)  # the library's gradients on a CPU, one behind the other


def test_only_halves_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with FakeTensorMode():
        weights = torch.empty(2, 3, 64, 64, dtype=torch.bfloat16, device="cuda")
    assert attention._is_served(weights)
    assert not attention._is_served(weights.float())
    _, rules = trained(attend, drawn(Q, K, V))
    assert RULE not in rules
