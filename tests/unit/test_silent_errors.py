"""An error that nobody expects is no silent choice: it is told, or raised when debugging."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.autotune import trial
from fusepass.capture import trace
from fusepass.capture.record import Recorder

x = torch.linspace(-2, 2, 12).view(3, 4)
MODEL = nn.Sequential(nn.Softmax(1), nn.GELU())


def _breaks(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("a bug")


@torch.no_grad()
@pytest.mark.invariant(21)
def test_a_bug_of_the_recorder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "record", _breaks)
    fused = fusepass.optimize(MODEL, tune="off")
    with pytest.warns(fusepass.FusepassWarning, match="recording it failed with TypeError: a bug"):
        torch.testing.assert_close(fused(x), MODEL(x))
    assert fused.report().regions
    with pytest.raises(TypeError, match="a bug"):
        fusepass.optimize(MODEL, tune="off", debug=True)(x)


@torch.no_grad()
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.invariant(21)
def test_a_bug_of_a_trial_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, debug: bool) -> None:
    monkeypatch.setattr(trial, "Reference", _breaks)
    fused = fusepass.optimize(MODEL, tune="fast", debug=debug, cache_dir=tmp_path)
    if debug:
        with pytest.raises(TypeError, match="a bug"):
            fused(x)
        return
    with pytest.warns(fusepass.FusepassWarning, match="compared with nothing: trying it failed with TypeError: a bug"):
        torch.testing.assert_close(fused(x), MODEL(x))


class Locked(nn.Module):
    """Dynamo serves it, and it cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.calls = threading.Lock(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.tanh() * 2


def test_that_a_model_cannot_be_copied_is_told() -> None:
    with pytest.warns(fusepass.FusepassWarning, match="it cannot be copied for a trial call, TypeError"):
        report = fusepass.explain(Locked(), x)
    assert "cannot be copied" in str(report)


def test_layouts_are_found_without_draws_that_others_would_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    drawn = graph.call_function(torch.ops.aten.bernoulli.p, (given, 0.5))
    graph.output((drawn,))
    before = torch.get_rng_state()
    monkeypatch.setattr(torch.random, "fork_rng", _breaks)
    trace._lay_out(torch.fx.GraphModule(nn.Module(), graph), [x.t()])
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn.meta["val"].stride() == torch.bernoulli(x.t(), 0.5).stride()
