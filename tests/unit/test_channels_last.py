"""Graphs on a CPU with images channels last inside: which ones, that they compute and lay out the same, and who decides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusepass
from fusepass import measure
from fusepass.autotune import graph_trial, layout
from fusepass.capture.trace import Captured, capture
from fusepass.patterns.channels_last import CHANNELS_LAST, Followed, laid_out, wanted
from fusepass.patterns.packing import PACKED_WEIGHTS

CPU = torch.device("cpu")


class Net(nn.Module):
    """A branch with a pool beside one with convolutions, joined, and a classifier of what is flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.grouped, self.last = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.Conv2d(16, 4, 1)
        self.head = nn.Linear(4 * 6 * 5, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.relu(self.norm(self.first(x)))
        z = torch.cat([self.grouped(y), F.max_pool2d(y, 3, 1, 1)], 1)
        w = self.last(z) * z.mean((2, 3), keepdim=True)[:, :4]
        return y, w.flatten(1), self.head(w.reshape(len(x), -1))


def captured(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    made = capture(model.eval(), inputs, {})
    assert isinstance(made, Captured)
    return made.graph


def functional(function: Callable[..., Any]) -> nn.Module:
    made = nn.Module()
    made.forward = function
    return made


@torch.no_grad()
def test_values_and_the_layouts_of_results_stay() -> None:
    graph = captured(Net(), torch.randn(2, 3, 6, 5))
    assert wanted(graph.graph)
    made = laid_out(graph)
    assert made is not None
    inputs = measure.made_up([node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")], CPU)
    ours, theirs = Followed(made).run(*inputs), fx.Interpreter(graph).run(*inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
    convolutions = made.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert len(convolutions) == 3
    assert all(node.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last) for node in convolutions)
    copies = made.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert len(copies) <= len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) + 4


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(4, 4), (2, 4)),
        (nn.Conv1d(3, 4, 3), (2, 3, 9)),
        (nn.Conv2d(3, 4, 3).double(), (2, 3, 9, 9)),
        (functional(lambda x: F.conv2d(F.dropout(x), x)), (2, 2, 9, 9)),
    ],
    ids=["product", "sequence", "float64", "random"],
)
@torch.no_grad()
def test_what_is_left_as_it_is(model: nn.Module, shape: tuple[int, ...]) -> None:
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    assert not wanted(captured(model, torch.randn(shape, dtype=dtype)).graph)


def test_images_that_are_channels_last_need_nothing() -> None:
    x = torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert not wanted(captured(nn.Conv2d(3, 4, 3), x).graph)


def test_a_graph_that_lies_otherwise_than_described_is_noticed() -> None:
    with torch.no_grad():
        graph = captured(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9))
    made = laid_out(graph)
    assert made is not None
    (convolution,) = made.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    convolution.meta["val"] = torch.empty(convolution.meta["val"].shape, device="meta")
    inputs = measure.made_up([node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")], CPU)
    with torch.no_grad(), pytest.raises(RuntimeError, match="lies otherwise than described"):
        Followed(made).run(*inputs)


@torch.no_grad()
def test_both_layouts_are_timed() -> None:
    graph = captured(Net(), torch.randn(2, 3, 6, 5))
    other = laid_out(graph)
    assert other is not None
    with fusepass.override(tune="fast"):
        forms = {"as captured": layout._Form(graph), CHANNELS_LAST: layout._Form(other)}
        rounds = graph_trial.measured(graph, partial(layout._calls, forms))
    assert rounds is not None
    assert rounds.samples.keys() == {"as captured", CHANNELS_LAST}
    assert min(map(min, rounds.samples.values())) > 0


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the trial is told; counts how often it asks."""
    taken = {"as captured": 1.0, CHANNELS_LAST: 0.5, PACKED_WEIGHTS: 1.0, "asked": 0, "disturbed": 0}

    def measured(*_: object) -> measure.Rounds:
        taken["asked"] += 1
        return measure.Rounds(
            {name: [taken[name]] for name in ("as captured", CHANNELS_LAST, PACKED_WEIGHTS)}, int(taken["disturbed"])
        )

    monkeypatch.setattr(graph_trial, "measured", measured)
    return taken


@pytest.mark.parametrize(("seconds", "taken"), [(0.5, True), (0.97, False)])
@torch.no_grad()
def test_the_quicker_layout_is_taken_told_and_remembered(
    seconds: float, taken: bool, times: dict[str, float], tmp_path: Path
) -> None:
    times[CHANNELS_LAST] = seconds
    model, x = Net().eval(), torch.randn(2, 3, 6, 5)
    with fusepass.override(cache_dir=tmp_path, tune="fast"):
        for _ in range(2):
            _, applied, _ = layout.chosen_layout(captured(model, x))
            assert [each.rule for each in applied] == [CHANNELS_LAST] * taken
            assert times["asked"] == 1
        with fusepass.override(disable=CHANNELS_LAST):
            assert layout.chosen_layout(captured(model, x))[1] == []
        with fusepass.override(tune="off"):
            assert layout.chosen_layout(captured(model, x))[1] == []


@torch.no_grad()
def test_what_was_disturbed_is_not_remembered(times: dict[str, float], tmp_path: Path) -> None:
    times["disturbed"] = 2
    model, x = Net().eval(), torch.randn(2, 3, 6, 5)
    with fusepass.override(cache_dir=tmp_path, tune="fast"):
        for _ in range(2):
            assert layout.chosen_layout(captured(model, x))[1]
    assert times["asked"] == 2


@torch.no_grad()
def test_an_optimised_model_gives_the_same_channels_last(times: dict[str, float], tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(2, 3, 6, 5)
    optimised = fusepass.optimize(model, tune="fast", disable="whole-graph", cache_dir=tmp_path)
    for _ in range(3):
        for ours, theirs in zip(optimised(x), model(x), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()
    assert any(rewrite.rule == CHANNELS_LAST for rewrite in optimised.report().rewrites)
