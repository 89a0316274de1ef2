"""Views at the edges of regions: they are not made, and what the caller gets lies as eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fusepass
from fusepass.compile import boundary_views
from fusepass.patterns.aliasing import is_view
from fusepass.runtime.meta import Meta
from fusepass.runtime.region import FusedRegion
from tests.support.aten import same_bits
from tests.support.noted import noted_regions


class Of(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def between(x: Tensor) -> Tensor:
    return (x * 2 - 1).clamp(-1, 1)


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    y = between(x)
    return y.view(8, 4), y.view(4, 8)


def two_results(x: Tensor) -> tuple[Tensor, Tensor]:
    y = between(x)
    return y.view(8, 4), y.sum(1)[None]


CASES: dict[str, tuple[Callable[..., object], int]] = {
    "nothing": (between, 0),
    "a shape": (lambda x: between(x).view(8, 4), 0),
    "one view of the other": (lambda x: between(x).flatten(1)[:, None].transpose(0, 1), 0),
    "other dimensions": (lambda x: between(x).permute(2, 0, 1), 0),
    "a square turned": (lambda x: between(x[0]).t(), 0),
    "a pool's": (lambda x: torch.avg_pool1d(x, 3, 1, 1), 0),
    "one result of two": (two_results, 0),
    "a part": (lambda x: between(x)[:, 1:], 1),
    "a shape, repeated": (lambda x: between(x)[..., None].expand(-1, -1, -1, 2), 1),
    "the memory as it lies": (lambda x: between(x).as_strided((4, 8), (8, 1), 0), 1),
    "two views of one result": (two_views, 2),
}
"""Functions of a 2 x 4 x 4 tensor, and how many views are left of them."""


@pytest.mark.parametrize("name", CASES)
def test_results_are_given_as_they_are_seen(name: str) -> None:
    function, left = CASES[name]
    x = torch.randn(2, 4, 4)
    model = Of(function)
    optimised = fusepass.optimize(model)
    graph = optimised.graph_module(x)
    assert sum(is_view(node.target) for node in graph.graph.nodes) == left
    for run in (optimised, graph):
        for mine, eager in zip(pytree.tree_leaves(run(x)), pytree.tree_leaves(model(x)), strict=True):
            assert same_bits(mine, eager)


def test_gradients_of_what_is_seen_otherwise() -> None:
    model = Of(lambda x: between(x).flatten(1))
    x, y = (torch.linspace(-1, 1, 32).view(2, 4, 4).requires_grad_() for _ in range(2))
    for run, at in ((torch.compile(model, backend="fusepass"), x), (model, y)):
        run(at).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_what_a_region_reads_through_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region reads memory, its original operators what they are made for."""
    (region,) = _regions(monkeypatch, Of(lambda x: between(x) + 1), torch.randn(4, 4))
    seen = region.seen([Meta((2, 2, 4), (8, 4, 1), torch.float32)], [Meta((16,), (1,), torch.float32)])
    x = torch.randn(2, 2, 4)
    for run in (seen, seen.original, seen.checked):
        assert same_bits(run(x), (between(x) + 1).flatten())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"was specialised for torch.float32\[2, 2, 4\]"):
        seen.checked(x.view(4, 4))
    assert region.seen(region.inputs, region.outputs) is region


def test_a_square_that_is_turned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are alike, and strides are not compared, as those of the argument are known."""
    turned = torch.randn(4, 4).t()
    (region,) = _regions(monkeypatch, Of(lambda x: between(x) + 1), turned)
    assert region.reads_memory(0)
    seen = region.seen([Meta((4, 4), (4, 1), torch.float32)], region.outputs)
    for run in (seen, seen.original):
        assert same_bits(run(turned.t()), between(turned) + 1)  # type: ignore[arg-type]


def test_operands_of_the_library_are_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 40, 50)
    model = nn.Sequential(nn.Linear(50, 60), nn.GELU())
    (region,) = _regions(monkeypatch, model, x)
    called = bool(region.generated.program.calls)
    assert all(region.reads_memory(number) != called for number in range(len(region.inputs)))


def test_bases_are_found_through_views_that_regions_alone_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = _call(graph, torch.ops.aten.view.default, x, [4, 4])
    second = _call(graph, torch.ops.aten.t.default, first)
    inside = graph.call_function(torch.ops.aten.relu.default, (second,))
    graph.output((inside,))
    x.meta["val"], first.meta["val"] = torch.empty(16), torch.empty(4, 4)
    second.meta["val"] = first.meta["val"].t()
    assert list(boundary_views._bases(second, {inside})) == [second, first, x]
    assert list(boundary_views._bases(second, set())) == [second]
    with graph.inserting_before(inside):
        graph.call_function(torch.ops.aten.sin.default, (first,))
    assert list(boundary_views._bases(second, {inside})) == [second, first]


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_region_behind_a_view_of_what_another_gives(returned: bool, exact: bool) -> None:
    """It takes what that one gives, seen as it is given; and inputs through views where they lie as they are told."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    flat = _call(graph, torch.ops.aten.view.default, x, [16])
    first = _call(graph, torch.ops.aten.relu.default, flat)
    square = _call(graph, torch.ops.aten.view.default, first, [4, 4])
    second = _call(graph, torch.ops.aten.tanh.default, square)
    graph.output((second, first) if returned else (second,))
    for node in (flat, first):
        node.meta["val"] = torch.empty(16)
    for node in (x, square, second):
        node.meta["val"] = torch.empty(4, 4)
    works: Any = [
        SimpleNamespace(
            region=SimpleNamespace(name=node.name, nodes=(node,), outputs=(node,)),
            arguments=[taken],
            is_exact=lambda node: exact and node is x,
        )
        for taken, node in ((flat, first), (square, second))
    ]
    for reads in (True, False):
        regions: Any = {
            node.name: SimpleNamespace(reads_memory=lambda _, reads=reads: reads) for node in (first, second)
        }
        found = boundary_views.edges(works, regions)
        gives = first if returned else square
        assert found[first.name] == boundary_views.Edges((x if exact and reads else flat,), (gives,))
        assert found[second.name] == boundary_views.Edges((gives if reads else square,), (second,))


def _call(graph: fx.Graph, target: Callable[..., object], *arguments: object) -> fx.Node:
    return graph.call_function(target, arguments)  # type: ignore[arg-type]


def _regions(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor) -> Sequence[FusedRegion]:
    """The regions of `model` as they run."""
    found = noted_regions(monkeypatch)
    with torch.no_grad(), fusepass.override(tune="off"):
        fusepass.optimize(model)(x)
    return found
