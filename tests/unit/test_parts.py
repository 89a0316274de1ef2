"""What operators outside the vocabulary are made of: traced once for each kind of call, and put in their place."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fusepass.codegen.lowering import parts, registry
from fusepass.codegen.lowering.lower import decompose
from fusepass.codegen.lowering.tracer import Spec

aten = torch.ops.aten


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Filled with what is traced from now on; nothing is remembered before."""
    found: list[Any] = []

    def noted(*args: Any) -> fx.GraphModule:
        found.append(args)
        return original(*args)

    original = registry.decomposed
    monkeypatch.setattr(registry, "decomposed", noted)
    monkeypatch.setattr(parts, "_parts", {})
    return found


def described(*shape: int, dtype: torch.dtype = torch.float32) -> Spec:
    return Spec.of(torch.empty(shape, dtype=dtype, device="meta"))


def graph_of(make: Callable[..., fx.Node], *inputs: Spec) -> fx.GraphModule:
    """A graph whose calls `make` adds, each of which gives what the first input looks like."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{number}") for number in range(len(inputs))]
    for node, value in zip(given, inputs, strict=True):
        node.meta["val"] = value
    graph.output((make(graph, *given),))
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta.setdefault("val", inputs[0])
    return fx.GraphModule({}, graph)


def one(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return graph.call_function(aten.logaddexp.default, (x, y))


def twice(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    first = one(graph, x, y)
    first.meta["val"] = x.meta["val"]
    return one(graph, first, y)


def test_equal_calls_are_traced_once(traced: list[Any]) -> None:
    pair = described(4, 5), described(4, 5)
    for make in (one, twice, one):
        targets = [node.target for node in decompose(graph_of(make, *pair)).graph.nodes]
        assert aten.logaddexp.default not in targets
        assert targets.count(aten.exp.default) == (2 if make is twice else 1)
    assert len(traced) == 1


@pytest.mark.parametrize(
    "other",
    [
        graph_of(one, described(4, 6), described(4, 6)),
        graph_of(one, described(4, 5, dtype=torch.float64), described(4, 5, dtype=torch.float64)),
        graph_of(lambda graph, x: one(graph, x, x), described(4, 5)),
    ],
    ids=["shape", "type", "one tensor twice"],
)
def test_calls_of_another_kind_are_traced_anew(traced: list[Any], other: fx.GraphModule) -> None:
    decompose(graph_of(one, described(4, 5), described(4, 5)))
    decompose(other)
    assert len(traced) == 2


def test_a_new_handler_has_calls_traced_anew(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(one, described(4, 5), described(4, 5))
    decompose(graph)
    monkeypatch.setattr(registry, "_HANDLERS", {**registry._HANDLERS, object(): lambda call: None})
    decompose(graph)
    assert len(traced) == 2


def test_no_more_graphs_are_remembered_than_are_kept(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_KEPT", 2)
    for size in (3, 4, 5, 5, 4, 3):
        decompose(graph_of(one, described(size), described(size)))
    assert len(traced) == 4  # the last one is of what went first


def test_a_decomposed_graph_gives_the_same_numbers() -> None:
    """With a result that is not asked for."""

    def make(graph: fx.Graph, x: fx.Node, y: fx.Node, weight: fx.Node) -> fx.Node:
        statistics = [graph.call_function(aten.mul.Tensor, (weight, factor)) for factor in (0.5, 2.0)]
        geometry = (x, y, weight, None, None, *statistics, True, 1e-5, [True, True, False])
        back = graph.call_function(aten.native_batch_norm_backward.default, geometry)
        value = described(6, 3, 2, 2)
        back.meta["val"] = (value, described(3), None)
        of_input = graph.call_function(operator.getitem, (back, 0))
        of_input.meta["val"] = value
        for each in statistics:
            each.meta["val"] = described(3)
        return graph.call_function(aten.logaddexp.default, (of_input, y))

    graph = graph_of(make, described(6, 3, 2, 2), described(6, 3, 2, 2), described(3))
    torch.manual_seed(0)
    inputs = torch.randn(6, 3, 2, 2), torch.randn(6, 3, 2, 2), torch.rand(3) + 1
    made = decompose(graph)
    targets = {node.target for node in made.graph.nodes}
    assert not targets & {aten.native_batch_norm_backward.default, aten.logaddexp.default}
    torch.testing.assert_close(made(*inputs), graph(*inputs))
