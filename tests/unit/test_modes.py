"""The modes of torch.compile, and what an inference graph of the backend does as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.runtime.cuda_graphs import Pool, Tensors
from fusepass.training import backend, replayed
from tests.unit.test_replay import FakeGraphs


class Net(nn.Module):
    """Writes a buffer, reads parameters; its input comes first among the arguments, or last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(torch.nn.functional.gelu(self.linear(x))), x * 2


class Graphs(FakeGraphs):
    """Captures write nothing to the tensors of `model` either."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()

    def capture(self, run: Callable[[], Tensors], pool: Pool) -> tuple[Callable[[], None], Tensors]:
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        made = super().capture(run, pool)
        self.model.load_state_dict(before)
        return made


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Stand in for those of a GPU; graphs on the CPU are taken for such as may be captured."""
    made = Graphs()
    monkeypatch.setattr(replayed, "obstacle", lambda graph, arguments: None)
    real = replayed.replayed
    monkeypatch.setattr(backend, "replayed", lambda *args, **named: real(*args, **named, graphs=lambda device: made))
    return made


def compiled(model: nn.Module, mode: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="fusepass", mode=mode)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_an_inference_graph_is_replayed_from_its_second_call_on(
    mode: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEPASS_TUNE", "off")
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    graphs.model = model
    call = compiled(model, mode)
    held = []
    with torch.no_grad():
        for number in range(4):
            x = torch.rand(4, 6)
            held.append((call(x), twin(x)))
            assert (graphs.captures, graphs.replays) == (min(number, 1), number)
    torch.testing.assert_close([mine for mine, _ in held], [other for _, other in held])
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_other_modes_are_not_replayed(mode: str, graphs: FakeGraphs) -> None:
    call = compiled(Net(), mode)
    with torch.no_grad():
        for _ in range(3):
            call(torch.rand(4, 6))
    assert graphs.captures == 0


def test_a_mode_stands_for_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPASS_TUNE", "fast")
    seen: list[tuple[str, bool | str]] = []
    real = backend.compile_graph

    def observed(*args: Any, **named: Any) -> Any:
        seen.append((fusepass.current().tune, fusepass.current().cuda_graphs))
        with fusepass.override(tune="off"):
            return real(*args, **named)

    monkeypatch.setattr(backend, "compile_graph", observed)
    with torch.no_grad():
        for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
            compiled(nn.Sequential(nn.GELU(), nn.Softmax(1)), mode)(torch.rand(3, 5))
        with pytest.raises(Exception, match=r"mode is 'fastest'; allowed is one of default, reduce-overhead"):
            compiled(nn.GELU(), "fastest")(torch.rand(3, 5))
    assert seen == [("fast", "auto"), ("fast", True), ("max", True), ("max", False)]
