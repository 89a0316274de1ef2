"""Rules about average pools: where they apply, where not, and that they save work."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.nn.functional as F

from fusepass.patterns.simplify import simplify
from tests.support.algebra import Function, rewritten, same_value, within_policy
from tests.support.aten import traced

aten = torch.ops.aten

FILTER, PRODUCT, MEAN = "average-pool-of-convolution", "average-pool-of-products", "average-pool-of-everything"

X1, W1 = (2, 4, 20), (6, 4, 3)
X2, W2, B, P = (2, 4, 14, 15), (6, 4, 3, 3), (6,), (6, 1, 1)
X3, W3, T3 = (2, 2, 8, 9, 10), (4, 2, 3, 3, 3), (2, 4, 3, 3, 3)
T2 = (4, 6, 3, 3)


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) - 0.3


Cases = dict[str, tuple[Function, tuple[tuple[int, ...], ...]]]

FILTERS: Cases = {
    "tiles": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 4), (X2, W2, B)),
    "padded convolution": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b, padding=1), 2), (X2, W2, B)),
    "strides": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b, stride=2), 2), (X2, W2, B)),
    "dilation": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b, dilation=2), 2), (X2, W2, B)),
    "windows with gaps": (lambda x, w: F.avg_pool2d(F.conv2d(x, w), 2, stride=3), (X2, W2)),
    "one axis": (lambda x, w: F.avg_pool2d(F.conv2d(x, w), (1, 3)), (X2, W2)),
    "three axes": (lambda x, w, b: F.avg_pool3d(F.conv3d(x, w, b, padding=1), 2), (X3, W3, (4,))),
    "conv1d": (lambda x, w, b: F.avg_pool1d(F.conv1d(x, w, b), 3), (X1, W1, B)),
    "groups": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b, groups=2), 3), (X2, (6, 2, 3, 3), B)),
    "affine": (lambda x, w, b, p: F.avg_pool2d((F.conv2d(x, w, b) - p) * p * 2, 3), (X2, W2, B, P)),
    "plus a tensor": (lambda x, w, z: F.avg_pool2d(F.conv2d(x, w) + z, 2), (X2, W2, (2, 6, 12, 13))),
    "plus a row": (lambda x, w, z: F.avg_pool2d(F.conv2d(x, w) + z, 2), (X2, W2, (13,))),
    "one weight": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 2), (X2, (6, 4, 1, 1), B)),
    "transposed": (lambda x, w, b: F.avg_pool2d(F.conv_transpose2d(x, w, b), 2), (X2, T2, B)),
    "transposed, strides": (lambda x, w, b: F.avg_pool2d(F.conv_transpose2d(x, w, b, 2, 1, 1), 2), (X2, T2, B)),
    "transposed, groups": (lambda x, w: F.avg_pool2d(F.conv_transpose2d(x, w, groups=2), 3), (X2, (4, 3, 3, 3))),
    "transposed, three axes": (lambda x, w: F.avg_pool3d(F.conv_transpose3d(x, w, None, 2, 1, 1), 2), (X3, T3)),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_pool_joins_the_convolution(name: str) -> None:
    function, shapes = FILTERS[name]
    inputs = [rand(*shape) for shape in shapes]
    result = same_value(function, *inputs)
    assert result.rules.count(FILTER) == 1
    before, after = result.flops(*inputs)
    assert after < before


PRODUCTS: Cases = {
    "features": (lambda x, w, b: F.avg_pool1d(F.linear(x, w, b), 2), ((5, 7), (8, 7), (8,))),
    "overlapping": (lambda x, w, b: F.avg_pool1d(F.linear(x, w, b), 5, stride=2), ((5, 7), (9, 7), (9,))),
    "through dimensions of size 1": (
        lambda x, w, b: F.avg_pool1d(F.linear(x, w, b).unsqueeze(1), 4).squeeze(1),
        ((5, 7), (8, 7), (8,)),
    ),
    "a sequence": (lambda x, w, b: F.avg_pool1d(F.linear(x, w, b) - b, 4), ((2, 3, 7), (8, 7), (8,))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_pool_joins_the_product(name: str) -> None:
    function, shapes = PRODUCTS[name]
    inputs = [rand(*shape) for shape in shapes]
    result = same_value(function, *inputs)
    assert result.rules.count(PRODUCT) == 1
    before, after = result.flops(*inputs)
    assert after < before


def test_a_window_over_everything_is_a_mean() -> None:
    result = same_value(lambda x: F.avg_pool2d(x.exp(), (14, 15)), rand(*X2))
    assert result.rules == [MEAN]
    result = same_value(lambda x, w: F.avg_pool2d(F.conv2d(x, w), (12, 13)), rand(*X2), rand(*W2))
    assert result.rules[:2] == [MEAN, "sum-of-convolution"]


POINT = "average-pool-before-points"
POINTS: Cases = {
    "padding": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 3, 2, 1), (X2, (6, 4, 1, 1), B)),
    "padding that does not count": (
        lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 3, 2, 1, count_include_pad=False),
        (X2, (6, 4, 1, 1), B),
    ),
    "without a bias": (lambda x, w: F.avg_pool2d(F.conv2d(x, w), (2, 3), 2, (1, 0)), (X2, (6, 4, 1, 1))),
    "half windows": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 4, 3, ceil_mode=True), (X2, (6, 4, 1, 1), B)),
    "half windows beside padding": (
        lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 4, 3, 2, ceil_mode=True),
        (X2, (6, 4, 1, 1), B),
    ),
    "another divisor": (
        lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 2, padding=1, divisor_override=3),
        (X2, (6, 4, 1, 1), B),
    ),
    "groups": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b, groups=2), 3, 2, 1), (X2, (6, 2, 1, 1), B)),
    "three axes": (lambda x, w, b: F.avg_pool3d(F.conv3d(x, w, b), 2, padding=1), (X3, (4, 2, 1, 1, 1), (4,))),
}


@pytest.mark.parametrize("name", POINTS)
def test_a_padded_pool_goes_before_single_positions(name: str) -> None:
    function, shapes = POINTS[name]
    inputs = [rand(*shape) for shape in shapes]
    result = same_value(function, *inputs)
    assert result.rules.count(POINT) == 1
    before, after = result.flops(*inputs)
    assert after < before
    within_policy(function, *inputs)


NEAR: Cases = {
    "single positions that are read besides": (
        lambda x, w: (lambda y: F.avg_pool2d(y, 3, 1, 1) + y)(F.conv2d(x, w)),
        (X2, (6, 4, 1, 1)),
    ),
    "padded single positions": (lambda x, w: F.avg_pool2d(F.conv2d(x, w, padding=1), 3, 2, 1), (X2, (6, 4, 1, 1))),
    "single positions with gaps": (
        lambda x, w: F.avg_pool2d(F.conv2d(x, w, stride=2), 3, 2, 1),
        (X2, (6, 4, 1, 1)),
    ),
    "large windows": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 7), (X2, W2, B)),
    "many channels": (lambda x, w: F.avg_pool2d(F.conv2d(x, w), 2), ((2, 20, 6, 6), (6, 20, 3, 3))),
    "padding": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 2, padding=1), (X2, W2, B)),
    "padding that does not count": (
        lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 2, padding=1, count_include_pad=False),
        (X2, W2, B),
    ),
    "half windows": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 2, ceil_mode=True), (X2, W2, B)),
    "another divisor": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b), 2, divisor_override=3), (X2, W2, B)),
    "not linear": (lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b).relu(), 2), (X2, W2, B)),
    "the maximum": (lambda x, w, b: F.max_pool2d(F.conv2d(x, w, b), 2), (X2, W2, B)),
    "scaled positions": (lambda x, w, z: F.avg_pool2d(F.conv2d(x, w) * z, 2), (X2, W2, (13,))),
    "strides over elements": (lambda x, w: F.avg_pool2d(F.conv2d(x, w, stride=3), 2), (X2, (6, 4, 2, 2))),
    "transposed, windows within strides": (
        lambda x, w: F.avg_pool2d(F.conv_transpose2d(x, w, stride=2), 3),
        (X2, T2),
    ),
    "rows of a product": (lambda x, w: F.avg_pool2d(F.linear(x, w), 2), ((2, 4, 7), (8, 7))),
    "cast": (lambda x, w: F.avg_pool2d(F.conv2d(x, w).float(), 2), (X2, W2)),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_only_similar_stays(name: str) -> None:
    function, shapes = NEAR[name]
    assert same_value(function, *(rand(*shape) for shape in shapes)).rules == []


def test_pools_of_pools_are_one_before_a_convolution_takes_them_in() -> None:
    x, w = rand(2, 3, 34, 34), rand(5, 3, 3, 3)
    twice = same_value(lambda x, w: F.avg_pool2d(F.avg_pool2d(F.conv2d(x, w), 2), 2), x, w)
    assert (twice.rules[0], twice.rules.count(FILTER)) == ("average-pool-of-average-pool", 1)
    mean = same_value(lambda x, w: F.avg_pool2d(F.conv2d(x, w), 2).mean((2, 3)), x, w)
    assert mean.rules == ["mean-of-average-pool", "sum-of-convolution"]
    whole = same_value(lambda x, w: F.avg_pool2d(F.conv2d(x, w), 32), x, w)
    assert whole.rules == ["average-pool-of-everything", "sum-of-convolution"]
    row = same_value(lambda x, w: F.avg_pool1d(F.linear(x, w), 4).mean(1), rand(6, 10), rand(8, 10))
    assert {"mean-of-average-pool", "sum-of-products"} <= set(row.rules)
    assert PRODUCT not in row.rules
    graph = traced(lambda x, w: F.avg_pool2d(F.conv2d(x, w), 32), x, w)
    assert [done.rule for done in simplify(graph)] == ["average-pool-of-everything", "sum-of-convolution"], "it pays"


STEPS: dict[str, Function] = {
    "overlapping windows": lambda x, w, b: F.avg_pool2d(F.avg_pool2d(F.conv2d(x, w, b), 4, 1), 4),
    "three overlapping windows": lambda x, w, b: F.avg_pool2d(
        F.avg_pool2d(F.avg_pool2d(F.conv2d(x, w, b), 3, 1), 3, 1), 3, 1
    ),
    "an affine function between": lambda x, w, b: F.avg_pool2d(
        F.avg_pool2d(F.conv2d(x, w, b), 4) * b.view(-1, 1, 1), 4
    ),
    "single positions between": lambda x, w, b: F.avg_pool2d(
        F.conv2d(F.avg_pool2d(F.conv2d(x, w, b), 4, 1), b.view(-1, 1, 1, 1) * b.view(-1, 1, 1)), 4
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_pools_that_join_a_convolution_step_by_step_join_no_more_than_at_once(name: str) -> None:
    inputs = (torch.rand(2, 8, 40, 40), torch.rand(6, 8, 3, 3), torch.rand(6))
    result = rewritten(STEPS[name], *inputs)
    assert FILTER in result.rules
    for node in result.after.graph.find_nodes(op="call_function", target=aten.convolution.default):
        assert prod(node.args[1].meta["val"].shape[1:]) <= 300
    within_policy(STEPS[name], *(value.double() for value in inputs))


def test_whole_windows_in_ceil_mode_are_pooled() -> None:
    result = same_value(lambda x, w: F.avg_pool2d(F.conv2d(x, w), (2, 1), ceil_mode=True), rand(*X2), rand(*W2))
    assert FILTER in result.rules


def test_narrow_types_stay() -> None:
    x, w = torch.rand(X2).bfloat16(), torch.rand(W2).bfloat16()
    assert rewritten(lambda x, w: F.avg_pool2d(F.conv2d(x, w), 2), x, w).rules == []


@pytest.mark.parametrize("broken", ["x", "w"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_same_results(broken: str, value: float) -> None:
    x, w = rand(2, 3, 12, 12) + 0.4, rand(5, 3, 3, 3) + 0.4
    {"x": x, "w": w}[broken][1, 2, 0, 1] = value
    result = rewritten(lambda x, w: F.avg_pool2d(F.conv2d(x, w), 2), x, w)
    assert FILTER in result.rules
    assert torch.equal(result.after(x, w).isfinite(), result.before(x, w).isfinite())


@pytest.mark.parametrize("name", ["tiles", "strides", "transposed, strides", "one weight"])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_float32_stays_within_the_policy(name: str, shift: float) -> None:
    function, ((samples, channels, *extents), *rest) = FILTERS[name]
    x = rand(samples, channels, *(3 * extent for extent in extents)) + 0.3 - shift
    within_policy(function, x, *(rand(*shape) for shape in rest))
