"""Candidates and operators run side by side, by a clock that the tests make: budgets, noise, what is decided."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusepass import measure
from fusepass.autotune import trial
from fusepass.autotune.work import Work
from fusepass.report.choice import EAGER, GENERATED, Choice
from tests.support.fake_time import FakeTime, Told
from tests.support.regions import trace

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    monkeypatch.setattr(measure, "clock", lambda device, launches=True: made.clock)
    return made


def test_an_operator_that_is_slower_than_the_budget_is_run_twice_and_no_more(fake_time: FakeTime) -> None:
    runs = []

    def eager(x: Tensor) -> Tensor:
        runs.append(fake_time.spend(0.006))
        return x

    choice = trial.fastest(eager, {GENERATED: eager}, [torch.rand(2)], CPU, trial.Budget(0.001, 0.005))
    assert len(runs) == 2
    assert choice.reason == "one run takes 0.0061 s"


def test_where_rounds_take_too_long_a_few_runs_leave_out_the_slow(fake_time: FakeTime) -> None:
    runs: list[str] = []

    def spending(name: str, seconds: float) -> Callable[[Tensor], None]:
        def call(x: Tensor) -> None:
            runs.append(name)
            fake_time.spend(seconds)

        return call

    def choice(budget: trial.Budget) -> Choice:
        runs.clear()
        calls = {name: spending(name, seconds) for name, seconds in (("a", 0.04), ("b", 0.006), ("c", 0.007))}
        return trial.fastest(spending(EAGER, 0.04), calls, [torch.rand(2)], CPU, budget)

    few = choice(trial.Budget(0.03, 0.2))
    assert (few.chosen, few.reason, few.speedup > 6) == ("b", None, True)
    assert (runs.count(EAGER), runs.count("a")) == (4, 4)
    assert runs.count("b") == runs.count("c") > 4 + 4
    assert [name for name, _ in few.seconds] == [EAGER, "a", "b", "c"]
    one = choice(trial.Budget(0.03, 0.05))
    assert (one.chosen, one.reason) == ("b", "times of 3 runs each overlap")
    assert len(runs) == 16


def test_one_disturbed_run_does_not_leave_a_candidate_out(fake_time: FakeTime) -> None:
    runs = []

    def generated(x: Tensor) -> None:
        runs.append(fake_time.spend(0.2 if len(runs) == 1 else 0.01))

    choice = trial.fastest(
        lambda x: fake_time.spend(0.05), {GENERATED: generated}, [torch.rand(2)], CPU, trial.BUDGETS["fast"]
    )
    assert (choice.chosen, choice.reason) == (GENERATED, None)


def test_rounds_end_with_the_budget(fake_time: FakeTime) -> None:
    """Times that do not settle, until 30 ms of the device are spent."""
    times, runs = random.Random(0), []

    def eager(x: Tensor) -> None:
        runs.append(fake_time.spend(times.choice((0.0, 2e-3))))

    assert trial.fastest(eager, {GENERATED: eager}, [torch.rand(2)], CPU, trial.BUDGETS["fast"]).reason is not None
    assert 20 < len(runs) < 50


@pytest.mark.parametrize(("share", "disturbed"), [(0, False), (2, False), (1, True)])
def test_interrupted_rounds_are_repeated_and_said_where_none_is_quiet(
    fake_time: FakeTime, share: int, disturbed: bool
) -> None:
    """Generated code takes half the time, but ten times as long where its threads are interrupted, each `share`th run."""
    runs: list[None] = []

    def generated(x: Tensor) -> None:
        runs.append(fake_time.spend(4e-4))
        if share and len(runs) % share == 0:
            fake_time.interrupt()
            fake_time.spend(5e-3)

    eager: Callable[[Tensor], None] = lambda x: fake_time.spend(9e-4)  # noqa: E731
    choice = trial.fastest(eager, {GENERATED: generated}, [torch.rand(2)], CPU, trial.BUDGETS["fast"])
    assert (choice.disturbed, choice.chosen) == (disturbed, EAGER if disturbed else GENERATED)
    assert ("interrupted it, so for this process only" in str(choice)) is disturbed
    assert disturbed or choice.speedup == pytest.approx(2.0)


def test_interruptions_of_long_runs_do_not_matter(fake_time: FakeTime) -> None:
    """A daemon that wakes up 5 times a second takes no percent away."""

    def taking(seconds: float) -> Callable[[Tensor], None]:
        def call(x: Tensor) -> None:
            fake_time.spend(seconds)
            for _ in range(round(seconds * 5)):
                fake_time.interrupt()

        return call

    choice = trial.fastest(taking(0.4), {GENERATED: taking(0.2)}, [torch.rand(2)], CPU, trial.BUDGETS["max"])
    assert (choice.disturbed, choice.chosen) == (False, GENERATED)


def test_what_a_disturbed_run_leaves_out_of_the_rounds_is_said(fake_time: FakeTime) -> None:
    """A few runs each decide who takes part in the rounds, which nothing disturbs then."""

    def generated(x: Tensor) -> None:
        for _ in range(20):
            fake_time.interrupt()
        fake_time.spend(0.5)

    both = {"a": generated, "b": lambda x: fake_time.spend(0.01)}
    choice = trial.fastest(lambda x: fake_time.spend(0.02), both, [torch.rand(2)], CPU, trial.BUDGETS["fast"])
    assert (choice.chosen, choice.disturbed) == ("b", True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that believes what each candidate says of itself; the machine adds noise, more to some rounds than to others."""

    def noisy(amplitude: float) -> None:
        generator = torch.Generator().manual_seed(1)

        def noise() -> float:
            return 1 + amplitude * float(torch.rand((), generator=generator)) ** 4

        monkeypatch.setattr(measure, "clock", lambda device, launches=True: Told(lambda call: call() * noise()))

    return noisy


def timed(eager: float, *generated: float, budget: trial.Budget = trial.BUDGETS["fast"]) -> Choice:
    calls = {str(number): lambda x, seconds=seconds: seconds for number, seconds in enumerate(generated)}
    return trial.fastest(lambda x: eager, calls, [torch.rand(2)], CPU, budget)


def test_the_fastest_of_several_candidates_is_chosen(machine: Callable[[float], None]) -> None:
    machine(0.0)
    choice = timed(2e-3, 3e-3, 1e-3, 1.5e-3)
    assert (choice.chosen, choice.speedup, choice.interval) == ("1", 2.0, (2.0, 2.0))
    assert choice.seconds == ((EAGER, 2e-3), ("0", 3e-3), ("1", 1e-3), ("2", 1.5e-3))
    assert choice.reason is None


@pytest.mark.parametrize(
    ("eager", "generated", "chosen"),
    [
        (1e-3, (1.1e-3,), EAGER),
        (1e-3, (1.01e-3,), "0"),  # within two percent
        (1e-3, (0.5e-3, 0.495e-3), "0"),  # an alternative has to be worth it
        (1e-3, (0.5e-3, 0.45e-3), "1"),
        (1e-3, (1.2e-3, 1.1e-3), EAGER),
    ],
)
@pytest.mark.parametrize("amplitude", [0.0, 0.5, 2.0])
def test_noise_does_not_decide(
    machine: Callable[[float], None], eager: float, generated: tuple[float, ...], chosen: str, amplitude: float
) -> None:
    """What is decided costs next to nothing; under noise it may take all rounds, or stay undecided."""
    machine(amplitude)
    choice = timed(eager, *generated, budget=trial.BUDGETS["max"])
    if amplitude == 0:
        assert (choice.chosen, choice.reason) == (chosen, None)
    if choice.reason is None:
        true = {EAGER: eager} | {str(number): seconds for number, seconds in enumerate(generated)}
        assert true[choice.chosen] <= 1.03 * min(true.values())
    else:
        assert "rounds overlap" in choice.reason


def test_clear_cases_end_early(machine: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(0.1)
    runs: list[int] = []

    def fast(x: Tensor) -> float:
        runs.append(1)
        return 1e-5

    assert trial.fastest(lambda x: 2e-5, {GENERATED: fast}, [torch.rand(2)], CPU, trial.BUDGETS["max"]).reason is None
    assert len(runs) < 10


def work_of(function: Callable[..., Any], *inputs: Tensor) -> Work:
    """A region of all operators of `function`."""
    graph, _ = trace(function, *inputs)
    placeholders = graph.graph.find_nodes(op="placeholder")
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    (results,) = graph.graph.output_node().args
    region = SimpleNamespace(inputs=placeholders, outputs=list(results), nodes=nodes)
    return Work(region, graph, {})


def check(function: Callable[..., Any], like: Tensor, **calls: Callable[..., Any]) -> dict[str, str]:
    with torch.no_grad():
        found = trial.checked(work_of(function, like), calls, memory_share=0.25)
    return {name: outcome.verdict.value for name, outcome in found.items()}


def test_each_candidate_is_judged_by_itself() -> None:
    verdicts = check(
        torch.tanh, torch.empty(64, 9), right=torch.tanh, wrong=torch.sin, shifted=lambda x: x.tanh().roll(9)
    )
    assert verdicts == {"right": "same", "wrong": "different", "shifted": "different"}


def test_memory_with_right_results_makes_nothing_right() -> None:
    """A kernel that writes nothing, or leaves the last element out, finds the results of those that ran before it."""

    def nothing(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def all_but_one(x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        result[:-1] = torch.tanh(x)[:-1]
        return result

    for size in (8, 64, 4096):
        verdicts = check(torch.tanh, torch.empty(size), first=torch.tanh, second=nothing, third=all_but_one)
        assert verdicts == {"first": "same", "second": "different", "third": "different"}


def test_positive_numbers_are_tried_where_others_say_nothing() -> None:
    def root(x: Tensor) -> Tensor:
        if not bool((x > 0).all()):
            raise ValueError("positive numbers only")
        return x.sqrt()

    work = work_of(torch.sqrt, torch.empty(64))
    work.original = lambda: root  # type: ignore[method-assign]
    found = trial.checked(work, {"right": torch.sqrt, "wrong": torch.square}, memory_share=0.25)
    assert [outcome.verdict.value for outcome in found.values()] == ["same", "different"]
    assert check(lambda x: x.log().log1p(), torch.empty(64), right=lambda x: x.log().log1p()) == {"right": "same"}


def test_what_the_operators_raise_is_raised() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("never")

    work = work_of(torch.sqrt, torch.empty(64))
    work.original = lambda: fails  # type: ignore[method-assign]
    with pytest.raises(trial.OperatorsFail, match="ValueError: never"):
        trial.checked(work, {"right": torch.sqrt}, memory_share=0.25)


def test_without_memory_for_float64_only_gross_differences_count(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"inexact": lambda x: torch.tanh(x) * 1.001, "wrong": torch.sin}
    assert check(torch.tanh, torch.empty(64), **calls) == {"inexact": "different", "wrong": "different"}
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1)
    assert check(torch.tanh, torch.empty(64), **calls) == {"inexact": "unclear", "wrong": "different"}
