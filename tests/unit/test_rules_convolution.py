"""Rules about convolutions: where they apply, where not, and that they save work."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from fusepass.patterns.partition import partition
from fusepass.patterns.rules import builder
from fusepass.patterns.simplify import simplify
from tests.support.algebra import Function, rewritten, same_value, within_policy
from tests.support.aten import traced

aten = torch.ops.aten

SUM = "sum-of-convolution"


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) - 0.3


X1, W1 = (2, 4, 11), (6, 4, 3)
X2, W2 = (2, 4, 9, 10), (6, 4, 3, 3)
X3, W3, T3 = (2, 4, 6, 7, 5), (6, 4, 3, 3, 3), (4, 6, 3, 3, 3)
B, P = (6,), (6, 1, 1)


def batch_norm(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return aten._native_batch_norm_legit_no_training(x, w, b, mean, var, 0.1, 1e-3)[0]  # type: ignore[no-any-return]


SUMS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "all positions": (lambda x, w, b: F.conv2d(x, w, b, padding=1).mean((2, 3)), (X2, W2, B)),
    "all positions, strides": (lambda x, w, b: F.conv2d(x, w, b, stride=2).mean((2, 3), keepdim=True), (X2, W2, B)),
    "one axis": (lambda x, w, b: F.conv3d(x, w, b, padding=1).mean(2, keepdim=True), (X3, W3, B)),
    "last axis": (lambda x, w, b: F.conv3d(x, w, b, padding=1).sum(-1), (X3, W3, B)),
    "two axes": (lambda x, w: F.conv3d(x, w, padding=1, dilation=2).sum((2, 4)), ((2, 4, 8, 7, 9), W3)),
    "channels": (lambda x, w, b: F.conv2d(x, w, b, padding=1).sum(1, keepdim=True), (X2, W2, B)),
    "scaled channels": (lambda x, w, b, p: ((F.conv2d(x, w, b) + p) * p).mean(1), (X2, W2, B, P)),
    "channels and positions": (lambda x, w, b, p: (F.conv2d(x, w, b) / (p + 2)).mean((1, 2, 3)), (X2, W2, B, P)),
    "everything": (lambda x, w, b: F.conv1d(x, w, b, padding=2).sum(), (X1, W1, B)),
    "samples": (lambda x, w, b: F.conv1d(x, w, b, padding=2).mean(0), (X1, W1, B)),
    "groups": (lambda x, w, b: F.conv2d(x, w, b, groups=2).mean((2, 3)), (X2, (6, 2, 3, 3), B)),
    "groups, one axis": (lambda x, w, b: F.conv2d(x, w, b, groups=2).mean(2), (X2, (6, 2, 3, 3), B)),
    "groups, channels": (lambda x, w, p: (F.conv2d(x, w, groups=2) * p).sum(1), (X2, (6, 2, 3, 3), P)),
    "transposed": (lambda x, w, b: F.conv_transpose3d(x, w, b).mean((2, 3, 4), keepdim=True), (X3, T3, B)),
    "transposed, cropped": (lambda x, w, b: F.conv_transpose3d(x, w, b, 2, 1, 1).mean((2, 3, 4)), (X3, T3, B)),
    "transposed, one axis": (lambda x, w, b: F.conv_transpose3d(x, w, b, padding=1).mean(2), (X3, T3, B)),
    "transposed, groups": (lambda x, w: F.conv_transpose2d(x, w, groups=2, padding=1).sum((2, 3)), (X2, (4, 3, 3, 3))),
    "transposed, groups, channels": (
        lambda x, w, p: (F.conv_transpose2d(x, w, groups=2) * p).sum(1),
        (X2, (4, 3, 3, 3), P),
    ),
    "by running statistics": (
        lambda x, w, b, v: batch_norm(F.conv_transpose3d(x, w, b) * 2.0, v, v.exp(), v - 1, b).mean((-1, -2, -3), True),
        (X3, T3, B, B),
    ),
    "with a scale for each sample": (lambda x, w, s: (F.conv2d(x, w) * s).mean((2, 3)), (X2, W2, (2, 1, 1, 1))),
    "plus a tensor": (lambda x, w, z: (F.conv1d(x, w) + z).mean(2), (X1, W1, (2, 6, 9))),
    "plus itself": (lambda x, w, b: (lambda y: ((y + y) * 3 - y + 1).mean((2, 3)))(F.conv2d(x, w, b)), (X2, W2, B)),
    "less most of itself": (
        lambda x, w, b: (lambda y: (y - 0.999 * y).mean((2, 3)))(F.conv2d(x, w, b)),
        (X2, W2, B),
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_moves_before_the_convolution(name: str) -> None:
    function, shapes = SUMS[name]
    inputs = [rand(*shape) for shape in shapes]
    result = same_value(function, *inputs)
    assert result.rules.count(SUM) == 1
    before, after = result.flops(*inputs)
    assert after < before


@pytest.mark.parametrize("name", ["all positions", "transposed", "by running statistics", "everything"])
def test_many_terms_are_left_to_the_library(name: str) -> None:
    function, shapes = SUMS[name]
    inputs = [rand(*shape) for shape in shapes]
    with patch.object(builder, "_FEW_TERMS", 0):
        result = same_value(function, *inputs)
    targets = [node.target for node in result.after.graph.nodes]
    assert targets.count(aten.mm.default) == (name != "everything")  # a single column is a sum in any case
    assert not any(node.target is aten.mm.default for node in same_value(function, *inputs).after.graph.nodes)


def test_few_terms_are_one_region_with_what_is_around_them() -> None:
    """Sums of the input and of the weights, their product, and what follows it are launched together."""
    function, (_, w, b, v) = SUMS["by running statistics"]
    graph = traced(function, torch.rand(4, 4, 12, 14, 10), *(rand(*shape).float() for shape in (w, b, v)))
    assert SUM in [application.rule for application in simplify(graph)]
    (region,) = partition(graph).regions
    assert [node.target for node in region.nodes].count(aten.sum.dim_IntList) == 3
    assert region.anchor is None


NEAR: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "not linear": (lambda x, w, b: F.conv2d(x, w, b).relu().mean((2, 3)), (X2, W2, B)),
    "a norm by batch statistics": (
        lambda x, w, b: aten.native_batch_norm(F.conv2d(x, w, b), None, None, None, None, True, 0.1, 1e-3)[0].mean(
            (2, 3)
        ),
        (X2, W2, B),
    ),
    "scaled positions": (lambda x, w, s: (F.conv1d(x, w) * s).sum(2), (X1, W1, (9,))),
    "one position": (lambda x, w, b: F.conv2d(x, w, b).mean((2, 3)), ((2, 4, 3, 3), W2, B)),
    "no position is read": (
        lambda x, w: F.conv_transpose1d(x, w, stride=3, padding=1, output_padding=2).sum((1, 2)),
        ((2, 4, 1), (4, 6, 1)),
    ),
    "a long kernel": (lambda x, w: F.conv1d(x, w).sum(2), ((2, 4, 60), (6, 4, 30))),
    "cast": (lambda x, w: F.conv1d(x, w).float().sum(2), (X1, W1)),
    "less its mean": (lambda x, w: (lambda y: (y - y.mean((2, 3), True)).mean((2, 3)))(F.conv2d(x, w)), (X2, W2)),
    "less itself": (lambda x, w: (lambda y: (y - y).mean((2, 3)))(F.conv2d(x, w)), (X2, W2)),
    "less itself, scaled in another way": (
        lambda x, w, p: (lambda y: (y * p - y * p.sin()).mean((2, 3)))(F.conv2d(x, w)),
        (X2, W2, P),
    ),
    "beside a function of itself": (lambda x, w: (lambda y: (y + y.exp()).mean((2, 3)))(F.conv2d(x, w)), (X2, W2)),
    "without samples": (lambda x, w: F.conv1d(x, w).relu().sum(1), ((4, 11), W1)),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_only_similar_stays(name: str) -> None:
    function, shapes = NEAR[name]
    assert SUM not in same_value(function, *(rand(*shape) for shape in shapes)).rules


def test_an_input_that_is_not_row_major_stays() -> None:
    x = rand(*X2).to(memory_format=torch.channels_last)
    assert SUM not in same_value(lambda x, w: F.conv2d(x, w).sum(1), x, rand(*W2)).rules
    assert SUM in same_value(lambda x, w: F.conv2d(x, w).sum((2, 3)), x, rand(*W2)).rules


@pytest.mark.parametrize("broken", ["x", "w"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_same_results(broken: str, value: float) -> None:
    x, w = rand(2, 3, 6, 6) + 0.4, rand(5, 3, 3, 3) + 0.4
    {"x": x, "w": w}[broken][1, 2, 0, 1] = value
    result = rewritten(lambda x, w: F.conv2d(x, w, stride=2).mean(2), x, w)
    assert torch.equal(result.after(x, w).isfinite(), result.before(x, w).isfinite())


def test_what_no_weight_reads_does_not_count() -> None:
    x, w = rand(1, 1, 8), rand(1, 1, 2)
    x[0, 0, 2::3] = float("nan")
    result = rewritten(lambda x, w: F.conv1d(x, w, stride=3).sum(2), x, w)
    assert SUM in result.rules
    assert result.after(x, w).isfinite().all()


@pytest.mark.parametrize(
    "name",
    ["all positions", "one axis", "transposed, cropped", "by running statistics", "plus itself", "less most of itself"],
)
@pytest.mark.parametrize("shift", [0.0, 0.3, 0.8])
def test_float32_stays_within_the_policy(name: str, shift: float) -> None:
    function, ((samples, channels, *extents), *rest) = SUMS[name]
    x = rand(samples, channels, *(3 * extent for extent in extents)) + 0.3 - shift
    within_policy(function, x, *(rand(*shape) for shape in rest))


MANY: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "one axis": (lambda x, w: F.conv2d(x, w).mean(3), ((2, 128, 6, 40), (8, 128, 3, 3))),
    "strides": (lambda x, w: F.conv2d(x, w, stride=2).mean(2), ((2, 40, 30, 9), (8, 40, 3, 2))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, None, 2, 1).mean(3), ((2, 128, 6, 40), (128, 8, 3, 3))),
    "two axes": (lambda x, w: F.conv3d(x, w, padding=1).mean((2, 4)), ((2, 24, 9, 5, 12), (6, 24, 3, 3, 3))),
    "transposed, two axes": (
        lambda x, w: F.conv_transpose3d(x, w, padding=(1, 1, 0)).sum((2, 3)),
        ((1, 40, 5, 4, 3), (40, 3, 3, 2, 2)),
    ),
    "channels, too": (lambda x, w: F.conv2d(x, w).sum((1, 3)), ((2, 60, 6, 9), (8, 60, 3, 3))),
}


@pytest.mark.parametrize("name", MANY)
def test_a_sum_of_many_products_is_added_up_in_parts(name: str) -> None:
    """One weight's share of the summed axes each; with numbers of one sign a single sum errs more than the policy allows."""
    function, shapes = MANY[name]
    inputs = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
    result = same_value(function, *inputs)
    assert result.rules[0] == SUM
    (call,) = result.after.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert call.args[8] > 1
    before, after = result.flops(*inputs)
    assert after < before
    within_policy(function, *inputs)
