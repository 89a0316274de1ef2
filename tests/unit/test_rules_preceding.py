"""Scales and convolutions before an anchor: where they join its weights, where not, and where it pays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusepass.patterns.simplify import simplify
from tests.support.algebra import Function, rewritten, same_value, within_policy
from tests.support.aten import traced

aten = torch.ops.aten
CONV, PRODUCT, BIASED = "scale-before-convolution", "scale-before-product", "scale-before-biased-product"
COMPOSED = "convolution-of-convolution"
Cases = dict[str, tuple[Function, tuple[tuple[int, ...], ...], str]]

X, W, B, P = (2, 4, 7, 8), (6, 4, 3, 3), (6,), (4, 1, 1)
R, L, Q = (5, 7), (6, 7), (7,)

FIRES: Cases = {
    "a number": (lambda x, w, b: F.conv2d(x * 2.5, w, b), (X, W, B), CONV),
    "channels": (lambda x, w, b, p: F.conv2d(x * p / 3, w, b), (X, W, B, P), CONV),
    "a quotient": (lambda x, w, b, p: F.conv2d(-x / (p + 1), w, b, 2, 1), (X, W, B, P), CONV),
    "one for all": (lambda x, w, s: F.conv2d(x * s, w), (X, W, (1,)), CONV),
    "groups": (lambda x, w, b, p: F.conv2d(x * p, w, b, groups=2), (X, (6, 2, 3, 3), B, P), CONV),
    "transposed": (
        lambda x, w, b, p: F.conv_transpose2d(x * p, w, b, 2, 1, groups=2), (X, (4, 3, 3, 3), B, P), CONV,
    ),
    "rows": (lambda x, w, p: F.linear(x * p, w), (R, L, Q), PRODUCT),
    "biased rows": (lambda x, w, b, p: F.linear(x * p * 2, w, b), (R, L, B, Q), BIASED),
    "a number of rows": (lambda x, w, b: F.linear(x / 4, w, b), (R, L, B), BIASED),
    "sequences": (lambda x, w, b, p: F.linear(x * p, w, b), ((2, 5, 7), L, B, Q), BIASED),
    "a point behind": (
        lambda x, w, b, v, c: F.conv2d(F.conv2d(x, w, b, padding=1), v, c), (X, W, B, (3, 6, 1, 1), (3,)), COMPOSED,
    ),
    "a point with strides": (
        lambda x, w, v: F.conv2d(F.conv2d(x, w, None, 2, 2), v, None, 2), (X, W, (3, 6, 1, 1)), COMPOSED,
    ),
    "a point before": (
        lambda x, v, w: F.conv2d(F.conv2d(x, v), w, None, 2, 1, 2), (X, (5, 4, 1, 1), (6, 5, 3, 3)), COMPOSED,
    ),
    "a biased point before": (
        lambda x, v, c, w, b: F.conv2d(F.conv2d(x, v, c), w, b), (X, (5, 4, 1, 1), (5,), (6, 5, 3, 3), B), COMPOSED,
    ),
    "lines": (lambda x, w, v: F.conv1d(F.conv1d(x, w), v), ((2, 4, 9), (6, 4, 3), (3, 6, 1)), COMPOSED),
}  # fmt: skip

NEAR: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "a shift": (lambda x, w, p: F.conv2d(x + p, w), (X, W, P)),
    "a scale of positions": (lambda x, w, s: F.conv2d(x * s, w), (X, W, (8,))),
    "a scale of samples": (lambda x, w, s: F.conv2d(x * s, w), (X, W, (2, 4, 1, 1))),
    "a scale of rows": (lambda x, w, s: F.linear(x * s, w), (R, L, (5, 1))),
    "what a kernel makes": (lambda x, w, p: F.conv2d(x.exp() * p, w), (X, W, P)),
    "its own square": (lambda x, w: F.conv2d(x * x, w), (X, W)),
    "a function between": (lambda x, w, v: F.conv2d(F.conv2d(x, w).relu(), v), (X, W, (3, 6, 1, 1))),
    "two kernels": (lambda x, w, v: F.conv2d(F.conv2d(x, w), v), (X, W, (3, 6, 2, 2))),
    "a biased point before padding": (
        lambda x, v, c, w: F.conv2d(F.conv2d(x, v, c), w, None, 1, 1), (X, (5, 4, 1, 1), (5,), (6, 5, 3, 3)),
    ),
    "a padded point": (lambda x, w, v: F.conv2d(F.conv2d(x, w), v, None, 1, 1), (X, W, (3, 6, 1, 1))),
    "a point with gaps before": (
        lambda x, v, w: F.conv2d(F.conv2d(x, v, None, 2), w), (X, (5, 4, 1, 1), (6, 5, 2, 2)),
    ),
    "points of groups": (lambda x, w, v: F.conv2d(F.conv2d(x, w), v, groups=2), (X, W, (4, 3, 1, 1))),
}  # fmt: skip

OURS = (CONV, PRODUCT, BIASED, COMPOSED)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) - 0.3


@pytest.mark.parametrize("name", FIRES)
def test_what_is_linear_before_an_anchor_joins_the_weights(name: str) -> None:
    function, shapes, rule = FIRES[name]
    inputs = [rand(*shape) for shape in shapes]
    assert same_value(function, *inputs).rules.count(rule) == 1
    within_policy(function, *inputs)


@pytest.mark.parametrize("name", FIRES)
def test_what_is_not_finite_stays_so(name: str) -> None:
    function, shapes, _ = FIRES[name]
    for place in range(len(shapes)):
        inputs = [rand(*shape) for shape in shapes]
        inputs[place].view(-1)[-1] = float("nan")
        result = rewritten(function, *inputs)
        assert torch.equal(result.after(*inputs).isnan(), result.before(*inputs).isnan())


@pytest.mark.parametrize("name", NEAR)
def test_what_is_only_similar_stays(name: str) -> None:
    function, shapes = NEAR[name]
    rules = same_value(function, *(rand(*shape) for shape in shapes)).rules
    assert not [rule for rule in rules if rule in OURS]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_weights_would_be_rounded(dtype: torch.dtype) -> None:
    x, w, p = (torch.rand(shape).to(dtype) for shape in (R, L, Q))
    assert not [rule for rule in rewritten(lambda x, w, p: F.linear(x * p, w), x, w, p).rules if rule in OURS]


def applied(function: Function, *shapes: tuple[int, ...]) -> list[str]:
    rules = [application.rule for application in simplify(traced(function, *(torch.rand(shape) for shape in shapes)))]
    return [rule for rule in rules if rule in OURS]


def test_it_has_to_pay() -> None:
    def scaled(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
        return F.conv2d(x * p, w)

    def both(x: Tensor, w: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        y = x * p
        return F.conv2d(y, w), y

    def bottleneck(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, v), w)

    assert applied(scaled, (4, 16, 64, 64), (8, 16, 3, 3), (16, 1, 1)) == [CONV]
    assert applied(both, (4, 16, 64, 64), (8, 16, 3, 3), (16, 1, 1)) == []
    assert applied(scaled, (1, 256, 4, 4), (256, 256, 3, 3), (256, 1, 1)) == []
    assert applied(bottleneck, (4, 8, 64, 64), (64, 8, 1, 1), (8, 64, 3, 3)) == [COMPOSED]
    assert applied(bottleneck, (4, 64, 64, 64), (4, 64, 1, 1), (64, 4, 3, 3)) == []


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.data())
def test_convolutions_of_points(channels: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))
    first, middle, last = channels
    stride, padding, dilation = (data.draw(st.integers(low, 2)) for low in (1, 0, 1))
    kernel = tuple(data.draw(st.integers(1, 3)) for _ in range(rank))
    behind, biased = data.draw(st.booleans()), data.draw(st.booleans())
    settings = ([stride] * rank, [padding] * rank, [dilation] * rank, False, [0] * rank, 1)
    point = ([1] * rank, [0] * rank, [1] * rank, False, [0] * rank, 1)

    def function(x: Tensor, v: Tensor, a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        inner, outer = (settings, point) if behind else (point, settings)
        y = aten.convolution.default(x, v, a if biased else None, *inner)
        return aten.convolution.default(y, w, b, *outer)  # type: ignore[no-any-return]

    ones = (1,) * rank
    weights = (
        ((middle, first, *kernel), (last, middle, *ones))
        if behind
        else ((middle, first, *ones), (last, middle, *kernel))
    )
    result = same_value(
        function, rand(2, first, *(6,) * rank), rand(*weights[0]), rand(middle), rand(*weights[1]), rand(last)
    )
    assert (COMPOSED in result.rules) or (biased and padding and not behind)
