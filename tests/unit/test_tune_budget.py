"""Which candidates are generated and built: those that the budget pays for, hot regions first, and that the cost models do not rule out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusepass.autotune import candidates, generation, recorded, schedules
from fusepass.autotune.tune_budget import build_seconds, spend
from fusepass.autotune.work import Work
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.search import space
from fusepass.codegen.search.schedules import ScheduleCandidate
from fusepass.codegen.search.worth import RULED_OUT
from fusepass.compile import pipeline
from fusepass.compile.alike import note_alike
from fusepass.config import current, override
from fusepass.patterns.partition import partition
from fusepass.report.choice import Choice
from fusepass.report.report import CaptureRoute, RegionReport, Report

H200 = DeviceFacts.h200()


@pytest.fixture(autouse=True)
def _as_on_an_h200(monkeypatch: pytest.MonkeyPatch, records: Path) -> None:
    """Nothing of this machine counts, and nothing is looked up of its trials."""
    for owner in (candidates, pipeline):
        monkeypatch.setattr(owner, "device_facts", lambda device: H200)
    monkeypatch.setattr(candidates, "recall", lambda work: None)
    monkeypatch.setattr(recorded, "obstacle", lambda work, effort: "nothing is run here")
    monkeypatch.setattr(schedules, "times_are_taken", lambda work: True)
    monkeypatch.setattr(space, "rounds_to_tf32", lambda node: True)


def traced(function: Callable[..., Tensor], *shapes: Sequence[int], dtype: torch.dtype) -> fx.GraphModule:
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes))


def network() -> fx.GraphModule:
    """Two equal convolutions, and one that takes a fiftieth of the time of each."""

    def function(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        x = F.conv2d(x, first, padding=1).relu()
        x = F.conv2d(x, second, padding=1).relu()
        return F.conv2d(x, third, stride=8).relu()

    weight = (64, 64, 3, 3)
    return traced(function, (32, 64, 56, 56), weight, weight, weight, dtype=torch.float16)


def generated(graph: fx.GraphModule, **options: float | str | int) -> list[Work]:
    """The regions that differ, with their candidates, none of which is built."""
    with override(jobs=8, **{"tune": "fast", **options}):  # type: ignore[arg-type]
        works, _ = pipeline.generated(graph, partition(graph).regions, Forms(), handing=False)
    assert not any(work.reason or work.lost for work in works)
    return [work for work in works if work.like is None]


def spent(budget: float) -> tuple[list[Work], float]:
    """The regions of `network` and what is left of `budget`; nothing is generated."""
    graph = network()
    works = pipeline._works(graph, partition(graph).regions, exact=False)
    note_alike(works)
    with override(jobs=8, tune="fast", tune_budget=budget):
        left = spend(works, lambda device: H200)
    return [work for work in works if work.like is None], left


def test_without_a_budget_each_region_has_its_first_candidate() -> None:
    works = generated(network(), tune_budget=0)
    assert len(works) == 2
    assert [len(work.candidates) for work in works] == [1, 1]
    assert all(work.beyond_budget and len(work.offered) == 1 for work in works)


def test_a_small_graph_is_within_the_budget_of_every_effort() -> None:
    by_effort = {effort: generated(network(), tune=effort) for effort in ("off", "fast", "max")}
    counts = {effort: sum(len(work.candidates) for work in works) for effort, works in by_effort.items()}
    assert 2 == counts["off"] < counts["fast"] <= counts["max"]
    assert not any(work.beyond_budget for works in by_effort.values() for work in works)
    assert counts["fast"] == sum(len(work.candidates) for work in generated(network(), tune_budget=inf))


def test_it_is_spent_where_operators_take_most_time() -> None:
    (hot, cold), left = spent(inf)
    assert not hot.beyond_budget
    assert not cold.beyond_budget
    assert left == inf
    with override(jobs=8):
        one = build_seconds(hot, AnchorSource.GENERATED, current())
    (hot, cold), left = spent(1.5 * one)
    assert left == pytest.approx(0.5 * one)
    every = {spec.name for spec in space.search_space(cold.graph, H200, "fast")[1:]}
    assert {*cold.beyond_budget} == every
    assert not every <= {*hot.beyond_budget}


def test_fewer_compilers_make_a_candidate_dearer() -> None:
    (hot, _), _ = spent(inf)
    with override(jobs=1) as one, override(jobs=16) as many:
        seconds = [build_seconds(hot, AnchorSource.GENERATED, config) for config in (one, many)]
    assert seconds[0] > 4 * seconds[1] > 0


def test_a_record_that_left_candidates_out_serves_until_the_budget_pays_for_them() -> None:
    def keep(works: Sequence[Work]) -> None:
        for work in works:
            work.choice = Choice(work.candidates[0].name)
            recorded.keep(work)

    few = generated(network(), tune_budget=0)
    keep(few)
    again = generated(network(), tune_budget=0)
    assert all(work.candidates[0].generated.recalled is not None for work in again)
    assert [work.beyond_budget for work in again] == [work.beyond_budget for work in few]
    every = generated(network(), tune_budget=inf)
    assert all(len(work.candidates) > 1 and work.candidates[0].generated.recalled is None for work in every)
    keep(every)
    again = generated(network(), tune_budget=0)  # what is known costs nothing
    assert all(work.candidates[0].generated.recalled is not None for work in again)
    assert not any(work.beyond_budget for work in again)


def test_what_the_models_expect_to_be_much_slower_is_not_built() -> None:
    """A convolution of single positions is bound by memory, which products of scaled halves pass over several times."""
    graph = traced(
        lambda x, weight: F.conv2d(x, weight).relu(), (64, 256, 56, 56), (64, 256, 1, 1), dtype=torch.float32
    )
    (work,) = generated(graph)
    assert work.ruled_out["scaled halves anchor"] > RULED_OUT
    names = [each.name for each in work.candidates]
    assert "scaled halves anchor" not in names
    assert len(names) > 1
    assert {*work.ruled_out} < {*work.offered}
    (work,) = generated(graph, tune="max")
    assert not work.ruled_out
    assert {*names, "scaled halves anchor"} <= {each.name for each in work.candidates}


def test_schedules_are_tried_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[ScheduleOverrides] = []
    monkeypatch.setattr(generation, "add_schedule", lambda work, overrides: added.append(overrides))
    monkeypatch.setattr(
        schedules, "_schedule_candidates", lambda work, effort: [ScheduleCandidate(ScheduleOverrides(0, 1), -1.0)]
    )
    with FakeTensorMode():
        graph = make_fx(lambda x: torch.softmax(x, -1) * 2)(torch.empty(4096, 4096, device="cuda"))
    for budget, count in ((0.0, 0), (inf, 1)):
        added.clear()
        generated(graph, tune_budget=budget)
        assert len(added) == count


def test_the_report_tells_what_was_not_built_and_how_to_have_it() -> None:
    region = RegionReport(
        "conv",
        "anchor",
        (),
        (),
        2,
        1,
        None,
        "cuda:0",
        "",
        ruled_out=(("scaled halves anchor", 2.5),),
        beyond_budget=("channels last",),
    )
    report = Report("Net", "cuda:0", CaptureRoute.TRACED, regions=(region, replace(region, ruled_out=())))
    text = " ".join(str(report).split())
    assert (
        'not built: "scaled halves anchor" (predicted to take 2.5x as long), "channels last" (beyond tune_budget)'
        in text
    )
    assert (
        'candidates not built: 1 predicted to be much slower (tune="max" builds these), 2 beyond tune_budget (a larger one builds these)'
        in text
    )
    assert Report.from_json(report.to_json()) == report
