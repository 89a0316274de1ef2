"""What is written in several ways comes into one form, and then the rules about that form apply."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusepass.patterns.rules.spelling import groups
from tests.support.algebra import rewritten, same_value, within_policy

Function = Callable[..., Any]
X, W, B = (2, 4, 8, 8), (6, 4, 3, 3), (6,)


def conv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x, w, b, padding=1)


MEANS: dict[str, Function] = {
    "adaptive": lambda y: F.adaptive_avg_pool2d(y, 1),
    "dims": lambda y: y.mean((2, 3)),
    "kept dims": lambda y: y.mean((-2, -1), keepdim=True),
    "one after the other": lambda y: y.mean(3).mean(2),
    "flattened": lambda y: y.flatten(2).mean(-1),
    "view": lambda y: y.view(2, 6, -1).mean(2),
    "view of all": lambda y: y.reshape(12, 64).mean(1),
    "sum": lambda y: y.sum((2, 3)) / 64,
    "channels last": lambda y: y.permute(0, 2, 3, 1).mean((1, 2)),
    "transposed": lambda y: y.transpose(2, 3).flatten(2).contiguous().mean(2),
    "pool": lambda y: F.avg_pool2d(y, 8),
    "copies": lambda y: y.repeat_interleave(3, 3).mean((2, 3)),
}


@pytest.mark.parametrize("name", MEANS)
def test_every_spelling_of_a_global_mean_is_summed_inside(name: str) -> None:
    inputs = [torch.rand(shape, dtype=torch.float64) - 0.3 for shape in (X, W, B)]
    result = same_value(lambda x, w, b: MEANS[name](conv(x, w, b)), *inputs)
    assert "sum-of-convolution" in result.rules
    before, after = result.flops(*inputs)
    assert after * 10 < before
    within_policy(lambda x, w, b: MEANS[name](conv(x, w, b)), *inputs)


POOLS: dict[str, Function] = {
    "module": lambda y: torch.nn.AvgPool2d(2)(y),
    "adaptive": lambda y: F.adaptive_avg_pool2d(y, (4, 4)),
    "area": lambda y: F.interpolate(y, scale_factor=0.5, mode="area"),
    "scaled": lambda y: F.adaptive_avg_pool2d(y * 2, 4),
}


@pytest.mark.parametrize("name", POOLS)
def test_every_spelling_of_an_average_pool_is_composed(name: str) -> None:
    inputs = [torch.rand(shape, dtype=torch.float64) - 0.3 for shape in (X, W, B)]
    result = same_value(lambda x, w, b: POOLS[name](conv(x, w, b)), *inputs)
    assert "average-pool-of-convolution" in result.rules


CENTRED: dict[str, Function] = {
    "kept": lambda y: y - y.mean((2, 3), keepdim=True),
    "indexed": lambda y: y - y.mean((2, 3))[:, :, None, None],
    "viewed": lambda y: y - y.mean((2, 3)).view(2, 6, 1, 1),
    "expanded": lambda y: y - y.mean((2, 3), keepdim=True).expand_as(y),
    "flattened": lambda y: y - y.flatten(2).mean(2).view(2, 6, 1, 1),
    "pooled": lambda y: y - F.adaptive_avg_pool2d(y, 1),
    "negated": lambda y: y + -y.mean((2, 3), keepdim=True),
}


@pytest.mark.parametrize("name", CENTRED)
def test_every_spelling_of_a_centring_drops_the_bias(name: str) -> None:
    inputs = [torch.rand(shape, dtype=torch.float64) - 0.3 for shape in (X, W, B)]
    result = same_value(lambda x, w, b: CENTRED[name](conv(x, w, b)), *inputs)
    if name != "negated":  # the rule that makes a subtraction of it comes later
        assert "shift-before-centring" in result.rules


NEAR: dict[str, Function] = {
    "part of a dimension": lambda x: x.view(2, 4, 4, 2, 8).mean(2),
    "part of a merged dimension": lambda x: x.view(2, 32, 8).mean(1).sin().view(2, 2, 4).mean(1),
    "another order": lambda x: x.permute(3, 1, 0, 2).mean(3),
    "unequal windows": lambda x: F.adaptive_avg_pool2d(x, 3),
    "several maxima": lambda x: F.adaptive_max_pool2d(x, 2),
    "the place of the maximum": lambda x: F.adaptive_max_pool2d(x, 1, return_indices=True)[1].double(),
    "another shape": lambda x: x.mean((2, 3)).view(2, 1, 4, 1),
    "both are broadcast": lambda x: x[:, :1] + x[:1].expand(2, 4, 8, 8),
    "both are the same broadcast": lambda x: (y := x[:1].expand(2, 4, 8, 8)) + y,
    "of integers": lambda x: x.int().view(2, 4, 64).sum(2).double(),
}
SPELLINGS = ("reduction-of-re", "reshaped-reduction", "broadcast-operand", "adaptive-")


@pytest.mark.parametrize("name", NEAR)
def test_what_is_only_similar_stays(name: str) -> None:
    rules = rewritten(NEAR[name], torch.rand(X, dtype=torch.float64)).rules
    found = [rule for rule in rules if rule.startswith(SPELLINGS) and rule != "reduction-of-reduction"]
    assert found == (["reduction-of-reshaped"] if name == "part of a merged dimension" else [])


@pytest.mark.parametrize("function", [*MEANS.values(), *POOLS.values()])
def test_nan_and_infinities_stand_where_they_stood(function: Function) -> None:
    x = torch.rand(2, 6, 8, 8, dtype=torch.float64)
    x[0, 1, 2, 3], x[1, 2, 3, 4], x[1, 4, 0, 0] = float("nan"), float("inf"), -float("inf")
    result = rewritten(function, x)
    torch.testing.assert_close(result.after(x), result.before(x), rtol=1e-12, atol=1e-12, equal_nan=True)
    maximum = rewritten(lambda x: F.adaptive_max_pool2d(x, 1), x)
    assert maximum.rules == ["adaptive-max-pool-of-everything"]
    assert torch.equal(maximum.after(x).nan_to_num(), maximum.before(x).nan_to_num())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_reductions_of_reshaped_and_reordered_tensors(shape: list[int], data: st.DataObject) -> None:
    """Any splitting, merging and order of dimensions."""
    parts = [
        data.draw(st.sampled_from([(size,), (size, 1), (1, size), *([(2, size // 2)] * (size % 2 == 0))]))
        for size in shape
    ]
    shown = [size for part in parts for size in part]
    start = data.draw(st.integers(0, len(shown) - 1))
    stop = data.draw(st.integers(start + 1, len(shown)))
    shown = [*shown[:start], prod(shown[start:stop]), *shown[stop:]]
    order = data.draw(st.permutations(range(len(shown))))
    dims = data.draw(st.lists(st.integers(0, len(shown) - 1), min_size=1, unique=True))
    kind, keepdim = data.draw(st.sampled_from(["sum", "mean", "amax", "amin"])), data.draw(st.booleans())
    pieces = groups(shape, shown)
    assert [at for before, _ in pieces for at in before] == list(range(len(shape)))
    assert [at for _, after in pieces for at in after] == list(range(len(shown)))

    chosen = data.draw(st.booleans())

    def function(x: Tensor) -> Tensor:
        y = x.view(shown)
        y = y.permute(order) if chosen else y
        return getattr(y, kind)(dims, keepdim=keepdim).sin()  # type: ignore[no-any-return]

    same_value(function, torch.rand(shape, dtype=torch.float64) - 0.3)
