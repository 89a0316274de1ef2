"""What Dynamo cannot trace in one call, or in one place, takes no graphs from the others."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.errors import FusepassWarning
from fusepass.report.report import Report
from tests.support.interpreted import interpreted

X = torch.linspace(-1, 1, 24).view(4, 6).sin()


@pytest.fixture(autouse=True)
def _no_compiler() -> Iterator[None]:
    torch._dynamo.reset()  # what it left alone in another test
    with interpreted():
        yield


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4), nn.Softmax(-1))


def fallbacks(report: Report) -> int:
    return sum(entry.count for entry in report.fallbacks)


@pytest.mark.parametrize("first", [False, True])
def test_a_call_that_raises_takes_no_graph_from_others(first: bool) -> None:
    model = mlp()
    optimised = fusepass.optimize(model)
    if not first:
        optimised(X)
    for wrong in (torch.zeros(4, 5), torch.zeros(4, 6, dtype=torch.long), "text"):
        for call in (model, optimised):
            with pytest.raises((RuntimeError, TypeError)):
                call(wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusepassWarning)
        torch.testing.assert_close(optimised(X), model(X))
        torch.testing.assert_close(optimised(X[:3]), model(X[:3]))
    report = optimised.report()
    assert report.fallbacks == ()
    assert report.regions


class TwoWays(nn.Module):
    """One of its ways cannot be traced: it goes on in the middle of a loop."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.layers, self.breaks = mlp(), breaks

    def forward(self, x: Tensor, traced: bool) -> Tensor:
        if not traced:
            for _ in range(2):
                x = x * 2 if float(x.sum()) > 1e9 else x
        elif self.breaks:
            torch._dynamo.graph_break()
        result: Tensor = self.layers(x)
        return result


@pytest.mark.parametrize("breaks", [False, True])
def test_a_way_that_is_not_traced_takes_no_graph_from_another(breaks: bool) -> None:
    model = TwoWays(breaks)
    optimised = fusepass.optimize(model)
    optimised(X, True)
    with pytest.warns(FusepassWarning, match="Dynamo traces no graph for such a call"):
        optimised(X, False)
    for traced in (True, False, True):
        torch.testing.assert_close(optimised(X, traced), model(X, traced))
    assert fallbacks(optimised.report()) == 2


LIBRARY = """
import torch


def scaled(x, factor):
    return torch.nn.functional.gelu(x * factor)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        return scaled(self.linear(x), 2).tanh()
"""


@pytest.mark.parametrize("name", ["torch_library", "torchlibrary.layers"])
def test_functions_of_libraries_with_names_like_pytorch_s_are_none_of_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, library)
    exec(LIBRARY, vars(library))
    model = library.Layer()
    optimised = fusepass.optimize(model)
    torch.testing.assert_close(optimised(X), model(X))
    assert optimised.report().fallbacks == ()
    assert optimised.report().regions


class Recognised(nn.Module):
    """A recurrent layer in the middle."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.LayerNorm(6), kind(6, 8, 2, dropout=0.4), nn.Linear(8, 5)

    def forward(self, x: Tensor, state: Tensor | tuple[Tensor, ...] | None = None) -> tuple[Tensor, object]:
        found, state = self.layer(F.gelu(self.before(x)), state)
        return F.gelu(self.after(found)).log_softmax(-1), state


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_what_stands_around_recurrent_layers_fuses(kind: type[nn.RNNBase]) -> None:
    forward = kind.forward
    results = []
    torch.manual_seed(0)
    model = Recognised(kind)
    optimised = fusepass.optimize(model)
    for call in (model, optimised):
        torch.manual_seed(1)
        model.zero_grad()
        scores, state = call(X[None].transpose(0, 1).contiguous())
        scores, _ = call(X[None].transpose(0, 1).contiguous(), state)
        (scores * torch.linspace(-1, 1, scores.numel()).view(scores.shape)).sum().backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        results.append([scores.detach(), *gradients, torch.get_rng_state()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    report = optimised.report()
    names = [region.name for region in report.regions]
    assert report.fallbacks == ()
    assert any("norm" in name for name in names), names
    assert any("softmax" in name for name in names), names
    assert kind.forward is forward
    assert not hasattr(forward, "_torchdynamo_disable")
