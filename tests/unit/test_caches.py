"""What stands around attention in a decoder: caches written where they lie, and heads of keys that several query heads share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import fusepass
from fusepass.compile.grouped import GROUPS, group_queries, takes_groups
from fusepass.compile.in_place import write_rows_in_place
from fusepass.config import override

pytestmark = pytest.mark.usefixtures("without_gradients")

aten = torch.ops.aten
PLACE = torch.tensor([2])


def traced(function: Callable[..., Any], *arguments: Tensor, symbolic: bool = False) -> fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*arguments)


def counts(made: fx.GraphModule) -> Counter[Any]:
    return Counter(node.target for node in made.graph.nodes if node.op == "call_function")


def step(cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
    """Reads the cache, writes rows of it twice, and reads what it is then."""
    seen = cache.sum()
    written = aten.index_copy(cache, 1, place, rows)
    written = aten.index_put(written, [None, place - 1], rows * 2)
    total = written.select(0, 1).sum() + seen
    cache.copy_(written)
    return total


def reads_the_old_value(cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
    written = aten.index_copy(cache, 1, place, rows)
    total = cache.select(0, 1).sum() + written.sum()
    cache.copy_(written)
    return total


def gives_the_new_value(cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
    written = aten.index_copy(cache, 1, place, rows)
    cache.copy_(written)
    return written.view(-1)


def writes_what_it_reads(cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
    written = aten.index_copy(cache, 1, place, cache.narrow(1, 3, 1))
    cache.copy_(written)
    return rows + 1


def writes_another(cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
    cache.copy_(aten.index_copy(cache + 1, 1, place, rows))
    return rows + 1


@pytest.mark.parametrize(
    ("function", "in_place"),
    [(step, 2), (reads_the_old_value, 0), (gives_the_new_value, 0), (writes_what_it_reads, 0), (writes_another, 0)],
)
def test_rows_are_written_where_they_lie(function: Callable[..., Tensor], in_place: int) -> None:
    cache, rows = torch.rand(2, 5, 3), torch.rand(2, 1, 3)
    made = traced(function, cache, rows, PLACE)
    write_rows_in_place(made)
    found = counts(made)
    assert found[aten.index_copy_.default] + found[aten.index_put_.default] == in_place
    assert found[aten.copy_.default] == (0 if in_place else 1)
    ours, theirs = cache.clone(), cache.clone()
    result = made(ours, rows, PLACE)
    assert torch.equal(result, function(theirs, rows, PLACE))
    assert torch.equal(ours, theirs)


def shared(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Keys and values, which are longer by one, have half the heads of the queries."""
    keys = torch.cat([keys, keys[:, :, :1]], 2)
    batch, heads, length, size = keys.shape
    repeated = keys[:, :, None].expand(batch, heads, 2, length, size).reshape(batch, 2 * heads, length, size)
    values = (keys * 2)[:, :, None].expand(batch, heads, 2, length, size).reshape(batch, 2 * heads, length, size)
    return F.scaled_dot_product_attention(queries, repeated, values, attn_mask=mask)


def interleaved(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """The heads follow one another as often as they are repeated: the kernel does not see them so."""
    repeated = torch.cat([keys, keys[:, :, :1]], 2).repeat(1, 2, 1, 1)
    return F.scaled_dot_product_attention(queries, repeated, repeated, attn_mask=mask)


def keys_alone(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Values have a head for each of the queries'."""
    keys = torch.cat([keys, keys[:, :, :1]], 2)
    batch, heads, length, size = keys.shape
    repeated = keys[:, :, None].expand(batch, heads, 2, length, size).reshape(batch, 2 * heads, length, size)
    return F.scaled_dot_product_attention(queries, repeated, repeated * queries.mean(), attn_mask=mask)


@pytest.mark.skipif(not takes_groups("cpu"), reason="this PyTorch's kernel for a CPU takes no grouped queries")
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("function", "groups"), [(shared, True), (interleaved, False), (keys_alone, False)])
def test_heads_that_are_shared_are_not_repeated(function: Callable[..., Tensor], groups: bool, symbolic: bool) -> None:
    queries, keys, mask = torch.rand(2, 4, 3, 8), torch.rand(2, 2, 6, 8), torch.rand(2, 1, 3, 7)
    made = traced(function, queries, keys, mask, symbolic=symbolic)
    assert sum(counts(made)[target] for target in GROUPS) == 1
    guards = len(made.shape_env.guards) if symbolic else 0
    if groups:
        with override(algebra="off"):
            assert not group_queries(made.graph)
    before = counts(made)
    assert group_queries(made.graph) is groups
    made.recompile()
    assert before[aten.clone.default] - counts(made)[aten.clone.default] == (2 if groups else 0)
    assert torch.equal(made(queries, keys, mask), function(queries, keys, mask))
    assert not symbolic or len(made.shape_env.guards) == guards


class Cached(torch.nn.Module):
    """A step with a cache of fixed size, which is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.keys = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16)

    def forward(self, x: Tensor, cache: Tensor, place: Tensor) -> Tensor:
        keys = self.keys(self.norm(x)).view(2, 1, 2, 8).transpose(1, 2)
        cache.index_copy_(2, place, keys)
        mask = torch.arange(cache.shape[2])[None] <= place
        repeated = cache[:, :, None].expand(2, 2, 2, 5, 8).reshape(2, 4, 5, 8)
        found = F.scaled_dot_product_attention(torch.cat([keys, keys * 2], 1), repeated, repeated, attn_mask=mask)
        return F.gelu(found) * 2 + cache.sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_writes_its_cache(compiled: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Cached()
    made: Callable[..., Tensor] = fusepass.optimize(model, tune="off")
    if compiled:
        made = torch.compile(model, backend="fusepass", options={"tune": "off"})
    ours, theirs = torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8)
    for number in range(4):
        x, place = torch.randn(2, 1, 8), torch.tensor([number])
        torch.testing.assert_close(made(x, ours, place), model(x, theirs, place), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
