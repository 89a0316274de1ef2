"""What analyses say of values is true of them: bounds, NaN, order, and lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._ops import OpOverload

from fusepass.patterns.analysis.affine import chains
from fusepass.patterns.analysis.interval import interval
from fusepass.patterns.analysis.monotone import Direction, direction
from fusepass.patterns.analysis.ranges import Interval
from tests.support.aten import traced

Function = Callable[..., Any]

inf, nan = math.inf, math.nan

FUNCTIONS: tuple[Function, ...] = (
    torch.sigmoid, torch.tanh, torch.relu, F.relu6, F.hardtanh, F.hardsigmoid, F.hardswish, F.gelu, F.silu, F.mish, F.softplus,
    torch.exp, torch.abs, torch.neg, torch.sqrt, torch.sin, torch.cos, torch.erf, torch.atan, torch.sign, torch.square,
    lambda x: x**2, lambda x: x**4, lambda x: x**3, lambda x: x * x, lambda x: x * 2.5 - 1, lambda x: 1 - x, lambda x: x / 3,
    lambda x: 1 / (x.sigmoid() + 0.5), lambda x: x / x.exp(), lambda x: x * x.tanh(), lambda x: x + x.relu(), lambda x: x - x.exp(),
    lambda x: x.softmax(-1), lambda x: x.log_softmax(0), lambda x: x.clamp(-1, 2), lambda x: x.clamp(max=0.3), lambda x: x.clamp(3, 1),
    lambda x: x.float(), lambda x: x.half(), lambda x: (x > 0).to(x.dtype), lambda x: torch.where(x > 0, x.tanh(), x),
    lambda x: torch.maximum(x, x.sigmoid()), lambda x: torch.minimum(x, x.exp()), lambda x: torch.cat([x, x.relu()]),
    lambda x: F.pad(x, (1, 1), value=-0.5), lambda x: x.mean(0, keepdim=True), lambda x: x.sum(1, keepdim=True), lambda x: x.amax(0, keepdim=True),
    lambda x: x.t(), lambda x: x[:, 1:], lambda x: F.max_pool2d(x[None], 2)[0], lambda x: F.avg_pool2d(x[None], 2, 1, 1)[0],
    lambda x: x.var(0, correction=0, keepdim=True), lambda x: torch.add(x, x.tanh(), alpha=-2), lambda x: x.chunk(2, 1)[1],
    lambda x: x.max(1, keepdim=True)[0], lambda x: x * 1e30, lambda x: x.to(torch.int32).to(x.dtype), lambda x: -x.expand(x.shape).abs(),
)  # fmt: skip


class Watch(fx.Interpreter):
    """Runs a graph and compares each value with what is known of it."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor) and value.numel():
            known, wide = interval(n), value.double()
            numbers = wide[~wide.isnan()]
            assert known.nan or numbers.numel() == wide.numel(), f"{n.name} is NaN, {known}"
            assert not numbers.numel() or known.low <= numbers.min() <= numbers.max() <= known.high, (
                f"{n.name}: {known}"
            )
        return value


@settings(max_examples=150)
@given(
    functions=st.lists(st.sampled_from(FUNCTIONS), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    ordinary=st.booleans(),
    seed=st.integers(0, 9),
)
def test_values_lie_in_their_interval(functions: list[Function], dtype: torch.dtype, ordinary: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 8) * 3
    if not ordinary:
        x.view(-1)[:7] = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1e20, -1e20])

    def chain(value: Tensor) -> Tensor:
        for function in functions:
            if value.dim() == 2 and min(value.shape) > 1:
                value = function(value)
        return value

    x = x.to(dtype)
    Watch(traced(chain, x)).run(x)


def known(function: Function) -> Interval:
    """The interval of the last operator of `function`."""
    graph = traced(function, torch.randn(3, 4)).graph
    return interval([node for node in graph.nodes if isinstance(node.target, OpOverload)][-1])


@pytest.mark.parametrize(
    ("function", "low", "high", "may_be_nan"),
    [
        (torch.sigmoid, 0, 1, True),
        (lambda x: x.clamp(-1, 2).relu(), 0, 2, True),
        (lambda x: (x > 0).float() * 2, 0, 2, False),
        (lambda x: (x > 0).float().softmax(1).t().clone(), 0, 1, False),
        (lambda x: (x > 0).float().exp().log(), -inf, inf, True),
        (lambda x: x.exp(), 0, inf, True),
        (lambda x: x.view(torch.int32), -(2**31), 2**31 - 1, False),
        (lambda x: x.sigmoid().view(torch.int32).view(torch.float32), -inf, inf, True),
        (lambda x: torch.complex(x, x).abs(), 0, inf, True),
        (lambda x: torch.complex(x, x).real, -inf, inf, True),
    ],
)
def test_what_is_known(function: Function, low: float, high: float, may_be_nan: bool) -> None:
    found = known(function)
    assert (found.low, found.high, found.nan) == (pytest.approx(low), pytest.approx(high), may_be_nan)


def test_a_dilated_pool_may_see_padding_alone() -> None:
    graph = traced(lambda x: F.max_pool2d(x.relu(), 2, 1, 1, dilation=2), torch.randn(1, 1, 2, 2)).graph
    (output,) = graph.find_nodes(op="output")
    assert interval(output.all_input_nodes[0]).low == -inf


def test_integers_wrap() -> None:
    graph = traced(lambda x: x.abs(), torch.tensor([1], dtype=torch.int8)).graph
    assert interval(list(graph.nodes)[1]).low == -128


POINTS = torch.cat(
    [torch.tensor([-inf, -1e300]), torch.linspace(-40, 40, 4001, dtype=torch.float64), torch.tensor([1e300, inf])]
)


def directions(function: Function) -> Direction | None:
    graph = traced(lambda x: function(x), POINTS).graph
    return direction([node for node in graph.nodes if isinstance(node.target, OpOverload)][-1])


@pytest.mark.parametrize(
    "function",
    [
        torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.expm1, torch.erf, torch.atan, torch.asinh, torch.sinh, F.hardsigmoid,
        F.hardtanh, lambda x: F.softplus(x, threshold=40), torch.floor, torch.ceil, torch.trunc, torch.round, F.elu, F.celu, F.selu, F.leaky_relu,
        lambda x: x.clamp(-1, 2), lambda x: x.clamp(2, -1), lambda x: x.clamp_min(3), lambda x: x * 3, lambda x: x / 3, lambda x: x - 2,
        lambda x: x + 1,
    ],
)  # fmt: skip
def test_increasing_functions_increase(function: Function) -> None:
    assert directions(function) is Direction.INCREASING
    values = function(POINTS)
    assert not values.isnan().any()
    assert (values[1:] >= values[:-1] - 1e-12 * values[1:].abs().clamp(max=1e300)).all()


@pytest.mark.parametrize("function", [torch.neg, lambda x: x * -2, lambda x: 1 - x, lambda x: x / -4])
def test_decreasing_functions_decrease(function: Function) -> None:
    assert directions(function) is Direction.DECREASING
    values = function(POINTS)
    assert (values[1:] <= values[:-1]).all()


@pytest.mark.parametrize(
    "function",
    [
        F.softplus, torch.abs, F.gelu, F.silu, F.mish, F.hardswish, torch.sin, torch.square, torch.sqrt, torch.log, torch.reciprocal, torch.sign,
        lambda x: x * 0, lambda x: x * inf, lambda x: x + inf, lambda x: x * nan, lambda x: x * x,
        lambda x: F.leaky_relu(x, -0.1), lambda x: F.elu(x, -1), lambda x: x % 3, lambda x: x.clamp(max=x),
    ],
)  # fmt: skip
def test_no_order_is_claimed_of_others(function: Function) -> None:
    assert directions(function) is None


def test_a_domain_is_looked_at() -> None:
    assert directions(lambda x: (x.exp() + 1).log()) is Direction.INCREASING
    assert directions(lambda x: (x.exp() - 1).log()) is None
    assert directions(lambda x: x.relu().sqrt()) is Direction.INCREASING


def test_lines() -> None:
    graph = traced(lambda x: 3 - torch.add((x * 4 - 1) / 2, 5, alpha=2), torch.randn(3)).graph
    (output,) = graph.find_nodes(op="output")
    lines = list(chains(output.all_input_nodes[0]))
    assert [(line.scale, line.shift, line.steps) for line in lines] == [
        (-1, 3, 1), (-1, -7, 2), (-0.5, -7, 3), (-0.5, -6.5, 4), (-2, -6.5, 5),
    ]  # fmt: skip
    assert [line.growth for line in lines] == [1, 1, 0.5, 1, 4]
    assert lines[-1].source.op == "placeholder"
    assert lines[-1].offsets == 14


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.int() * 2, lambda x: x * True, lambda x: x * x, lambda x: x / 0, lambda x: x + nan, lambda x: x.reciprocal(),
        lambda x: torch.div(x, 2, rounding_mode="trunc"), lambda x: x.double() + torch.ones(3, dtype=torch.float64), lambda x: x**2,
    ],
)  # fmt: skip
def test_what_is_no_line(function: Function) -> None:
    (output,) = traced(function, torch.randn(3)).graph.find_nodes(op="output")
    assert list(chains(output.all_input_nodes[0])) == []
