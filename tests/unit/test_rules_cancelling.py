"""Rules about what a normalisation, or the subtraction of a mean, takes away again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fusepass
from fusepass.numerics.check import compare
from fusepass.patterns.cost import NOTHING, cost
from fusepass.patterns.simplify import simplify
from tests.support.aten import traced

aten = torch.ops.aten
Function = Callable[..., Any]
Shape = tuple[int, ...]

SHIFT, SCALE, CENTRE = "shift-before-normalisation", "scale-before-normalisation", "shift-before-centring"
X, W, B, P, S = (3, 4, 7, 8), (6, 4, 3, 3), (6,), (6, 1, 1), (3, 6, 1, 1)
R, L = (5, 7), (6, 7)


def batch_norm(x: Tensor, w: Tensor | None, b: Tensor | None, running: Tensor, eps: float = 1e-3) -> tuple[Tensor, ...]:
    """Every result of a batch norm by the batch's statistics."""
    return aten._native_batch_norm_legit_functional(x, w, b, running, running.exp(), True, 0.3, eps)  # type: ignore[no-any-return]


def instance_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, eps: float = 1e-3) -> Tensor:
    """As PyTorch writes it: a batch norm of one sample."""
    shape, many = x.shape, x.shape[0]
    w, b = (None if value is None else value.repeat(many) for value in (w, b))
    x = x.view(1, shape[0] * shape[1], *shape[2:])
    return aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, eps)[0].view(shape)  # type: ignore[no-any-return]


def centred(x: Tensor, *dims: int) -> Tensor:
    return x - x.mean(dims or (2, 3), keepdim=True)


def evaluated(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    size = x.shape[1]
    mean = torch.arange(size, dtype=x.dtype) / 10
    return aten._native_batch_norm_legit_no_training(x, w, b, mean, mean + 0.5, 0.1, 1e-3)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """Functions of tensors of the given shapes, in which the rule applies so many times."""

    rule: str
    function: Function
    shapes: tuple[Shape, ...]
    times: int = 1


FIRES = {
    "bias of a convolution": Case(SHIFT, lambda x, w, b: batch_norm(F.conv2d(x, w, b), b, b - 1, b), (X, W, B)),
    "without affine": Case(SHIFT, lambda x, w, b: batch_norm(F.conv2d(x, w, b), None, None, b), (X, W, B)),
    "only a weight": Case(SHIFT, lambda x, w, b: batch_norm(F.conv2d(x, w, b), b, None, b), (X, W, B)),
    "bias of a transposed one": Case(
        SHIFT, lambda x, w, b: batch_norm(F.conv_transpose2d(x, w, b, 2, groups=2), b, b, b), (X, (4, 3, 3, 3), B)
    ),
    "bias of a layer": Case(SHIFT, lambda x, w, b: batch_norm(F.linear(x, w, b), b, b, b), (R, L, B)),
    "sums of parameters": Case(
        SHIFT, lambda x, w, b, p: batch_norm((F.conv2d(x, w, b) - p) * p * 2 + 1, b, b, b), (X, W, B, P)
    ),
    "nothing, scaled": Case(
        SHIFT, lambda x, w, s: F.layer_norm((F.conv2d(x, w) + 0) * s, (6, 5, 6)), (X, W, (3, 1, 1, 1))
    ),
    "a number": Case(SHIFT, lambda x: batch_norm(x.sin() + 3, None, None, torch.ones(4, dtype=x.dtype)), (X,)),
    "norm by sample": Case(SHIFT, lambda x, w, b: instance_norm(F.conv2d(x, w, b)), (X, W, B)),
    "affine norm by sample": Case(SHIFT, lambda x, w, b: instance_norm(F.conv2d(x, w, b), b, b), (X, W, B)),
    "of samples, by sample": Case(SHIFT, lambda x, w, s: instance_norm(F.conv2d(x, w) * 2 + s), (X, W, S)),
    "group of one": Case(SHIFT, lambda x, w, b: F.group_norm(F.conv2d(x, w, b), 6, b, b), (X, W, B)),
    "plain group of one": Case(SHIFT, lambda x, w, b: F.group_norm(F.conv2d(x, w, b), 6), (X, W, B)),
    "groups": Case(SHIFT, lambda x, w, b, s: F.group_norm(F.conv2d(x, w) - s + 2, 2, b, b), (X, W, B, (3, 1, 1, 1))),
    "layer norm over positions": Case(
        SHIFT, lambda x, w, b, p: F.layer_norm(F.conv2d(x, w, b), (5, 6), p, p), (X, W, B, (5, 6))
    ),
    "layer norm over all": Case(SHIFT, lambda x, w, s: F.layer_norm(F.conv2d(x, w) + s, (6, 5, 6)), (X, W, (1,))),
    "scale": Case(SCALE, lambda x, w, b: batch_norm(F.conv2d(x, w) * 2.5, b, b, b), (X, W, B)),
    "negative scale": Case(SCALE, lambda x, w, b: batch_norm(F.conv2d(x, w) / -3, b, b, b), (X, W, B)),
    "plain negative scale": Case(SCALE, lambda x, w, b: batch_norm(-F.conv2d(x, w), None, None, b), (X, W, B)),
    "small scale": Case(SCALE, lambda x, w: instance_norm(F.conv2d(x, w) * 1e-3, eps=1e-5), (X, W)),
    "scale by sample": Case(SCALE, lambda x, w: instance_norm(F.conv2d(x, w) * -0.5), (X, W)),
    "scale of groups": Case(SCALE, lambda x, w, b: F.group_norm(F.conv2d(x, w) * 0.1, 3, b, b), (X, W, B)),
    "scale of layers": Case(SCALE, lambda x, p: F.layer_norm(x.exp() * 7, (7, 8), p, p), (X, (7, 8))),
    "centring": Case(CENTRE, lambda x, w, b: centred(F.conv2d(x, w, b)), (X, W, B)),
    "centring in evaluation": Case(CENTRE, lambda x, w, b: centred(evaluated(F.conv2d(x, w, b), b, b)), (X, W, B)),
    "centring of samples": Case(CENTRE, lambda x, w, b: centred(F.conv2d(x, w, b) * 2, 0, 2, 3), (X, W, B)),
    "centring of rows": Case(CENTRE, lambda x, w, s: centred(F.linear(x, w) * s + s, 1), (R, L, (5, 1))),
    "centring of several": Case(CENTRE, lambda x, w, p: centred(F.conv2d(x, w) + F.conv2d(x, w * 2) - p), (X, W, P)),
    "centring twice": Case(CENTRE, lambda x, w, b: centred(centred(F.conv2d(x, w, b) + 1)), (X, W, B), 2),
}

NEAR: dict[str, tuple[Function, tuple[Shape, ...]]] = {
    "a norm's mean keeps numbers small": (lambda x, w, b: centred(batch_norm(F.conv2d(x, w), b, b, b)[0]), (X, W, B)),
    "a plain norm's mean": (lambda x, b: centred(batch_norm(x.exp(), None, None, b)[0]), (X, (4,))),
    "a norm of a norm": (lambda x, b: batch_norm(batch_norm(x, None, None, b)[0], None, None, b), (X, (4,))),
    "a function between": (lambda x, w, b: batch_norm(F.conv2d(x, w, b).relu(), b, b, b), (X, W, B)),
    "by running statistics": (lambda x, w, b: evaluated(F.conv2d(x, w, b), b, b).sin(), (X, W, B)),
    "training switched off": (
        lambda x, b: aten._native_batch_norm_legit_functional(x + 1, b, b, b, b.exp(), False, 0.1, 1e-3)[0],
        (X, (4,)),
    ),
    "varies along positions": (lambda x, p: batch_norm(x.exp() + p, None, None, p[0, :4] * 1), (X, (7, 8))),
    "varies along samples": (lambda x, w, s, b: batch_norm(F.conv2d(x, w) + s, b, b, b), (X, W, S, B)),
    "varies in a group": (lambda x, w, b: F.group_norm(F.conv2d(x, w, b), 2, b, b), (X, W, B)),
    "varies in a layer": (lambda x, w, b: F.layer_norm(F.linear(x, w, b), (6,), b, b), (R, L, B)),
    "a scale of channels": (lambda x, w, p, b: batch_norm(F.conv2d(x, w) * p, b, b, b), (X, W, P, B)),
    "no scale": (lambda x, b: batch_norm(x.exp() * 0, b, b, b), (X, (4,))),
    "a scale out of range": (lambda x, b: batch_norm(x.exp() * 1e-9, b, b, b), (X, (4,))),
    "a mean of something else": (
        lambda x, w, b: F.conv2d(x, w, b) - F.conv2d(x, w, b * 2).mean((2, 3), True),
        (X, W, B),
    ),
    "a multiple of the mean": (
        lambda x, w, b: torch.sub(y := F.conv2d(x, w, b), y.mean((2, 3), True), alpha=2),
        (X, W, B),
    ),
    "the mean of channels": (lambda x, w, b: centred(F.conv2d(x, w, b), 1), (X, W, B)),
    "another type between": (lambda x, w, b: centred(F.conv2d(x, w, b).float()), (X, W, B)),
}


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) - 0.3


def rewritten(function: Function, *inputs: Tensor) -> tuple[list[str], fx.GraphModule]:
    """The rules that apply, whether or not that pays for tensors so small, and the graph after them."""
    graph = traced(function, *inputs)
    with patch("fusepass.patterns.simplify.cost", return_value=NOTHING):
        return [application.rule for application in simplify(graph)], graph


def every(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def mine(rules: list[str]) -> list[str]:
    return [rule for rule in rules if rule in (SHIFT, SCALE, CENTRE)]


@pytest.mark.parametrize("name", FIRES)
def test_what_cancels_goes_and_every_result_stays(name: str) -> None:
    case = FIRES[name]
    inputs = [rand(*shape) for shape in case.shapes]
    rules, graph = rewritten(case.function, *inputs)
    assert rules.count(case.rule) >= case.times
    wanted, found = every(case.function(*inputs)), every(graph(*inputs))
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FIRES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_the_same_results(name: str, bad: float) -> None:
    """A parameter that cancels only where it is finite."""
    case = FIRES[name]
    _, graph = rewritten(case.function, *(rand(*shape) for shape in case.shapes))
    for place in range(len(case.shapes)):
        inputs = [rand(*shape) for shape in case.shapes]
        inputs[place].view(-1)[1 % inputs[place].numel()] = bad
        wanted, found = every(case.function(*inputs)), every(graph(*inputs))
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.isfinite(), other.isfinite()), f"input {place}"


@pytest.mark.parametrize("name", FIRES)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_float32_stays_within_the_policy(name: str, offset: float) -> None:
    case = FIRES[name]
    narrow = [(rand(*shape) + offset * (len(shape) == 1)).float() for shape in case.shapes]
    _, graph = rewritten(case.function, *narrow)
    wide = [value.double() for value in narrow]
    eager, exact = case.function(*narrow), case.function(*wide)
    comparison = compare(graph(*narrow), eager, exact)
    assert comparison.ok, comparison.explain()


@pytest.mark.parametrize("name", NEAR)
def test_what_is_only_similar_stays(name: str) -> None:
    function, shapes = NEAR[name]
    inputs = [rand(*shape) for shape in shapes]
    assert mine(rewritten(function, *inputs)[0]) == []


def test_a_bias_that_others_read_stays() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, w, b)
        return batch_norm(y, b, b, b)[0], y.exp()

    inputs = [torch.rand(shape) for shape in (X, W, B)]
    assert mine([application.rule for application in simplify(traced(function, *inputs))]) == []


def test_it_pays_only_where_many_numbers_share_one() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return batch_norm(F.conv2d(x, w, b), b, b, b)

    def applied(*shape: int) -> list[str]:
        inputs = [torch.rand(some) for some in (shape, W, B)]
        return mine([application.rule for application in simplify(traced(function, *inputs))])

    assert applied(8, 4, 32, 32) == [SHIFT]
    assert applied(1, 4, 3, 4) == []


def test_running_statistics_of_a_module_see_the_bias() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.BatchNorm2d(6))
    model[0].bias.data += 5  # type: ignore[operator, union-attr]
    original, fused = model, fusepass.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(8, 4, 20, 20)
            torch.testing.assert_close(fused(x), original(x))
    assert SHIFT in {rewrite.rule for rewrite in fused.report().rewrites}
    for name, buffer in original.named_buffers():
        torch.testing.assert_close(dict(fused.named_buffers())[name], buffer)


def test_the_bias_of_a_batch_norm_in_training_stays_as_leaving_it_away_saves_nothing() -> None:
    """Where the mean of the result is subtracted it cancels; but nothing is read or launched less, and NaN must stay."""
    shapes = ((8, 6, 32, 32), B)
    inputs = [torch.rand(some) for some in shapes]

    def function(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        value, *statistics = batch_norm(x, b, b, b)
        return centred(value), *statistics

    def without(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        value, *statistics = batch_norm(x, b, None, b)
        return centred(value) + (b - b).view(P), *statistics

    for found, wanted in zip(without(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    graphs = [traced(each, *inputs) for each in (function, without)]
    kept, left = (cost([node for node in graph.graph.nodes if node.op == "call_function"]) for graph in graphs)
    assert left.seconds >= kept.seconds
    assert mine([application.rule for application in simplify(graphs[0])]) == []
