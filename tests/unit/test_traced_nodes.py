"""What a joint trace adds in the short way is what PyTorch's tracer adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusepass.codegen.lowering.tracer import results_of
from fusepass.training.gradients import BENDS
from fusepass.training.traced_nodes import traced_quickly

aten = torch.ops.aten

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one after another": lambda x, y: (x.exp() * 2 + y).sum(-1, keepdim=True),
    "several results": lambda x, y: torch.nn.functional.layer_norm(x, (6,)) + y.split(2)[1].sum(),
    "lists": lambda x, y: torch.cat([x, y.double().float()], 1),
    "no tensors": lambda x, y: x + torch.arange(6, dtype=torch.float32),
    "a write": lambda x, y: (x * 2).add_(y),
    "a constant": lambda x, y: x * torch.tensor([1.0, 2, 3, 4, 5, 6]),
    "a tensor of elsewhere": lambda x, y: x + ELSEWHERE[0],
    "what is taken apart": lambda x, y: aten.threshold_backward.default(x, y, 0),
    "what autograd takes apart": lambda x, y: aten.reshape.default(x.t(), [3, 8]),
    "a number that is asked for": lambda x, y: x + int(torch.tensor(3)),
    "a gradient": lambda x, y: torch.autograd.grad((x.requires_grad_() @ y.t()).sigmoid().sum(), x)[0],
}
ELSEWHERE: list[Tensor] = []


def traced(function: Callable[[Tensor, Tensor], Any]) -> fx.GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True):
        ELSEWHERE[:] = [torch.empty(4, 6)]
        graph: fx.GraphModule = make_fx(function, BENDS)(torch.empty(4, 6), torch.empty(4, 6))
    return graph


def values(graph: fx.GraphModule) -> Sequence[Any]:
    """What the descriptions of nodes say."""
    return [
        (str(node), type(node.meta["val"]), [(each.shape, each.stride(), each.dtype) for each in results_of(node)])
        for node in graph.graph.nodes
        if "val" in node.meta
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_is_pytorch_s(name: str) -> None:
    wanted = traced(FUNCTIONS[name])
    with traced_quickly():
        got = traced(FUNCTIONS[name])
    for each in (wanted, got):  # PyTorch adds the place of a result that is None
        each.graph.eliminate_dead_code()
        each.recompile()
    assert got.code == wanted.code
    assert values(got) == values(wanted)


def test_the_tracer_of_pytorch_s_is_asked_for_the_rest_alone() -> None:
    asked: list[Any] = []
    original = proxy_tensor.maybe_handle_decomp

    def count(mode: Any, func: Any, *rest: Any) -> Any:
        asked.append(func)
        return original(mode, func, *rest)

    with mock.patch.object(proxy_tensor, "maybe_handle_decomp", count), traced_quickly():
        traced(lambda x, y: aten.threshold_backward.default(x.exp() + y, y, 0).neg())
    assert asked[0] is aten.threshold_backward.default
    assert not {aten.exp.default, aten.add.Tensor, aten.le.Scalar, aten.where.self, aten.neg.default} & {*asked}


def test_a_version_without_these_functions_traces_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.training.traced_nodes._NEEDED", ("under_another_name",))
    called = mock.Mock(wraps=proxy_tensor.proxy_call)
    with traced_quickly(), mock.patch.object(proxy_tensor, "proxy_call", called):
        make_fx(lambda x: x.sin() + 1, tracing_mode="fake")(torch.empty(3))
    assert called.call_count >= 2
