"""What is known of a rewritten graph's memory: no region compares strides in vain, views take no dispatcher, and writes are still noticed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fusepass.compile import pipeline
from fusepass.compile.layouts import use_layouts
from fusepass.runtime.fast_path import wait
from fusepass.runtime.meta import laid
from fusepass.runtime.operators import reinterpret
from fusepass.runtime.region import FusedRegion
from fusepass.training.backend import Backend
from tests.support.aten import same_bits

aten = torch.ops.aten


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[fx.Graph, list[FusedRegion]]]:
    """Rewritten graphs, with the regions that they call."""
    found: list[tuple[fx.Graph, list[FusedRegion]]] = []

    def note(graph: fx.Graph, **options: Any) -> list[FusedRegion]:
        found.append((graph, use_layouts(graph, **options)))
        return found[-1][1]

    monkeypatch.setattr(pipeline, "use_layouts", note)
    torch._dynamo.reset()
    return found


def _called(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.gelu(x + self.out(attended))


def test_a_step_compares_only_what_the_library_lays_out(noted: list[tuple[fx.Graph, list[FusedRegion]]]) -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 5, 16)
    compiled = torch.compile(model, backend=Backend("graph", {"tune": "off"}))
    wait()
    for _ in range(3):
        model.zero_grad()
        compiled(x).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-5)
    assert len(noted) == 2
    for graph, regions in noted:
        called = _called(graph)
        assert called.count(reinterpret) >= 4
        compared = [node.args[0] for node in graph.nodes if node.target is laid]
        assert all(node.target is operator.getitem and "attention" in str(node.args[0]) for node in compared)
        assert regions
        assert not any("with_strides(a" in region._text.source for region in regions)
        assert all(region.launcher() is not region.run for region in regions)


# ---- who sees that a result is a view


def _use(function: Callable[..., Any], *inputs: Tensor, visible: int = 9, exact: bool = True) -> list[object]:
    """What a graph calls, as it is rewritten, which gives what it gave."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(function)(*inputs)
    expected = graph(*inputs)
    use_layouts(graph.graph, exact_inputs=exact, visible=visible)
    graph.graph.lint()
    graph.recompile()
    for found, wanted in zip(graph(*inputs), expected, strict=True):
        assert same_bits(found, wanted)
        assert (found.shape, found.stride(), found.storage_offset()) == (
            wanted.shape,
            wanted.stride(),
            wanted.storage_offset(),
        )
    return _called(graph.graph)


X = torch.randn(4, 6)
SHOWN: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], int, bool]] = {
    "a view of what nobody else has": (lambda x: (torch.mm(x, x.t()).t(),), 9, False),
    "a view of an input": (lambda x: (x.t(), torch.mm(x, x.t())), 9, True),
    "what it is of is given, too": (lambda x: _pair(torch.mm(x, x.t())), 9, True),
    "what it is of is given to the caller, and it is saved": (lambda x: _pair(torch.mm(x, x.t())), 1, True),
    "both are saved": (lambda x: _pair(torch.mm(x, x.t())), 0, False),
    "a view of an input is saved": (lambda x: (x.t(),), 0, True),
}
"""Functions, how many results are visible, and whether the view is left to autograd."""


def _pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x[1:].t()


@pytest.mark.parametrize("name", SHOWN)
def test_views_that_autograd_counts_writes_to_stay_views(name: str) -> None:
    function, visible, left = SHOWN[name]
    called = _use(function, X, visible=visible)
    views = [target for target in called if target in (aten.t.default, aten.slice.Tensor)]
    assert bool(views) == left, called


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "parts": lambda x: x.split(2, 1)[2].unsqueeze(0)[..., 1],
    "unbound": lambda x: x.unbind(1)[3],
    "repeated": lambda x: x[1, :, None].expand(-1, 3),
    "a diagonal": lambda x: x.diagonal(),
    "windows": lambda x: x.unfold(1, 3, 2),
    "permuted, and a part of it": lambda x: x.view(2, 2, 6).permute(2, 0, 1)[3:, 1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_chains_of_views_are_one(name: str) -> None:
    called = _use(lambda x: (VIEWS[name](torch.mm(x, x.t() @ x)).clone(),), X)
    assert [target for target in called if target is reinterpret] == [reinterpret] * 2  # and of `x`
    assert not any(target in (operator.getitem, aten.view.default, aten.permute.default) for target in called)


def test_memory_that_is_not_known_is_viewed_by_pytorch() -> None:
    assert reinterpret not in _use(lambda x: (torch.sin(x).t().clone(),), X)
    assert reinterpret not in _use(lambda x: (x.t().clone(),), X, exact=False)
    assert reinterpret not in _use(lambda x: (torch.mm(x, x).view(torch.int32).clone(),), torch.randn(3, 3))
    assert reinterpret not in _use(lambda x: (torch.mm(x, x).as_strided((2,), (4,), 1).clone(),), torch.randn(3, 3))


def test_what_is_no_plain_memory_is_viewed_by_pytorch() -> None:
    def use(value: Tensor, function: Callable[[Tensor], tuple[Tensor, ...]]) -> list[object]:
        graph = torch.fx.experimental.proxy_tensor.make_fx(function)(value)
        use_layouts(graph.graph, exact_inputs=True)
        return _called(graph.graph)

    sparse = torch.eye(3).to_sparse()
    assert reinterpret not in use(sparse, lambda x: (x._values().t().clone(), torch.mm(x, x).to_dense()))
    assert reinterpret not in use(
        torch.randn(3, 3, dtype=torch.complex64), lambda x: (x.conj().t().clone(), x.real.t() + 1)
    )
