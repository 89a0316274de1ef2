"""Threads that export, trace or look the backend up with PyTorch's own functions while others do so with this package."""

from __future__ import annotations

import sys
import threading
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry
from torch.fx.experimental.proxy_tensor import make_fx

import fusepass
from fusepass.capture.threads import tracing_apart
from fusepass.codegen.lowering.modes import without_modes
from fusepass.report.report import CaptureRoute
from fusepass.training.backend import fusepass_backend
from tests.unit.test_threads import together

ROOT = Path(__file__).parents[2]


def _exported_meanwhile(*functions: Any) -> list[BaseException]:
    """What `functions` raise, in threads that run while this one traces as `torch.export` does."""
    raised: list[BaseException] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        count = torch._ops._len_torch_dispatch_stack_pre_dispatch()
        assert count > 0
        raised.extend(together(*functions))
        assert torch._ops._len_torch_dispatch_stack_pre_dispatch() == count
        return torch.tanh(x) + 1

    traced = make_fx(function, pre_dispatch=True)(torch.ones(2))
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] != []
    torch.testing.assert_close(traced(torch.zeros(2)), torch.ones(2))
    return raised


@pytest.mark.invariant(46)
def test_modes_of_a_thread_that_exports_are_not_taken_away() -> None:
    process_s = torch._ops._mode_stack_state_for_pre_dispatch

    def tracing() -> None:
        with without_modes():
            assert process_s.count() > 0
        assert not torch._C._len_torch_dispatch_stack()
        with tracing_apart():
            assert process_s.count() > 0
            traced = make_fx(lambda x: x.sin() * 2)(torch.ones(2))
        assert len(traced.graph.nodes) == 4

    assert _exported_meanwhile(tracing) == []


class _Written(nn.Module):
    """The recorder declines it, and the export captures it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * 2
        x.add_(1)
        return y.softmax(-1)


class _Counted(nn.Module):
    """Dynamo serves it."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (torch.tanh(x) * 2).softmax(-1)


@pytest.mark.xfail(
    torch.__version__ >= (2, 15), reason="its tracing meets the other thread's; the original runs, with a warning"
)
@pytest.mark.parametrize(("kind", "route"), [(_Written, CaptureRoute.TRACED), (_Counted, CaptureRoute.DYNAMO)])
@torch.no_grad()
@pytest.mark.invariant(46)
def test_a_model_is_captured_while_another_thread_exports(kind: type[nn.Module], route: CaptureRoute) -> None:
    fused = fusepass.optimize(kind(), tune="off")

    def call() -> None:
        with torch.no_grad():
            x = torch.randn(3, 5)
            torch.testing.assert_close(fused(x.clone()), kind()(x))

    assert _exported_meanwhile(call) == []
    report = fused.report()
    assert report.capture is route
    assert not report.fallbacks


def test_threads_that_look_the_backend_up_at_once_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    registry._lazy_import()
    found: list[Any] = []
    every = threading.Barrier(3)

    class Loading(EntryPoint):
        """Loads once all threads have found that the backend is not registered."""

        def load(self) -> Any:
            every.wait(60)
            return super().load()

    # As where nobody has imported the backend yet.
    monkeypatch.delitem(registry._COMPILER_FNS, "fusepass", raising=False)
    monkeypatch.delitem(sys.modules, "fusepass.training.registered", raising=False)
    monkeypatch.setitem(registry._BACKENDS, "fusepass", Loading("fusepass", names["fusepass"], "torch_dynamo_backends"))
    look_up = lambda: found.append(registry.lookup_backend("fusepass"))  # noqa: E731
    assert together(look_up, look_up, look_up) == []
    assert found == [fusepass_backend] * 3
