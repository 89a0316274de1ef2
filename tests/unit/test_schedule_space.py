"""Schedules that are timed beside the rules' one: which are offered, when one of them serves, and that the choice stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
import fusepass.runtime.region
from fusepass import measure
from fusepass.autotune import schedules, tune
from fusepass.codegen import build
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule.overrides import NO_OVERRIDES, ScheduleOverrides
from fusepass.codegen.search import schedules as rule
from fusepass.codegen.search.schedules import schedule_candidates
from fusepass.report.choice import GENERATED
from fusepass.report.report import RegionReport, Report
from fusepass.runtime.call_text import CallText
from fusepass.runtime.region import FusedRegion
from tests.support import kernels as k
from tests.support.calls import replace_calls
from tests.support.fake_time import FakeTime, Told
from tests.support.regions import region

H200 = DeviceFacts.h200()
FIRST = "schedule 1 of kernel 0"


def test_fast_offers_what_may_be_as_fast_and_max_everything() -> None:
    program = k.softmax_channels(64, 64, 1 << 14)
    fast, most = schedule_candidates(program, H200, "fast"), schedule_candidates(program, H200, "max")
    assert 0 < len(fast) < len(most)
    schedules = [each for each in most if each.overrides.rank]
    assert list(fast) == schedules[: len(fast)]
    assert all(each.seconds < 0.1e-3 for each in fast)
    assert {each.overrides for each in most} >= {ScheduleOverrides(teams=False), ScheduleOverrides(pieces=2.0)}
    apart = ScheduleOverrides(over_rows=False)
    assert apart not in {each.overrides for each in most}
    both = k.norm_and_columns(3, 50, 768, 2)
    assert apart in {each.overrides for each in schedule_candidates(both, H200, "max")}
    assert schedule_candidates(program, H200, "max") == most


def test_small_kernels_have_no_contenders() -> None:
    assert not schedule_candidates(k.softmax_channels(4, 64, 64), H200, "fast")
    assert schedule_candidates(k.softmax_channels(4, 64, 64), H200, "max")


def test_a_kernel_that_takes_little_of_the_time_has_none() -> None:
    program = region(lambda x: x.relu().sum(), torch.empty(1 << 26, device="meta")).passed(pass_options(H200))
    numbers = {each.overrides.kernel for each in schedule_candidates(program, H200, "max") if each.overrides.rank}
    assert len(program.kernels) == 2
    assert numbers == {0}


def test_an_arrangement_is_told_in_names_and_sources() -> None:
    program, other = k.layer_norm(1 << 14, 8192), ScheduleOverrides(0, 1)
    kernel = program.kernels[0]
    assert not NO_OVERRIDES.words
    assert not NO_OVERRIDES.suffix
    assert other.words == (FIRST,)
    assert ScheduleOverrides(teams=False, pieces=0.5).suffix == "_no_teams_pieces0_5"
    assert ScheduleOverrides(over_rows=False).suffix == "_apart"
    assert render(program, H200, overrides=other).name == f"{program.name}_k0s1"
    assert describe(program, kernel, H200, overrides=other) in render(program, H200, overrides=other).text
    assert describe(program, kernel, H200, overrides=other) != describe(program, kernel, H200)


def test_a_rank_that_a_kernel_does_not_have_is_the_rules_one() -> None:
    program = k.layer_norm(1 << 14, 8192)
    assert render(program, H200, overrides=ScheduleOverrides(0, 999)).text == render(program, H200).text
    assert render(program, H200, overrides=ScheduleOverrides(7, 1)).text == render(program, H200).text


class Softmax(nn.Module):
    """A region of one kernel, whose rows a CPU may take in several ways."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, 1).tanh()


@pytest.fixture
def spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, float]]:
    """Seconds of a schedule by its rank, and of the operators by -1; and no kernel is too small to be tried."""
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(rule, "_LEAST_SECONDS", dict.fromkeys(rule._LEAST_SECONDS, 0.0))
    monkeypatch.setattr(schedules, "_MOST", {"fast": 2, "max": 4})
    fake, seconds = FakeTime(), {-1: 1e-2}
    monkeypatch.setattr(measure, "clock", lambda device, launches=True: Told(clock))

    def clock(call: Callable[[], object]) -> float:
        fake.spent = seconds[-1]
        call()
        return fake.spent

    def timed(region: FusedRegion, text: CallText) -> tuple[str, dict[str, Any]]:
        rank = region.generated.overrides.rank
        return f"{text.source}\nreal = run\ndef run(*inputs): took(); return real(*inputs)\n", {
            **text.scope,
            "took": lambda: setattr(fake, "spent", seconds.get(rank, 1e-4)),
        }

    replace_calls(monkeypatch, timed)
    with torch.no_grad(), fusepass.override(jobs=8):
        yield seconds


def first(report: Report) -> RegionReport:
    (found,) = report.regions
    return found


X = torch.rand(2, 100, 16, 16)


@pytest.mark.invariant(28)
def test_a_schedule_that_is_faster_serves_from_then_on(
    spent: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a later process builds it alone."""
    spent[1] = 0.5e-4
    optimised = fusepass.optimize(Softmax(), X, tune="max")
    fused = first(optimised.report())
    assert fused.choice is not None
    assert fused.choice.chosen == FIRST
    assert fused.choice.reason is None
    assert {"eager", GENERATED, FIRST} <= {name for name, _ in fused.choice.seconds}
    assert FIRST in str(fused.choice)
    torch.testing.assert_close(optimised(X), Softmax()(X))
    built: list[Any] = []
    real = build.build_each
    monkeypatch.setattr(build, "build_each", lambda sources: (built.extend(sources), real(sources))[1])
    monkeypatch.setattr(tune, "_measured", lambda *_: pytest.fail("it is on disk"))
    for effort in ("max", "fast"):
        again = fusepass.optimize(Softmax(), X, tune=effort)
        assert first(again.report()).choice == replace(fused.choice, recorded=True)
        assert first(again.report()).kernels == fused.kernels
    assert {source.name for source in built} == {f"{fused.name}_k0s1"}


@pytest.mark.parametrize("seconds", [0.99e-4, 2e-4])
def test_a_schedule_that_is_not_clearly_faster_changes_nothing(spent: dict[int, float], seconds: float) -> None:
    spent[1] = seconds
    choice = first(fusepass.optimize(Softmax(), X, tune="max").report()).choice
    assert choice is not None
    assert choice.chosen == GENERATED
    assert dict(choice.seconds)[FIRST] == pytest.approx(seconds)


def test_fast_takes_no_more_than_the_compilers_have_room_for(
    spent: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "_WORTH", 10.0)
    for jobs, count in ((1, 0), (9, 2)):
        with fusepass.override(jobs=jobs):
            choice = first(fusepass.optimize(Softmax(), X[:, :, :jobs], tune="fast").report()).choice
        assert choice is not None
        assert sum(name.startswith("schedule") for name, _ in choice.seconds) == count


def test_nothing_is_added_where_times_decide_nothing(spent: dict[int, float]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        fused = first(fusepass.optimize(Softmax(), X, tune="max").report())
    finally:
        torch.use_deterministic_algorithms(False)
    assert fused.choice is not None
    assert (fused.choice.chosen, fused.choice.seconds) == (GENERATED, ())
