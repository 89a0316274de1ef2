"""Trailing writes become few calls, and only where nobody can tell."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

import fusepass
from fusepass.capture.trace import Captured, capture
from fusepass.compile.pipeline import compile_graph
from fusepass.compile.writes import gather_writes
from fusepass.numerics.check import check
from fusepass.runtime.operators import SHORTER
from tests.support.aten import traced
from tests.support.interpreted import interpreted

aten = torch.ops.aten
copy = aten.copy_.default


def calls(graph: fx.GraphModule) -> dict[str, int]:
    """How often each writing operator is called."""
    long = {short: overload for overload, short in SHORTER.items()}
    called = (long.get(node.target, node.target) for node in graph.graph.nodes if node.op == "call_function")
    targets = (target for target in called if isinstance(target, OpOverload))
    return dict(collections.Counter(str(target) for target in targets if target._schema.is_mutable))


def called(module: fx.GraphModule) -> dict[str, int]:
    """How often each writing function is called by the code of a module."""
    return dict(collections.Counter(re.findall(r"= (\S*(?:copy|add)_)\(", module.code)))


def several(a: Tensor, b: Tensor, c: Tensor, n: Tensor, m: Tensor) -> Tensor:
    x, y, z = a * 2, b + c, c.relu()
    up, on = n + 1, m + 1
    for target, value in ((a, x), (n, up), (b, y), (m, on), (c, z)):
        copy(target, value)
    return x


def conversions(a: Tensor, b: Tensor, c: Tensor, n: Tensor, m: Tensor) -> Tensor:
    """One value is expanded, one converted; counters go up by different numbers."""
    x, y, up, on = a.sum(), n * 3, n + 1, m + 2
    for target, value in ((a, x), (b, y), (n, up), (m, on)):
        copy(target, value)
    return x


def swap(a: Tensor, b: Tensor, c: Tensor, n: Tensor, m: Tensor) -> Tensor:
    """The second copy reads what the first has written."""
    copy(a, b)
    copy(b, a)
    return c.relu()


def twice(a: Tensor, b: Tensor, c: Tensor, n: Tensor, m: Tensor) -> Tensor:
    x, y = b + 1, b + 2
    copy(a, x)
    copy(a, y)
    return x


def read_between(a: Tensor, b: Tensor, c: Tensor, n: Tensor, m: Tensor) -> Tensor:
    x, y = c * 2, c * 3
    copy(a, x)
    z = a + 1
    copy(b, y)
    return z


def sum_used(a: Tensor, b: Tensor, c: Tensor, n: Tensor, m: Tensor) -> Tensor:
    up, on = n + 1, m + 1
    copy(n, up)
    copy(m, on)
    return up


def view_returned(a: Tensor, b: Tensor, c: Tensor, n: Tensor, m: Tensor) -> Tensor:
    """The view is of what the copy gives, not of the placeholder as in captured graphs."""
    x, y = a * 2, b * 3
    copy(a, x)
    copy(b, y)
    return a.view(-1)


CASES: dict[Callable[..., Tensor], dict[str, int]] = {
    several: {"aten._foreach_copy_.default": 1, "aten._foreach_add_.Scalar": 1},
    conversions: {"aten.copy_.default": 2, "aten._foreach_add_.Scalar": 2},
    swap: {"aten.copy_.default": 2},
    twice: {"aten.copy_.default": 2},
    read_between: {"aten.copy_.default": 2},
    sum_used: {"aten.copy_.default": 1, "aten._foreach_add_.Scalar": 1},
    view_returned: {"aten.copy_.default": 2},
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
@pytest.mark.invariant(34)
def test_writes(function: Callable[..., Tensor]) -> None:
    def inputs() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(4), torch.randn(4), torch.randn(4), torch.tensor(3), torch.tensor(5)]

    graph = traced(function, *inputs())
    gather_writes(graph)
    assert calls(graph) == CASES[function]
    expected, got = inputs(), inputs()
    assert torch.equal(graph(*got), function(*expected))
    assert all(map(torch.equal, got, expected))


class Views(nn.Module):
    """Gives views of buffers that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(4.0).view(2, 2))
        self.register_buffer("b", torch.ones(2, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.a *= 2
        self.b += x
        return self.a.view(-1), self.b.T, (x * 2).relu()


def test_views_of_what_is_written_are_views() -> None:
    model = Views()
    with torch.no_grad(), interpreted():
        fused = fusepass.optimize(model)
        assert check(model, fused, (torch.randn(2, 2),)).ok
        a, b, _ = fused(torch.ones(2, 2))
        assert (a.data_ptr(), b.data_ptr()) == (model.a.data_ptr(), model.b.data_ptr())
        assert (a.tolist(), b.tolist()) == ([0.0, 2.0, 4.0, 6.0], [[2.0, 2.0], [2.0, 2.0]])
        captured = capture(model, (torch.ones(2, 2),), {})
        assert isinstance(captured, Captured)
        direct: Any = compile_graph(captured.graph, name="Views").call
    assert called(direct.__self__) == {"torch._foreach_copy_": 1}


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = (norm(x).relu() + 1).sort(0)[0]  # which is in no region
        return x


def test_three_norms_write_their_statistics_in_two_calls() -> None:
    model, x = Norms().train(), torch.randn(8, 4)
    with torch.no_grad(), interpreted():
        captured = capture(model, (x,), {})
        assert isinstance(captured, Captured)
        compiled = compile_graph(captured.graph, name="Norms")
        direct: Any = compiled.call
        assert called(direct.__self__) == {"torch._foreach_copy_": 1, "torch._foreach_add_": 1}
        assert calls(compiled.graph_module) == {"aten.copy_.default": 9}
        fused = fusepass.optimize(model)
        for _ in range(2):
            outcome = check(model, fused, (x,))
            assert outcome.ok, outcome.explain()
            fused(x)
    assert [norm.num_batches_tracked.item() for norm in model.norms] == [2, 2, 2]
