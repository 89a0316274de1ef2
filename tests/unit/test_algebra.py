"""Each algebraic rule: that it fires and saves, gives what the original gives, and leaves alone what is only similar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fusepass.config import Algebra, override
from fusepass.patterns.rules import RULES, bounds, constants, identities, pools, reductions, scalars, single
from fusepass.patterns.simplify import Application, simplify
from tests.support.aten import traced

Function = Callable[..., Any]
Shape = tuple[int, ...]

MATRIX, IMAGE = (6, 20), (2, 3, 24, 24)
_MODULES = (bounds, constants, identities, pools, reductions, scalars, single)
OURS = {rule.name: rule for module in _MODULES for rule in module.RULES}


@dataclass(frozen=True)
class Case:
    """What one rule does.

    Attributes:
        fires: functions in which it applies.
        near: functions in which it must not.
        shape: of each tensor that the functions take.
        apart: functions of which an inner value has other users, so that nothing would be saved.
    """

    fires: tuple[Function, ...]
    near: tuple[Function, ...]
    shape: Shape = MATRIX
    apart: tuple[Function, ...] = ()


def both(inner: Function, outer: Function) -> Function:
    """``outer(inner(x))``, and the inner value besides."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        value = inner(x)
        return outer(value).sin(), value

    return function


def half(function: Function) -> Function:
    return lambda x: function(x.half())


CASES = {
    "idle-clamp": Case(
        fires=(
            lambda x: x.sigmoid().clamp(0, 1).sin(),
            lambda x: x.softmax(1).relu().sin(),
            lambda x: x.exp().clamp(min=0).sin(),
            lambda x: F.hardtanh(x.tanh()).sin(),
            lambda x: (x * x).relu().sin(),
            lambda x: (x.sigmoid() * 2 - 1).clamp(-1.01, 1.01).sin(),
            lambda x: F.max_pool2d(x.relu()[None], 2).clamp(min=0).sin(),
            lambda x: x.abs().t().reshape(-1, 1).amax(0).relu().sin(),
            lambda x: torch.cat([x.relu(), x.sigmoid()]).clamp_min(0).sin(),
            lambda x: (x.exp() + x.relu()).relu().sin(),
            lambda x: x.var(0).relu().sin(),
        ),
        near=(
            lambda x: x.sigmoid().clamp(0.1, 1).sin(),
            lambda x: x.tanh().relu().sin(),
            lambda x: (x.sigmoid() - 0.1).relu().sin(),
            lambda x: (x.sigmoid() * x).relu().sin(),
            lambda x: x.sin().exp().clamp(max=2.7).sin(),
            lambda x: x.view(torch.int64).view(torch.float64).relu().sin(),
            lambda x: x.relu().neg().relu().sin(),
            lambda x: x.sigmoid().clamp(min=x).sin(),
            lambda x: torch.where(x > 0, x.relu(), x).relu().sin(),
        ),
    ),
    "clamp-of-clamp": Case(
        fires=(
            lambda x: x.clamp(-1, 1).clamp(0, 2),
            lambda x: x.relu().clamp(max=6),
            lambda x: x.clamp(-3, -1).relu(),
            lambda x: F.relu6(x).clamp(2, 9),
            lambda x: x.clamp(min=3).clamp(max=1),
        ),
        near=(
            lambda x: x.clamp(1, -1).clamp(0, 2),
            lambda x: x.clamp(max=x).clamp(0, 1),
            lambda x: x.clamp(-1, 1).exp().clamp(0, 2),
            lambda x: x.clamp(-1, 1).float().clamp(0, 1),
        ),
    ),
    "abs-of-not-negative": Case(
        fires=(lambda x: x.relu().abs().sin(), lambda x: (x**2).abs().sin(), lambda x: (x.exp() / 3).abs().sin()),
        near=(lambda x: x.tanh().abs().sin(), lambda x: F.silu(x).abs().sin(), lambda x: (x**3).abs().sin()),
    ),
    "idle-maximum": Case(
        fires=(
            lambda x: torch.maximum(F.relu6(x), (x.isnan() * 1.0).double().neg()).sin(),
            lambda x: torch.maximum((x > 0).double() - 2, x.sigmoid()).sin(),
        ),
        near=(
            lambda x: torch.maximum(x.relu(), x.sigmoid().neg()).sin(),
            lambda x: torch.maximum(x.tanh(), (x > 0).double() - 1).sin(),
        ),
    ),
    "idle-minimum": Case(
        fires=(lambda x: torch.minimum((x > 0).double() + 1.5, x.sigmoid()).sin(),),
        near=(
            lambda x: torch.minimum(x.tanh(), x.exp() + 1).sin(),
            lambda x: torch.minimum(x.relu(), (x > 0).double()).sin(),
        ),
    ),
    "rounding-of-rounding": Case(
        fires=(lambda x: x.floor().ceil(), lambda x: x.round().trunc()),
        near=(
            lambda x: (x.floor() / 2).floor(),
            lambda x: x.floor().int().floor(),
            lambda x: x.round(decimals=1).floor(),
        ),
    ),
    "sign-of-sign": Case(fires=(lambda x: x.sign().sign(),), near=(lambda x: x.sign().neg().sign(),)),
    "even-function-of-negation": Case(
        fires=(lambda x: (-x).abs(), lambda x: (-x).cos()),
        near=(lambda x: (-x).sin(), lambda x: (-x).exp()),
        apart=(both(torch.neg, torch.cos),),
    ),
    "square-of-negation": Case(fires=(lambda x: (-x) ** 2,), near=(lambda x: (-x) ** 3, lambda x: -(x**2))),
    "product-of-negations": Case(fires=(lambda x: (-x) * (-(x.sin())),), near=(lambda x: (-x) * x.sin(),)),
    "add-negation": Case(
        fires=(lambda x: x.sin() + -x, lambda x: (-x) + x.sin()),
        near=(lambda x: torch.add(x.sin(), -x, alpha=2), lambda x: -x + 1),
    ),
    "subtract-negation": Case(fires=(lambda x: x.sin() - -x,), near=(lambda x: -x - x.sin(),)),
    "extreme-of-one": Case(
        fires=(lambda x: torch.maximum(x, x).sin(), lambda x: torch.minimum(x, x).sin()),
        near=(lambda x: torch.maximum(x, x.sin()).sin(),),
    ),
    "logarithm-of-exponential": Case(fires=(lambda x: x.exp().log().sin(),), near=(lambda x: (x.exp() + 1).log(),)),
    "exponential-of-logarithm": Case(
        fires=(lambda x: x.abs().log().exp().sin(),), near=(lambda x: (x.abs().log() * 2).exp().sin(),)
    ),
    "square-of-root": Case(fires=(lambda x: (x.abs().sqrt() ** 2).sin(),), near=(lambda x: x.abs().sqrt() ** 3,)),
    "root-of-square": Case(
        fires=(lambda x: (x**2).sqrt(),), near=(lambda x: (x**4).sqrt(), lambda x: (x * x.sin()).sqrt())
    ),
    "difference-of-one": Case(fires=(lambda x: (x - x) + x.sin(),), near=(lambda x: torch.sub(x, x, alpha=2).sin(),)),
    "quotient-of-one": Case(
        fires=(lambda x: (x / x) + x.sin(),), near=(lambda x: torch.div(x, x, rounding_mode="floor").sin(),)
    ),
    "multiply-by-zero": Case(fires=(lambda x: x * 0 + x.sin(),), near=(lambda x: x * 1e-300,)),
    "affine-chain": Case(
        fires=(
            lambda x: x * 2 * 3,
            lambda x: x + 1 + 2 - 5,
            lambda x: (x * 2 + 1) * 3 - 0.5,
            lambda x: 1 - (2 - x),
            lambda x: (x * 0.5 * 0.25) / 3,
            lambda x: (-x) * 2,
            lambda x: (x * 0.5) * 4,
            lambda x: ((x + 3) - 3).sin(),
            lambda x: x * 2 * 0.25 + 1 - 0.5,
        ),
        near=(
            lambda x: x * 2 + 1,
            lambda x: x * 4 * 0.5,
            lambda x: x * 1e-200 * 1e-200,
            lambda x: x * 2.0 * float("inf"),
            lambda x: (x * 2).float() * 3,
            lambda x: torch.div(x * 2, 3, rounding_mode="floor"),
            half(lambda x: x + 40000 + 1),
            lambda x: x.int() * 2 * 3,
        ),
        apart=(both(lambda x: x + 1, lambda y: y * 2 + 1),),
    ),
    "affine-chain-that-shrinks": Case(
        fires=(lambda x: x * 4 * 0.5, lambda x: (x * 8 + 1) / 4),
        near=(lambda x: x * 1e-200 * 1e-200, lambda x: x * 2 + 1),
    ),
    "reduction-of-one": Case(
        fires=(
            lambda x: x.sum(1).sin(),
            lambda x: x.mean(1, keepdim=True).sin(),
            lambda x: x.amax(-1).sin(),
            lambda x: x.logsumexp(1).sin(),
            lambda x: x.prod(1).sin(),
        ),
        near=(lambda x: x.sum(0), lambda x: x.int().sum(1), lambda x: x.sum(1, dtype=torch.float32), lambda x: x.sum()),
        shape=(20, 1),
    ),
    "variance-of-one": Case(
        fires=(lambda x: x.var(1, correction=0), lambda x: x.var(1, correction=0, keepdim=True)),
        near=(lambda x: x.var(1), lambda x: x.var(0, correction=0)),
        shape=(20, 1),
    ),
    "softmax-of-one": Case(
        fires=(lambda x: x.softmax(1), lambda x: x.softmax(-1)), near=(lambda x: x.softmax(0),), shape=(20, 1)
    ),
    "log-softmax-of-one": Case(fires=(lambda x: x.log_softmax(1),), near=(lambda x: x.log_softmax(0),), shape=(20, 1)),
    "reduction-of-reduction": Case(
        fires=(
            lambda x: x.sum(3).sum(1),
            lambda x: x.mean(2, keepdim=True).mean((1, 3)),
            lambda x: x.amax((2, 3)).amax(0, keepdim=True),
            lambda x: x.sum(1).sum(),
        ),
        near=(
            lambda x: x.sum(3).mean(1),
            lambda x: x.amax(3).amin(1),
            lambda x: x.sum(3).relu().sum(1),
            lambda x: x.sum(3).sum(1, dtype=torch.float32),
        ),
        shape=IMAGE,
        apart=(both(lambda x: x.sum(3), lambda y: y.sum(1)),),
    ),
    "reduction-of-copy": Case(
        fires=(lambda x: x.t().contiguous().sum(0),), near=(lambda x: x.t().contiguous().cumsum(0),)
    ),
    "reduction-of-copies": Case(
        fires=(
            lambda x: x.expand(5, 6, 20).sum(0),
            lambda x: x.unsqueeze(1).expand(6, 7, 20).mean(1).sin(),
            lambda x: x.expand(5, 6, 20).sum((0, 2), keepdim=True),
            lambda x: x.expand(5, 6, 20).amax((0, 1)).sin(),
        ),
        near=(
            lambda x: x.expand(5, 6, 20).sum(1),
            lambda x: x.expand(5, 6, 20).prod(0),
            lambda x: x[:, None, None].expand(6, 7, 8, 20).sum(1),
        ),
    ),
    "add-filled": Case(
        fires=(
            lambda x: x + torch.full((20,), 0.5, dtype=x.dtype),
            lambda x: torch.zeros_like(x) + x,
            lambda x: x + torch.tensor(2.5),
        ),
        near=(
            lambda x: x + torch.ones(3, 1, 1, dtype=x.dtype),
            lambda x: x.int() + torch.ones_like(x).int(),
            lambda x: x.float() + torch.full_like(x, 0.1),
            lambda x: x.float() + torch.full((20,), float("inf")),
            lambda x: x + torch.arange(20).double(),
            lambda x: torch.add(x, torch.ones_like(x), alpha=2),
            lambda x: x.half() + torch.tensor(0.1),
        ),
    ),
    "multiply-by-filled": Case(
        fires=(lambda x: torch.ones_like(x) * x, lambda x: x * torch.tensor(3)),
        near=(lambda x: x * x.new_zeros(6, 20).add_(1), lambda x: x[:1] * torch.ones_like(x)),
    ),
    "subtract-filled": Case(fires=(lambda x: x - torch.ones_like(x),), near=(lambda x: x - x.new_ones(2, 6, 20),)),
    "subtract-from-filled": Case(
        fires=(lambda x: torch.ones_like(x) - x,), near=(lambda x: torch.sub(torch.ones_like(x), x, alpha=2),)
    ),
    "divide-by-filled": Case(
        fires=(lambda x: x / torch.full_like(x, 3),),
        near=(lambda x: torch.full_like(x, 3) / x, lambda x: torch.div(x, torch.ones_like(x), rounding_mode="floor")),
    ),
    "function-of-filled": Case(
        fires=(
            lambda x: torch.full_like(x, 2).exp() + x.sin(),
            lambda x: x * (torch.tensor(2.0, dtype=x.dtype) * 3).sqrt(),
            lambda x: x + (x.new_ones(6, 1) + x.new_zeros(1, 20)),
        ),
        near=(
            lambda x: torch.full_like(x, -1).sqrt() + x,
            lambda x: torch.bernoulli(torch.full_like(x, 1)) + x,
            lambda x: torch.ones_like(x).t().exp() + x.t(),
            lambda x: torch.arange(20).double().exp() + x,
            lambda x: torch.cat([torch.ones_like(x), torch.ones_like(x)]),
        ),
    ),
    "value-of-extreme": Case(
        fires=(lambda x: x.max(1).values, lambda x: x.min(-1, keepdim=True)[0], lambda x: x.int().max(0)[0]),
        near=(
            lambda x: x.max(1),
            lambda x: x.max(1).indices,
            lambda x: torch.max(x, x.sin()),
            lambda x: x.max(),
            lambda x: x.sort(1).values,
        ),
    ),
    "monotone-function-before-extreme": Case(
        fires=(
            lambda x: x.sigmoid().amax(1),
            lambda x: (-x).amax((0, 1), keepdim=True),
            lambda x: (1 - x).amin(0),
            lambda x: F.leaky_relu(x, 0.1).amax(0),
            lambda x: x.exp().sqrt().amax(1),
            lambda x: (x * 3 + 1).amin(1),
        ),
        near=(
            lambda x: x.abs().amax(1),
            lambda x: F.silu(x).amax(1),
            lambda x: x.sqrt().amax(1),
            lambda x: (x * x).amax(1),
            lambda x: (x + x.sin()).amax(1),
            lambda x: (x * 0).amax(1),
            lambda x: F.leaky_relu(x, -0.1).amax(0),
            lambda x: x.float().amax(1),
        ),
        apart=(both(torch.sigmoid, lambda y: y.amax(1)),),
    ),
    "scale-before-sum": Case(
        fires=(
            lambda x: (x * 0.5).sum(1),
            lambda x: (x / 3).mean((0, 1)),
            lambda x: (-x).sum(),
            half(lambda x: (x * 2).sum(1)),
        ),
        near=(
            lambda x: (x + 1).sum(1),
            lambda x: (x * 0).sum(1),
            lambda x: (x.int() * 2).sum(1),
            half(lambda x: (x * 0.5).sum(1)),
            lambda x: (x * 2).amax(1),
        ),
        apart=(both(lambda x: x * 2, lambda y: y.sum(1)),),
    ),
    "factor-before-sum": Case(
        fires=(lambda x: (x * x[:, :1].sigmoid()).sum(1), lambda x: (x[:, :1].tanh() * x).mean(1, keepdim=True)),
        near=(
            lambda x: (x * x[:, :1]).sum(1),
            lambda x: (x * x[:, :1].sigmoid()).sum(0),
            lambda x: (x * x[:, :1].exp()).sum(1),
            lambda x: (x * x.sigmoid()).sum(1),
        ),
    ),
    "max-pool-of-max-pool": Case(
        fires=(
            lambda x: F.max_pool2d(F.max_pool2d(x, 2), 2),
            lambda x: F.max_pool2d(F.max_pool2d(x, 3, 2, 1), 2),
            lambda x: F.max_pool3d(F.max_pool3d(x[None], (1, 2, 2)), (1, 2, 2)),
        ),
        near=(
            lambda x: F.max_pool2d(F.max_pool2d(x, 2, 3), 2),
            lambda x: F.max_pool2d(F.max_pool2d(x, 2), 3, 1, 1),
            lambda x: F.max_pool2d(F.max_pool2d(x, 3, dilation=2), 2),
            lambda x: F.max_pool2d(F.max_pool2d(x, 5, ceil_mode=True), 2),
            lambda x: F.max_pool2d(F.avg_pool2d(x, 2), 2),
            lambda x: F.max_pool2d(F.max_pool2d(x, 2, return_indices=True)[1].double(), 2),
        ),
        shape=IMAGE,
    ),
    "average-pool-of-average-pool": Case(
        fires=(
            lambda x: F.avg_pool2d(F.avg_pool2d(x, 2), 3),
            lambda x: F.avg_pool2d(F.avg_pool2d(x, (2, 3)), (2, 1), (1, 2)),
            lambda x: F.avg_pool3d(F.avg_pool3d(x[None], (1, 2, 2)), (1, 2, 2)),
        ),
        near=(
            lambda x: F.avg_pool2d(F.avg_pool2d(x, 3, 2), 2),
            lambda x: F.avg_pool2d(F.avg_pool2d(x, 2, padding=1), 2),
            lambda x: F.avg_pool2d(F.avg_pool2d(x, 2), 2, padding=1),
            lambda x: F.avg_pool2d(F.avg_pool2d(x, 2, divisor_override=3), 2),
            lambda x: F.avg_pool2d(F.avg_pool2d(x, 5, ceil_mode=True), 2),
        ),
        shape=IMAGE,
    ),
    "mean-of-average-pool": Case(
        fires=(
            lambda x: F.avg_pool2d(x, 2).mean((2, 3)),
            lambda x: F.avg_pool2d(x, 3).mean((1, 2, 3), keepdim=True),
            lambda x: F.avg_pool2d(x, (1, 4)).mean(3),
        ),
        near=(
            lambda x: F.avg_pool2d(x, 5).mean((2, 3)),
            lambda x: F.avg_pool2d(x, 2, 1).mean((2, 3)),
            lambda x: F.avg_pool2d(x, 2).mean(2),
        ),
        shape=IMAGE,
    ),
    "increasing-function-before-max-pool": Case(
        fires=(
            lambda x: F.max_pool2d(x.relu(), 2),
            lambda x: F.max_pool2d(x.sigmoid(), 3, 2, 1),
            lambda x: F.max_pool2d(x * 2 + 1, 2, ceil_mode=True),
            lambda x: F.max_pool2d(x.relu().contiguous(memory_format=torch.channels_last).tanh(), 2),
        ),
        near=(
            lambda x: F.max_pool2d(-x, 2),
            lambda x: F.max_pool2d(F.gelu(x), 2),
            lambda x: F.max_pool2d(x.relu(), 2, dilation=2),
            lambda x: F.max_pool2d(x.relu(), 2, return_indices=True),
            lambda x: F.avg_pool2d(x.relu(), 2),
        ),
        shape=IMAGE,
        apart=(both(torch.sigmoid, lambda y: F.max_pool2d(y, 2)),),
    ),
    "function-of-copies": Case(
        fires=(lambda x: x.expand(9, 6, 20).sin(), lambda x: F.gelu(x[:, None].expand(6, 7, 20))),
        near=(
            lambda x: x.expand(9, 6, 20) * x,
            lambda x: x.expand(9, 6, 20) > 0,
            lambda x: x.expand(9, 6, 20).double().neg(),
            lambda x: (1 - x.expand(1, 6, 20)).sin(),
            lambda x: x.expand(9, 6, 20).tril(),
        ),
    ),
}


def results(function: Function, x: Tensor) -> tuple[Tensor, ...]:
    result = function(x)
    return result if isinstance(result, tuple) else (result,)


def alone(name: str, function: Function, x: Tensor) -> tuple[fx.GraphModule, list[Application]]:
    """The graph of `function` after nothing but that rule."""
    graph = traced(function, x)
    with override(algebra=OURS[name].level):
        return graph, simplify(graph, rules=(OURS[name],))


def names(applications: list[Application]) -> set[str]:
    return {application.rule for application in applications} - {"common-subexpression"}


def assert_same(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Equal up to rounding, laid out alike, with NaN and infinities in the same places."""
    assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def special(shape: Shape) -> Tensor:
    """Ordinary numbers with some that are not."""
    x = torch.randn(shape, dtype=torch.float64)
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 30.0, -1e-310], dtype=torch.float64)
    flat = x.flatten()
    places = torch.randperm(flat.numel())[: len(values)]
    flat[places] = values[: len(places)]
    return flat.view(shape)


def test_every_rule_is_tested() -> None:
    assert sorted(CASES) == sorted(OURS)
    assert set(OURS) <= {rule.name for rule in RULES}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.invariant(25)
def test_a_rule_fires_and_saves(name: str) -> None:
    x = torch.randn(CASES[name].shape, dtype=torch.float64)
    for number, function in enumerate(CASES[name].fires):
        graph, applications = alone(name, function, x)
        assert names(applications) == {name}, f"{name}, function {number}"
        for done in applications:
            assert done.after.seconds <= done.before.seconds
            assert done.after.flops <= done.before.flops
            assert done.after.bytes <= done.before.bytes
        for found, wanted in zip(results(graph, x), results(function, x), strict=True):
            assert_same(found, wanted, 1e-12 if function(x).dtype is torch.float64 else 1e-3)


@pytest.mark.parametrize("name", [name for name in CASES if OURS[name].level is Algebra.SAFE])
@pytest.mark.thinned(2)
@pytest.mark.invariant(25)
def test_nan_and_infinities_stand_where_they_stood(name: str) -> None:
    for function in CASES[name].fires:
        graph, applications = alone(name, function, special(CASES[name].shape))
        assert applications
        for _ in range(5):
            x = special(CASES[name].shape)
            for found, wanted in zip(results(graph, x), results(function, x), strict=True):
                assert_same(found, wanted, 1e-12 if wanted.dtype is torch.float64 else 1e-3)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_leaves_alone_what_is_only_similar(name: str) -> None:
    x = torch.randn(CASES[name].shape, dtype=torch.float64)
    for number, function in enumerate((*CASES[name].near, *CASES[name].apart)):
        assert names(alone(name, function, x)[1]) == set(), f"{name}, function {number}"


@pytest.mark.parametrize("name", [name for name in CASES if OURS[name].level is Algebra.FINITE])
def test_a_rule_for_finite_numbers_waits_to_be_asked(name: str) -> None:
    x = torch.randn(CASES[name].shape, dtype=torch.float64)
    for function in CASES[name].fires:
        assert simplify(traced(function, x), rules=(OURS[name],)) == []


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6)
@given(data=st.data())
@pytest.mark.thinned(2)
@pytest.mark.invariant(25)
def test_a_rule_changes_no_value(name: str, data: st.DataObject) -> None:
    """Over random shapes, with any function of the case; most are too small for the rule to pay."""
    case = CASES[name]
    function = data.draw(st.sampled_from((*case.fires, *case.near)))
    sizes = [data.draw(st.sampled_from((size, max(1, size - 1), 2 * size))) for size in case.shape[:1]]
    shape = (*sizes, *case.shape[1:-1], case.shape[-1] + data.draw(st.integers(0, 3)) * (case.shape[-1] > 1))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(shape, dtype=torch.float64)
    try:
        wanted = results(function, x)
    except RuntimeError:
        return  # the function is for the shape of its case
    for found, value in zip(results(alone(name, function, x)[0], x), wanted, strict=True):
        assert_same(found, value, 1e-12 if value.dtype is torch.float64 else 2e-3)


@pytest.mark.parametrize("name", CASES)
def test_float32_stays_within_the_policy(name: str) -> None:
    x = torch.randn(CASES[name].shape)
    for function in CASES[name].fires:
        if function(x).dtype is not torch.float32:
            continue
        graph, _ = alone(name, function, x)
        for found, eager, exact in zip(
            results(graph, x),
            results(function, x),
            results(function, x.double()),
            strict=True,
        ):
            scale = exact.abs().amax() * torch.finfo(torch.float32).eps
            assert (found - exact).abs().amax() <= 2 * (eager - exact).abs().amax() + 4 * scale
