"""Made-up inputs, and the rounds in which calls are timed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fusepass import measure
from tests.support.fake_time import FakeTime

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "like",
    [
        torch.rand(3, 4).t(),
        torch.rand(4).expand(3, 4),
        torch.rand(2, 3, 5, 5).to(memory_format=torch.channels_last)[:, 1:, ::2],
        torch.rand(9).unfold(0, 3, 1),
        torch.tensor(1.5),
        torch.rand(300, 300),
        torch.rand(8).half(),
        torch.arange(5, dtype=torch.int8),
    ],
)
def test_made_up_tensors_look_like_the_real_ones(like: Tensor) -> None:
    (made,) = measure.made_up([like], CPU)
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    low, high = (0.25, 1.25) if like.dtype.is_floating_point else (1, 8)
    assert low <= made.min() <= made.max() <= high
    assert made.data_ptr() != like.data_ptr()


def test_made_up_truth_values_are_mixed_and_tensors_differ() -> None:
    flags, first_one, second = measure.made_up(
        [torch.ones(100, dtype=torch.bool), torch.rand(8), torch.rand(8)], torch.device("cpu")
    )
    assert 20 < flags.sum() < 80
    assert not torch.equal(first_one, second)
    assert torch.equal(first_one, measure.made_up([flags, second], CPU)[1])


def test_signed_numbers_are_of_both_signs_and_no_smaller() -> None:
    (made,) = measure.made_up([torch.empty(1000)], CPU, signed=True)
    assert 400 < (made < 0).sum() < 600
    assert 0.25 <= made.abs().min() <= made.abs().max() <= 1.25
    (whole,) = measure.made_up([torch.empty(8, dtype=torch.int64)], CPU, signed=True)
    assert whole.min() >= 1


@pytest.mark.parametrize("rows", [64, 1 << 12, 1 << 16])
def test_rows_of_large_tensors_differ(rows: int) -> None:
    """Numbers repeat, but never at the distance of a power of two, where a wrong stride would look."""
    (made,) = measure.made_up([torch.empty(4, rows)], CPU)
    assert len({tuple(row[:8].tolist()) for row in made}) == 4


def test_the_typical_time_is_the_lower_quartile() -> None:
    assert measure.typical([5.0]) == 5.0
    assert measure.typical([9.0, 1.0, 3.0]) == 1.0
    assert measure.typical([9.0, 1.0, 3.0, 2.0, 8.0]) == 2.0


def test_rounds_are_interleaved_and_bounded() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    clock = FakeTime().clock
    assert [len(s) for s in measure.in_turn(calls, clock, 0.0, least=3, most=9).samples.values()] == [3, 3]
    assert len(measure.in_turn(calls, clock, 60.0, least=3, most=9).samples["a"]) == 9
    rounds = [tuple(order[start : start + 2]) for start in range(0, len(order), 2)]
    assert len(rounds) == 12
    assert {*rounds} == {("a", "b"), ("b", "a")}


def test_a_device_is_held_up_until_the_host_has_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a call's second run on, for somewhat longer than its quickest launch took, and not where launches are to count. Where they took no
    longer than that, nothing has interrupted them."""
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda other: 1.0)
    held: list[int] = []
    for name, value in (
        ("Event", lambda enable_timing: event),
        ("_sleep", held.append),
        ("get_device_properties", lambda device: SimpleNamespace(L2_cache_size=0)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: real_empty(*size, **options))
    now = iter([0.0, 3e-4, 1.0, 1.0 + 1e-4, 2.0, 2.0 + 2e-4, 3.0, 3.5] * 2)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(now))
    switches = itertools.count()
    monkeypatch.setattr(measure, "_switches", lambda: next(switches))
    clock = measure.clock(torch.device("cuda"), launches=False)
    interruptions = []
    for _ in range(4):
        assert clock(event.record) == 1e-3
        interruptions.append(clock.interruptions)
    assert held == [pytest.approx(1.5 * seconds * 2e9, abs=1) for seconds in (3e-4, 1e-4, 1e-4)]
    assert interruptions == [1, 1, 2, 3]
    launched = measure.clock(torch.device("cuda"))
    for _ in range(4):
        launched(event.record)
    assert len(held) == 3
    assert launched.interruptions == 4


def test_what_interrupts_often_and_takes_nothing_is_no_disturbance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_THREADS", tmp_path)
    files = [tmp_path / name / "schedstat" for name in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text("9000000000 1000000000 7\n")
    clock = measure._WallClock()
    watch = measure.Watch(clock)
    clock.interruptions += 500
    files[0].write_text("9900000000 1020000000 300\n")
    assert not watch.disturbed(1.0)
    assert watch.disturbed(0.3)


@pytest.mark.parametrize("told", [True, False])
def test_a_busy_processor_counts_as_an_interruption(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that never sleep, more than there are processors, have to leave them to each other, whether or not the kernel tells for how long."""
    clock = measure._WallClock()
    if not told:
        monkeypatch.setattr(measure, "_THREADS", tmp_path)
    processors = len(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * processors)]
    try:
        watch = measure.Watch(clock)
        assert watch.disturbed(clock(lambda: sum(range(20_000_000))))
    finally:
        for process in spinning:
            process.kill()
            process.wait()
