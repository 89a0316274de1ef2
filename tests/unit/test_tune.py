"""The measured choice: what is timed and what is not, what is chosen, kept on disk, and said."""

from __future__ import annotations

import contextlib
import json
import random
import warnings
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
from fusepass.autotune import candidates, trial, tune
from fusepass.autotune.work import Work
from fusepass.codegen import build, cache, choices
from fusepass.errors import BuildError, FusepassWarning
from fusepass.report.choice import EAGER, GENERATED, Choice
from fusepass.report.report import RegionReport, RegionState, Report
from fusepass.runtime.call_text import CallText
from fusepass.runtime.region import FusedRegion
from tests.support.calls import replace_calls
from tests.support.fake_time import FakeTime, Told


class Net(nn.Module):
    """One region of two operators."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "cache"))
    with torch.no_grad():
        yield


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    monkeypatch.setattr(measure, "clock", lambda device, launches=True: made.clock)
    return made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, fake_time: FakeTime) -> Callable[[str], None]:
    """Makes a candidate, "eager" or "generated", take 2 ms more in each run that is measured."""

    def delay(who: str) -> None:
        original = trial._bound

        def bound(call: Callable[..., Any], inputs: Any) -> Callable[[], object]:
            # The eager candidate is a closure of `Work.original`; the other is a launcher.
            run, eager = original(call, inputs), call.__qualname__.startswith("Work.original")
            return (lambda: (fake_time.spend(0.002), run())) if eager == (who == EAGER) else run

        monkeypatch.setattr(trial, "_bound", bound)

    return delay


def first(report: Report) -> RegionReport:
    (region,) = report.regions
    return region


def choice_of(model: nn.Module, *inputs: Tensor, effort: str = "fast") -> Choice:
    optimised = fusepass.optimize(model, tune=effort)
    torch.testing.assert_close(optimised(*inputs), model(*inputs))
    choice = first(optimised.report()).choice
    assert choice is not None
    return choice


def test_nothing_is_measured_when_it_is_off() -> None:
    optimised = fusepass.optimize(Net(), tune="off")
    optimised(torch.rand(8))
    assert first(optimised.report()).choice is None
    assert choices.entries() == []


def test_an_effort_must_be_one_that_there_is() -> None:
    with pytest.raises(ValueError, match="tune is 'slow'; allowed is one of off, fast, max"):
        fusepass.optimize(Net(), tune="slow")


@pytest.mark.parametrize("effort", ["fast", "max"])
@pytest.mark.invariant(26)
def test_slower_generated_code_gives_way_to_the_operators(slow: Callable[[str], None], effort: str) -> None:
    slow(GENERATED)
    model, x = Net(), torch.rand(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusepassWarning)  # it is no fallback
        optimised = fusepass.optimize(model, tune=effort)
        assert torch.equal(optimised(x), model(x))
        assert torch.equal(optimised(x), model(x))
    report = optimised.report()
    region = first(report)
    assert region.state is RegionState.EAGER
    assert region.choice is not None
    assert region.choice.chosen == EAGER
    assert 0 < region.choice.speedup < 0.98
    assert [name for name, _ in region.choice.seconds] == [EAGER, GENERATED]
    assert dict(region.choice.seconds)[GENERATED] > 0.002
    assert (region.bytes_saved, region.reason, report.ops_fused, report.fallbacks) == (0, None, 0, ())
    assert 'left to eager: chosen "eager": generated code runs at 0.0' in " ".join(str(report).split())


def test_the_operators_stay_in_the_graph_where_another_region_is_fused(
    slow: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One region is left to eager, the other is not; the graph has the operators of the one and a call of the other."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(x) * 2, torch.softmax(torch.special.bessel_j0(x), -1) + 1

    slow(GENERATED)
    real = tune.obstacle
    monkeypatch.setattr(
        tune, "obstacle", lambda work, effort: "of this test" if "softmax" in work.region.name else real(work, effort)
    )
    model, x = Two(), torch.rand(6, 8)
    optimised = fusepass.optimize(model, tune="fast")
    torch.testing.assert_close(optimised(x), model(x))
    assert [region.state.value for region in optimised.report().regions] == ["eager", "fused"]
    targets = [str(node.target) for node in optimised.graph_module(x).graph.nodes if node.op == "call_function"]
    assert "aten.tanh.default" in targets
    assert sum(target.startswith("fusepass.") for target in targets) == 1
    assert "aten._softmax.default" not in targets


def test_faster_generated_code_is_kept(slow: Callable[[str], None]) -> None:
    slow(EAGER)
    choice = choice_of(Net(), torch.rand(64))
    assert choice.chosen == GENERATED
    assert choice.speedup > 1
    assert choice.reason is None


@pytest.mark.invariant(28)
def test_a_later_process_finds_the_choice(slow: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    slow(GENERATED)
    measured = choice_of(Net(), torch.rand(64))
    (entry,) = choices.entries()
    assert entry.record is not None
    assert entry.record.choice["chosen"] == EAGER
    monkeypatch.setattr(tune, "_measured", lambda *_: pytest.fail("it is on disk"))
    again = choice_of(Net(), torch.rand(64))
    assert again.recorded
    assert (again.chosen, again.seconds, again.speedup) == (measured.chosen, measured.seconds, measured.speedup)
    assert "measured earlier" in str(again)


def test_what_a_busy_machine_says_counts_for_this_process_only(
    slow: Callable[[str], None], fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "0.02x eager" was kept for good where other work held the processors of its threads."""
    clock = fake_time.clock
    busy = Told(lambda call: (setattr(busy, "interruptions", busy.interruptions + 1), clock(call))[1])
    slow(GENERATED)
    monkeypatch.setattr(measure, "clock", lambda device, launches=True: busy)
    choice = choice_of(Net(), torch.rand(64))
    assert (choice.chosen, choice.disturbed, choices.entries()) == (EAGER, True, [])
    monkeypatch.setattr(measure, "clock", lambda device, launches=True: clock)
    assert not choice_of(Net(), torch.rand(64)).disturbed
    assert len(choices.entries()) == 1


def test_more_effort_measures_anew_and_less_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def measured(*arguments: Any) -> Choice:
        seen.append(arguments[-1])
        return Choice(GENERATED, ((EAGER, 2.0), (GENERATED, 1.0)), 2.0)

    monkeypatch.setattr(tune, "_measured", measured)
    for effort in ("fast", "max", "max", "fast"):
        choice_of(Net(), torch.rand(64), effort=effort)
    assert seen == ["fast", "max"]
    assert [entry.record and entry.record.effort for entry in choices.entries()] == ["max"]


def test_other_shapes_are_measured_by_themselves() -> None:
    for size in (8, 9):
        choice_of(Net(), torch.rand(size))
    assert len(choices.entries()) == 2


@pytest.mark.invariant(28)
def test_a_damaged_record_is_measured_anew() -> None:
    choice_of(Net(), torch.rand(64))
    (entry,) = choices.entries()
    data = json.loads(entry.path.read_text())
    data["record"]["choice"]["chosen"] = EAGER if data["record"]["choice"]["chosen"] != EAGER else GENERATED
    entry.path.write_text(json.dumps(data))
    assert [damaged.key for damaged in choices.verify()] == [entry.key]
    assert not choice_of(Net(), torch.rand(64)).recorded
    assert choices.verify() == []


@pytest.mark.parametrize("spoil", [{"choice": {}}, {"offered": []}, {"sources": {}}])
def test_a_record_that_does_not_fit_is_measured_anew(spoil: dict[str, Any]) -> None:
    """One without a choice, of fewer candidates than there are, or of a program that is another one meanwhile."""
    choice_of(Net(), torch.rand(64))
    (entry,) = choices.entries()
    assert entry.record is not None
    choices.store(entry.key, replace(entry.record, **spoil))
    assert not choice_of(Net(), torch.rand(64)).recorded


def test_a_disk_that_cannot_be_written_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    choices.store("ab", choices.Record("region", "CPU", "fast", "", {}))
    assert choices.entries() == []


def test_a_locked_key_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_LOCK_SECONDS", 0.01)
    with choices.locked("ab"), choices.locked("ab"):
        choices.store("ab", choices.Record("region", "CPU", "fast", "", {}))
    assert choices.lookup("ab") is not None


@pytest.mark.invariant(27)
def test_measuring_leaves_everything_as_it_is() -> None:
    """Random generators, parameters, running statistics and inputs; and a call under autograd's mode goes on in it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU())
    x = torch.rand(4, 8)
    before = [tensor.clone() for tensor in (x, *model.parameters(), *model.buffers())]
    state = torch.get_rng_state()
    fusepass.optimize(model, x, tune="max")
    assert torch.equal(state, torch.get_rng_state())
    after = (x, *model.parameters(), *model.buffers())
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert not torch.is_grad_enabled()
    with torch.enable_grad():
        fusepass.optimize(model, x, tune="max")
        assert torch.is_grad_enabled()


def test_deterministic_algorithms_are_not_left_to_chance() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        choice = choice_of(Net(), torch.rand(64))
    finally:
        torch.use_deterministic_algorithms(False)
    assert choice.chosen == GENERATED
    assert "deterministic algorithms" in str(choice.reason)


class Wholes(nn.Module):
    """Whole numbers as divisors."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.remainder(x, x + 1) + 1) * 2


class Halves(nn.Module):
    """Whole numbers divided by a number: where a pool found its largest, say."""

    def forward(self, x: Tensor) -> Tensor:
        return (x // 2 + torch.remainder(x, 3) + torch.fmod(x, 4)) * 2


class Sums(nn.Module):
    """Whole numbers as numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1) * 2


def test_whole_numbers_that_must_be_particular_ones_are_not_made_up() -> None:
    choice = choice_of(Wholes(), torch.arange(1, 9))
    assert choice.reason == "remainder needs particular whole numbers"
    assert choice_of(Sums(), torch.arange(1, 9)).reason is None
    assert choice_of(Halves(), torch.arange(1, 9)).reason is None


@pytest.mark.parametrize(("rows", "reason"), [(9, None), (8, "embedding needs particular whole numbers")])
def test_indices_that_are_made_up_lie_within_what_they_look_up(rows: int, reason: str | None) -> None:
    model = nn.Sequential(nn.Embedding(rows, 16), nn.LayerNorm(16), nn.GELU())
    assert choice_of(model, torch.tensor([[0, 7], [3, 1]])).reason == reason


class Biased(nn.Module):
    """A table of numbers for pairs of places, as windows of attention have."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(rows, 9))

    def forward(self, x: Tensor, place: Tensor, column: Tensor) -> Tensor:
        return (x + self.table[place, column]).softmax(-1)


@pytest.mark.parametrize(("rows", "reason"), [(9, None), (8, "index needs particular whole numbers")])
def test_several_indices_that_are_made_up_lie_within_what_they_look_up(rows: int, reason: str | None) -> None:
    place = torch.arange(8).repeat(4)
    assert choice_of(Biased(rows), torch.rand(4, 32), place, place).reason == reason


@pytest.mark.parametrize("effort", ["fast", "max"])
def test_what_moves_much_less_is_measured_all_the_same(effort: str) -> None:
    """The cost model knows what is moved, and little of what it costs to compute it."""

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x + 1) * 2).tanh().abs().neg()

    choice = choice_of(Chain(), torch.rand(4096), effort=effort)
    assert choice.reason is None
    assert EAGER in dict(choice.seconds)


@pytest.mark.parametrize(
    ("free", "bandwidth_share", "reason"),
    [(1, 1.0, "too much of the memory"), (1 << 40, 1e-12, "one run takes more than 0.5 s")],
)
def test_what_is_too_large_is_not_measured(
    free: int, bandwidth_share: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "free_bytes", lambda device: free)
    monkeypatch.setattr("fusepass.codegen.device._CPU_CORE_BANDWIDTH", 1e10 * bandwidth_share)
    choice = choice_of(Net(), torch.rand(64))
    assert choice.chosen == GENERATED
    assert reason in str(choice.reason)


def test_what_is_undecided_keeps_the_first_and_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each round says something else; the next specialisation tries again."""
    times = random.Random(0)
    monkeypatch.setattr(
        measure, "clock", lambda device, launches=True: Told(lambda call: (call(), times.choice((1e-3, 3e-3)))[1])
    )
    choice = choice_of(Net(), torch.rand(64))
    assert choice.chosen == GENERATED
    assert choice.reason is not None
    assert "rounds overlap" in choice.reason
    assert "undecided" in str(choice)
    assert choices.entries() == []


SCOPE = {"__name__": "fusepass.generated", "torch": torch}


def launches(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Let every generated call run `body` instead, which knows the region's operators as `eager`."""

    def other(region: FusedRegion, _: CallText) -> tuple[str, dict[str, Any]]:
        return f"def run(*inputs): {body}\n", {**SCOPE, "eager": region.original}

    replace_calls(monkeypatch, other)


@pytest.mark.parametrize(
    "body",
    [
        "return eager(*inputs).roll(1)",
        "return eager(*inputs) * 1.001",
        "return torch.empty_like(eager(*inputs))",  # in memory that held the right values
        "return eager(*inputs).index_fill_(0, torch.tensor([9]), float('inf'))",
        "return eager(*inputs)[:-1]",
    ],
)
@pytest.mark.invariant(26)
def test_generated_code_with_other_results_gives_way_with_a_warning(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches(monkeypatch, body)
    model, x = Net(), torch.rand(64)
    optimised = fusepass.optimize(model, tune="fast")
    with pytest.warns(FusepassWarning, match="generated code is not used: its results are not those of the operators"):
        result = optimised(x)
    assert torch.equal(result, model(x))
    report = optimised.report()
    assert first(report).state is RegionState.FALLBACK
    assert [entry.where for entry in report.fallbacks] == [first(report).name]
    (entry,) = choices.entries()
    assert entry.record is not None
    ((name, reason),) = entry.record.choice["dropped"]
    assert name == GENERATED
    assert "not those of the operators" in reason
    monkeypatch.setattr(tune, "_measured", lambda *_: pytest.fail("it is on disk"))
    again = fusepass.optimize(model, tune="fast")
    with pytest.warns(FusepassWarning, match="generated code is not used"):  # as long as it is so, whoever asks is told
        again(x)
    assert first(again.report()).state is RegionState.FALLBACK


class Convolved(nn.Module):
    """A region with two candidates on a CPU, where everything is tried: two memory formats."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu() * 2


@pytest.fixture
def formats(
    monkeypatch: pytest.MonkeyPatch, slow: Callable[[str], None], fake_time: FakeTime
) -> Callable[[dict[str, str]], None]:
    """Runs, instead of the calls of candidates, a body by the candidate's name; what is measured of eager is slow."""

    def replaced(bodies: dict[str, str]) -> None:
        def other(region: FusedRegion, text: CallText) -> tuple[str, dict[str, Any]]:
            body = bodies.get("channels last" if region.conversions else GENERATED)
            if body is None or "channels_last" in region.generated.program.name:
                return text.source, text.scope
            return f"def run(*inputs): {body}\n", {**SCOPE, "spend": fake_time.spend, "eager": region.original}

        replace_calls(monkeypatch, other)

    slow(EAGER)
    return replaced


SLOW = "return (spend(0.001), eager(*inputs))[1]"
QUICK = "return eager(*inputs)"
SHIFTED = "return eager(*inputs).roll(1)"


@pytest.mark.parametrize(
    ("own", "other", "chosen"),
    [(SLOW, QUICK, "channels last"), (QUICK, SLOW, GENERATED), (SHIFTED, QUICK, "channels last")],
)
def test_the_better_candidate_serves(
    own: str, other: str, chosen: str, formats: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a later process builds that one alone."""
    formats({GENERATED: own, "channels last": other})
    model, x = Convolved().eval(), torch.rand(2, 4, 9, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        optimised = fusepass.optimize(model, tune="max", disable="packed-weights")
        torch.testing.assert_close(optimised(x), model(x))
    region = first(optimised.report())
    assert region.choice is not None
    assert (region.choice.chosen, region.state) == (chosen, RegionState.FUSED)
    assert (region.anchor or "").endswith("channels last") is (chosen == "channels last")
    assert len(region.sources) == (2 if chosen == "channels last" else 1)
    assert {"eager", chosen} <= {name for name, _ in region.choice.seconds}
    built: list[list[Any]] = []
    real = build.build_each
    monkeypatch.setattr(build, "build_each", lambda sources: (built.append(sources), real(sources))[1])
    monkeypatch.setattr(tune, "_measured", lambda *_: pytest.fail("it is on disk"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        again = fusepass.optimize(model, tune="max", disable="packed-weights")
        torch.testing.assert_close(again(x), model(x))
    assert first(again.report()).choice == replace(region.choice, recorded=True)
    assert [len(sources) for sources in built] == [2 if chosen == "channels last" else 1]


def test_less_effort_uses_what_more_effort_found(formats: Callable[[dict[str, str]], None]) -> None:
    formats({GENERATED: SLOW, "channels last": QUICK})
    model, x = Convolved().eval(), torch.rand(2, 4, 9, 9)
    for effort, chosen in (("fast", GENERATED), ("max", "channels last"), ("fast", "channels last")):
        optimised = fusepass.optimize(model, x, tune=effort)
        choice = first(optimised.report()).choice
        assert choice is not None
        assert choice.chosen == chosen


def test_a_candidate_that_is_dropped_is_told_and_another_one_serves(
    formats: Callable[[dict[str, str]], None],
) -> None:
    formats({GENERATED: QUICK, "channels last": SHIFTED})
    model, x = Convolved().eval(), torch.rand(2, 4, 9, 9)
    optimised = fusepass.optimize(model, tune="max", disable="channels-last")
    with pytest.warns(FusepassWarning, match='candidate "channels last" runs as "generated": its results are not'):
        torch.testing.assert_close(optimised(x), model(x))
    report = optimised.report()
    choice = first(report).choice
    assert choice is not None
    assert choice.chosen == GENERATED
    assert [name for name, _ in choice.dropped] == ["channels last"]
    assert [name for name, _ in choice.seconds] == [EAGER, GENERATED]
    (entry,) = report.fallbacks
    assert entry.where.endswith('candidate "channels last"')
    assert first(report).state is RegionState.FUSED
    (kept,) = choices.entries()
    assert kept.record is not None
    again = fusepass.optimize(model, tune="max", disable="channels-last")
    with pytest.warns(FusepassWarning, match='candidate "channels last" runs as "generated"'):
        again(x)
    assert first(again.report()).choice == replace(choice, recorded=True)
    other = dict(kept.record.sources) | {"channels last": "of a program that has been mended"}
    choices.store(kept.key, replace(kept.record, sources=other))
    with pytest.warns(FusepassWarning, match='candidate "channels last" runs as "generated"'):
        measured = fusepass.optimize(model, x, tune="max")
    assert first(measured.report()).choice == choice
    assert Report.from_json(report.to_json()) == report
    assert '"channels last" is not used: its results' in " ".join(str(report).split())


def test_a_candidate_that_cannot_be_built_is_told_and_another_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    real = build.build_each

    def failing(sources: Any) -> Any:
        for number, each in real(sources):
            yield number, BuildError("no such instruction") if number == 0 else each

    monkeypatch.setattr(build, "build_each", failing)
    model, x = Convolved().eval(), torch.rand(2, 4, 9, 9)
    optimised = fusepass.optimize(model, tune="max")
    with pytest.warns(FusepassWarning, match='candidate "generated" runs as ".*": build failed: no such instruction'):
        torch.testing.assert_close(optimised(x), model(x))
    choice = first(optimised.report()).choice
    assert choice is not None
    assert choice.chosen in (EAGER, "channels last")


def test_a_candidate_that_cannot_be_generated_is_told_and_another_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    real = candidates.candidate_of

    def failing(work: Work, spec: Any, *rest: Any) -> Any:
        if spec.name == "channels last":
            raise ZeroDivisionError("a bug of ours")
        return real(work, spec, *rest)

    monkeypatch.setattr(candidates, "candidate_of", failing)
    model, x = Convolved().eval(), torch.rand(2, 4, 9, 9)
    optimised = fusepass.optimize(model, tune="max")
    with pytest.warns(
        FusepassWarning, match='candidate "channels last" runs as ".*": internal error: ZeroDivisionError'
    ):
        torch.testing.assert_close(optimised(x), model(x))
    assert first(optimised.report()).choice is not None
    cache.clear()
    with fusepass.override(debug=True), pytest.raises(ZeroDivisionError):
        fusepass.optimize(model, tune="max")(x)


def test_what_another_process_found_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    choice_of(Net(), torch.rand(64))
    (entry,) = choices.entries()
    assert entry.record is not None
    real = choices.locked

    @contextlib.contextmanager
    def locked(key: str) -> Iterator[None]:
        choices.store(key, entry.record)
        with real(key):
            yield

    cache.clear()
    monkeypatch.setattr(choices, "locked", locked)
    monkeypatch.setattr(tune, "_measured", lambda *_: pytest.fail("another process did"))
    assert choice_of(Net(), torch.rand(64)).recorded


def test_too_little_memory_is_not_held_against_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    launches(monkeypatch, "raise torch.OutOfMemoryError('full')")
    optimised = fusepass.optimize(Net(), torch.rand(64), tune="fast")
    choice = first(optimised.report()).choice
    assert choice is not None
    assert (choice.chosen, choice.dropped) == (GENERATED, ())
    assert choice.reason == "trying it failed with OutOfMemoryError: full"
    assert choices.entries() == []


def test_what_the_cost_model_is_sure_of_is_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x + 1) * 2).tanh().abs().neg()

    launches(monkeypatch, "return -eager(*inputs)")
    optimised = fusepass.optimize(Chain(), tune="fast")
    with pytest.warns(FusepassWarning, match="not those of the operators"):
        optimised(torch.rand(4096))


def test_what_was_compared_is_told() -> None:
    choice = choice_of(Net(), torch.rand(64))
    assert choice.check is not None
    assert choice.check.startswith("results agree: relative distance")
    assert choice.check in str(choice)


def test_generated_code_that_fails_gives_way_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_calls(monkeypatch, lambda *_: ("def run(*inputs): raise RuntimeError('no such kernel')\n", {}))
    model, x = Net(), torch.rand(8)
    optimised = fusepass.optimize(model, tune="fast")
    with pytest.warns(FusepassWarning, match="its first run failed: no such kernel"):
        result = optimised(x)
    assert torch.equal(result, model(x))
    assert first(optimised.report()).state is RegionState.FALLBACK


def test_an_operator_that_fails_for_made_up_numbers_leaves_generated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Tensor) -> Tensor:
        raise ValueError("not for such numbers")

    monkeypatch.setattr(Work, "original", lambda self: fails)
    with fusepass.override(debug=True):  # it is no bug of ours
        choice = choice_of(Net(), torch.rand(8))
    assert (choice.chosen, choice.reason) == (GENERATED, "trying it failed with ValueError: not for such numbers")


class Entropy(nn.Module):
    """On a GPU the operator asserts what it is given, and what fails there ends the process's use of the device."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy(x, y, reduction="none") * 2 + 1


def test_probabilities_are_not_made_up() -> None:
    x = torch.rand(3, 5)
    assert choice_of(Entropy(), x, x).reason == "binary_cross_entropy needs numbers between 0 and 1"
