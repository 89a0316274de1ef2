"""Steps of a decoder whose cache grows: their parts of constant sizes are fused once for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusepass.compile.pipeline import CompiledGraph
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.training.backend import Backend
from fusepass.training.constant_parts import constant_parts

aten = torch.ops.aten


class Layer(nn.Module):
    """Attention of two query heads for each head of keys, over a cache, and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.queries, self.keys = nn.Linear(16, 16), nn.Linear(16, 8)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.norm(x)
        queries = self.queries(seen).view(x.shape[0], 1, 4, 4).transpose(1, 2) * turn
        keys = self.keys(seen).view(x.shape[0], 1, 2, 4).transpose(1, 2) * turn
        cache = torch.cat([cache, keys], 2)
        batch, heads, length, size = cache.shape
        repeated = cache[:, :, None].expand(batch, heads, 2, length, size).reshape(batch, 2 * heads, length, size)
        mask = torch.arange(length)[None, None, None] >= 1
        found = F.scaled_dot_product_attention(queries, repeated, repeated, attn_mask=mask)
        found = self.out(found.transpose(1, 2).reshape(x.shape[0], 1, 16))
        return x + F.gelu(found) * 2, cache


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        turn = torch.cos(torch.arange(4) * float(caches[0].shape[2]))
        written = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cache, turn)
            written.append(cache)
        return x, written


def decoded(step: Callable[..., Any], steps: int) -> list[Tensor]:
    """What `steps` steps give, each with what the one before wrote."""
    torch.manual_seed(1)
    x, caches = torch.randn(2, 1, 16), [torch.randn(2, 2, 3, 4) for _ in range(3)]
    results = []
    for _ in range(steps):
        x, caches = step(x, caches)
        results.append(x)
    return [*results, *caches]


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def test_a_cache_of_any_length_is_served_by_graphs_of_the_first_ones() -> None:
    torch.manual_seed(0)
    model, made, fallbacks = Decoder(), list[CompiledGraph](), FallbackCounter()
    backend = Backend("test", {"tune": "off"}, fallbacks=fallbacks, observe=made.append)
    step = torch.compile(model, backend=backend)
    decoded(step, 4)
    few = len(made)
    # One whole graph for the first length, then parts: before the first attention, between two, behind the last one.
    assert few <= 6
    for got, expected in zip(decoded(step, 40), decoded(model, 40), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert len(made) == few
    assert not fallbacks.records()
    assert all(report.ops_fused for report in (each.report for each in made[1:]))


def _symbolic(function: Callable[..., Any], *arguments: Tensor) -> fx.Graph:
    return make_fx(function, tracing_mode="symbolic")(*arguments).graph


def test_what_varies_in_all_its_sizes_is_compiled_for_each_set() -> None:
    """So is a graph in which more would be fused then; one that draws random numbers is not cut, as their order would be another."""

    def grows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.gelu(x * 2) + 1, torch.relu(y * 2)

    def keeps(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x, x]), torch.relu(y.new_ones(64, 2) * 2) + 1

    def draws(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x, torch.rand_like(x)]), torch.relu(y.new_ones(64, 2) * 2) + 1

    x, y = torch.rand(5, 3), torch.rand(7, 2)
    assert not constant_parts(_symbolic(grows, x, y))
    assert constant_parts(_symbolic(keeps, x, y))
    assert not constant_parts(_symbolic(draws, x, y))


def test_a_write_at_the_end_comes_behind_what_reads_the_old_value() -> None:
    def function(x: Tensor, total: Tensor) -> Tensor:
        longer = torch.cat([x, x])
        seen = torch.relu(total * 2) + longer.sum()
        total.add_(1)
        return torch.relu(seen * 3) + 1

    made: list[CompiledGraph] = []
    step = torch.compile(function, backend=Backend("test", {"tune": "off"}, observe=made.append), dynamic=None)
    for size in (3, 4, 5, 6):
        total, expected = torch.ones(64), torch.ones(64)
        x = torch.rand(size)
        torch.testing.assert_close(step(x, total), function(x, expected))
        torch.testing.assert_close(total, expected)
    assert len(made) <= 4


def test_views_of_a_cache_that_is_written_are_read_before() -> None:
    """A view that is made ahead of the write, and read behind it, shows what was there: then nothing is written in place."""

    def function(x: Tensor, cache: Tensor, place: Tensor) -> Tensor:
        before = cache.transpose(0, 1)
        longer = torch.cat([x, x])
        seen = torch.relu(cache * 2) + 1
        written = cache.index_copy(0, place, seen[:1] * 3)
        cache.copy_(written)
        return torch.relu(seen * longer.sum()) + before.clone().transpose(0, 1) * 2 + written.sum()

    step = torch.compile(function, backend=Backend("test", {"tune": "off"}))
    for size in (3, 4, 5):
        ours, x = torch.rand(8, 8), torch.rand(size)
        theirs = ours.clone()
        torch.testing.assert_close(step(x, ours, torch.tensor([2])), function(x, theirs, torch.tensor([2])))
        torch.testing.assert_close(ours, theirs)
