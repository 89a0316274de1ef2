"""Rules about anchors on random shapes and parameters: the rewritten graph gives the same in float64."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.algebra import same_value

aten = torch.ops.aten


@dataclass(frozen=True)
class Filter:
    """A convolution with random parameters."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    channels: int
    arguments: tuple[Any, ...]

    def __call__(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return aten.convolution.default(x, w, bias, *self.arguments)  # type: ignore[no-any-return]

    @property
    def result(self) -> tuple[int, ...] | None:
        """The shape of the result; None where PyTorch knows none."""
        try:
            result = self(torch.empty(self.x, device="meta"), torch.empty(self.weight, device="meta"), None)
        except RuntimeError:
            return None
        return tuple(result.shape) if min(result.shape) > 0 else None


@st.composite
def filters(draw: st.DrawFn, transposed: bool | None = None) -> Filter:
    rank = draw(st.integers(1, 3))

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inputs, outputs = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    turned = draw(st.booleans()) if transposed is None else transposed
    stride, padding, dilation, kernel = each(1, 3), each(0, 2), each(1, 2), each(1, 4)
    extents, more = each(2, 8), each(0, 1)
    output_padding = [
        min(extra, max(s, d) - 1) if turned else 0 for extra, s, d in zip(more, stride, dilation, strict=True)
    ]
    filters = (inputs, outputs // groups) if turned else (outputs, inputs // groups)
    arguments = (stride, padding, dilation, turned, output_padding, groups)
    made = Filter((draw(st.integers(1, 3)), inputs, *extents), (*filters, *kernel), outputs, arguments)
    assume(made.result is not None)
    return made


def rand(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) - 0.3


@given(filters(), st.data())
def test_sums_of_convolutions(how: Filter, data: st.DataObject) -> None:
    assert how.result is not None
    rank = len(how.result)
    dims = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, unique=True), "dims")
    mean, keepdim, affine, normed = (data.draw(st.booleans()) for _ in range(4))
    per_channel = (how.channels, *(1,) * (rank - 2))

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        y = how(x, w, b if affine else None)
        if affine:
            y = (y - p) * q / 2
        if normed:
            y = aten._native_batch_norm_legit_no_training(y, b, None, b + 1, b.exp(), 0.1, 1e-3)[0]
        return y.mean(dims, keepdim) if mean else y.sum(dims, keepdim)

    inputs = [rand(shape) for shape in (how.x, how.weight, (how.channels,), per_channel, per_channel)]
    result = same_value(function, *inputs)
    before, after = result.flops(*inputs)
    assert after <= before or "sum-of-convolution" in result.rules


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 5), st.data())
def test_sums_of_products(lead: list[int], inner: int, features: int, data: st.DataObject) -> None:
    rank = len(lead) + 1
    dims = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, unique=True), "dims")
    mean, keepdim, batched = (data.draw(st.booleans()) for _ in range(3))
    batch = lead[:-1] if batched else []

    def function(x: torch.Tensor, w: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        y = (torch.matmul(x, w) - p) * q / 3
        return y.mean(dims, keepdim) if mean else y.sum(dims, keepdim)

    result = same_value(
        function, rand((*lead, inner)), rand((*batch, inner, features)), rand((features,)), rand((features,))
    )
    assert result.rules.count("sum-of-products") <= 1


@given(filters(), st.data())
def test_average_pools_of_convolutions(how: Filter, data: st.DataObject) -> None:
    assert how.result is not None
    spatial = how.result[2:]
    sizes = [data.draw(st.integers(1, min(4, extent)), "size") for extent in spatial]
    steps = [data.draw(st.integers(1, 4), "stride") for _ in spatial]
    ceil, affine = data.draw(st.booleans()), data.draw(st.booleans())
    pool = (torch.nn.functional.avg_pool1d, torch.nn.functional.avg_pool2d, torch.nn.functional.avg_pool3d)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        y = how(x, w, b)
        y = (y + p) / b.view(-1, *(1,) * len(spatial)) if affine else y
        return pool[len(spatial) - 1](y, sizes, steps, ceil_mode=ceil)

    inputs = (rand(how.x), rand(how.weight), rand((how.channels,)) + 1, rand((how.channels, *(1,) * len(spatial))))
    same_value(function, *inputs)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
def test_average_pools_of_products(rows: int, features: int, size: int, stride: int) -> None:
    assume(size <= features)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool1d(torch.nn.functional.linear(x, w, b) * 2 - b, size, stride)

    result = same_value(function, rand((rows, 3)), rand((features, 3)), rand((features,)))
    assert result.rules or size == stride == 1


@given(filters(), st.data())
def test_affine_functions_of_convolutions(how: Filter, data: st.DataObject) -> None:
    assert how.result is not None
    normed, biased, scaled = (data.draw(st.booleans()) for _ in range(3))
    ones = (1,) * (len(how.result) - 2)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        y = how(x, w, b if biased else None)
        y = y * 2 - b.view(-1, *ones) if scaled else y
        y = aten._native_batch_norm_legit_no_training(y, p, b, b + 1, b.exp(), 0.1, 1e-3)[0] if normed else y
        return y / (p + 2).view(1, -1, *ones)

    result = same_value(function, rand(how.x), rand(how.weight), rand((how.channels,)), rand((how.channels,)))
    assert any("into-convolution" in rule for rule in result.rules)
    assert len([node for node in result.after.graph.nodes if node.target is aten.convolution.default]) == 1


@given(st.lists(st.integers(1, 5), min_size=4, max_size=4), st.data())
def test_products_of_products(sizes: list[int], data: st.DataObject) -> None:
    inner, outer, sequence, scaled = (data.draw(st.booleans()) for _ in range(4))
    rows, first, second, third = sizes
    linear = torch.nn.functional.linear

    def function(x: torch.Tensor, v: torch.Tensor, a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = linear(x, v, a if inner else None)
        y = (y - a) * a * 3 if scaled else y
        return linear(y, w, b if outer else None)

    lead = (2, rows) if sequence else (rows,)
    shapes = ((*lead, first), (second, first), (second,), (third, second), (third,))
    result = same_value(function, *map(rand, shapes))
    assert any("product-of-product" in rule for rule in result.rules)


@given(filters(), st.data())
def test_normalisations_of_convolutions(how: Filter, data: st.DataObject) -> None:
    """Every result is checked, running statistics among them."""
    assert how.result is not None
    ones = (1,) * (len(how.result) - 2)
    affine, biased, twice = (data.draw(st.booleans()) for _ in range(3))
    number = data.draw(st.sampled_from([1.0, 2.0, -0.75, 1e-2]))
    kind = data.draw(st.sampled_from(["batch", "group", "layer", "centred"]))

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        y = how(x, w, b if biased else None) * number
        y = (y - p.view(1, -1, *ones)) * 2 if twice else y
        scale, shift = (p, b) if affine else (None, None)
        if kind == "centred":
            dims = list(range(2, y.dim()))
            return y - y.mean(dims, keepdim=True)
        if kind == "batch":
            results = aten._native_batch_norm_legit_functional(y, scale, shift, b, b.exp(), True, 0.2, 1e-3)
            statistics = torch.cat([results[number] for number in (1, 2, 3, 4)]).view(1, -1, 1)
            return results[0].flatten(1).sum() + results[0].square().sum() + statistics.sin()  # type: ignore[no-any-return]
        if kind == "group":
            return torch.nn.functional.group_norm(y, how.channels, scale, shift, 1e-3)
        return torch.nn.functional.layer_norm(y, y.shape[2:], None, None, 1e-3)

    assume(prod(how.result[2:]) > 1)
    inputs = (rand(how.x), rand(how.weight), rand((how.channels,)), rand((how.channels,)) + 1)
    rules = same_value(function, *inputs).rules
    cancels = (biased or twice, number != 1 or twice)
    assert (
        not any(cancels)
        or any(rule.startswith(("shift-before", "scale-before")) for rule in rules)
        or kind == "centred"
    )
