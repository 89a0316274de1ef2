"""Regions of a graph on a CPU that are not worth it together run as their own operators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass import measure
from fusepass.autotune import graph_trial, tune
from fusepass.report.choice import Choice

WAYS = ("all regions", "its operators", "those that gain most")


class Net(nn.Module):
    """Two regions with an operator between that is never fused."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sort(torch.tanh(x) * 2, -1).values
        return F.gelu(y) + 1


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds by way that the trial of the graph finds, and how often it asks; alone, the first region gains much and the second little."""
    taken = dict.fromkeys(("asked", *WAYS), 0.0)
    speedups = iter([1.9, 1.1] * 9)

    def measured(graph: object, ways: object) -> measure.Rounds:
        taken["asked"] += 1
        x = torch.randn(3, 8)
        made = ways([x])  # type: ignore[operator]
        for way in made.values():
            torch.testing.assert_close(way()[0], Net()(x))
        return measure.Rounds({name: [taken[name]] for name in made})

    monkeypatch.setattr(graph_trial, "measured", measured)
    monkeypatch.setattr(
        tune, "_remembered", lambda work, regions, effort: Choice(next(iter(regions)), speedup=next(speedups))
    )
    return taken


@pytest.mark.parametrize(
    ("seconds", "left"),
    [((1.0, 1.2, 0.99), [False, False]), ((1.0, 0.9, 0.95), [True, True]), ((1.0, 0.95, 0.9), [False, True])],
)
@torch.no_grad()
def test_regions_that_the_whole_is_faster_without_are_left_to_eager(
    seconds: tuple[float, ...], left: list[bool], told: dict[str, float], tmp_path: Path
) -> None:
    told.update(zip(WAYS, seconds, strict=True))
    x = torch.randn(3, 8)
    for _ in range(2):
        optimised = fusepass.optimize(Net(), tune="fast", cache_dir=tmp_path)
        torch.testing.assert_close(optimised(x), Net()(x))
        regions = optimised.report().regions
        assert [region.choice is not None and region.choice.leaves_eager for region in regions] == left
        assert ["the whole graph takes with all regions 1e+03 ms" in str(region.choice) for region in regions] == left
        optimised(torch.randn(3, 9))  # what was found holds for sizes that are about the same
        regions = optimised.report().regions
        assert [region.choice is not None and region.choice.leaves_eager for region in regions] == left * 2
    assert told["asked"] == 1


@torch.no_grad()
def test_what_is_not_tried(told: dict[str, float], tmp_path: Path) -> None:
    told.update(zip(WAYS, (1.0, 0.1, 0.1), strict=True))
    x = torch.randn(3, 8)
    for model, options in (
        (Net(), {"tune": "off"}),
        (Net(), {"tune": "fast", "disable": "whole-graph"}),
        (nn.GELU(), {"tune": "fast"}),  # one region is all there is
        (nn.Sequential(Net(), nn.Dropout()).train(), {"tune": "fast"}),  # it would draw
        (nn.Sequential(Net(), nn.BatchNorm1d(8)).train(), {"tune": "fast"}),  # it would write
    ):
        fusepass.optimize(model, cache_dir=tmp_path, **options)(x)  # type: ignore[arg-type]
    assert told["asked"] == 0


@torch.no_grad()
def test_a_real_trial_decides(tmp_path: Path) -> None:
    x = torch.randn(64, 512)
    optimised = fusepass.optimize(Net(), tune="fast", cache_dir=tmp_path)
    torch.testing.assert_close(optimised(x), Net()(x))
    assert dict(optimised.report().seconds)["whole graph"] > 0


class Views(nn.Module):
    """Regions that an operator reads through views of their results."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sort((torch.tanh(x) * 2).view(2 * x.shape[0], -1), -1).values
        return F.gelu(y.view(-1, 2)) + 1


@torch.no_grad()
def test_regions_that_give_views_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, ran = torch.randn(3, 8), []

    def measured(graph: object, ways: object) -> measure.Rounds:
        for name, way in ways([x]).items():  # type: ignore[operator]
            torch.testing.assert_close(way()[0], Views()(x))
            ran.append(name)
        return measure.Rounds({name: [1.0] for name in ran})

    monkeypatch.setattr(graph_trial, "measured", measured)
    monkeypatch.setattr(tune, "_remembered", lambda work, regions, effort: Choice(next(iter(regions)), speedup=2.0))
    fusepass.optimize(Views(), tune="fast", cache_dir=tmp_path)(x)
    assert ran == list(WAYS[:2])
