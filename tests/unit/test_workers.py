"""Regions that other processes generate: the same code as here, and nothing that those processes do, or fail to do, disturbs the program."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from examples.small_products import SmallProducts
from fusepass.autotune import generation, schedules
from fusepass.autotune.work import Work
from fusepass.capture.trace import Captured, capture
from fusepass.codegen import workers as pool
from fusepass.codegen.detect import taken_for
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.codegen.render.cuda.family import register, unregister
from fusepass.codegen.search.apart import GENERATION
from fusepass.codegen.workers import Workers, workers
from fusepass.compile import pipeline
from fusepass.config import Config, current, override
from fusepass.errors import FusepassWarning
from fusepass.patterns.partition import partition
from fusepass.patterns.simplify import simplify
from tests.golden_sources import graphs
from tests.support.layout import ROOT

SECONDS = 60.0  # in which what takes a second is there on a busy machine


@pytest.fixture
def leaving_all_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process generates nothing that others may."""

    def first(beside: Any, waiting: Sequence[Work]) -> int:
        given = [beside._given[id(work)][0] for work in waiting if id(work) in beside._given]
        until(lambda: all(future.done() for future in given))
        return 0

    monkeypatch.setattr(generation._Beside, "_next", first)


class Net(nn.Module):
    """Regions of all kinds: a convolution, a reduction and pointwise ones, a product, a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(32, 48, 3), nn.BatchNorm2d(48)
        self.linear, self.last = nn.Linear(48, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        images = torch.relu(self.norm(self.convolution(x)))
        pooled = nn.functional.max_pool2d(images, 2).mean((2, 3))
        return torch.softmax(self.last(torch.tanh(self.linear(pooled)) * 2), 1)


@pytest.fixture(autouse=True)
def _no_workers_are_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has workers of its own, which end soon behind it."""
    monkeypatch.setattr(pool, "_pools", {})
    yield
    for process in processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    for each in pool._pools.values():
        each.end()
    until(lambda: not processes())


def processes() -> list[int]:
    """The workers of this process, those that have ended and are not waited for among them."""
    children = [int(each) for path in Path("/proc/self/task").glob("*/children") for each in path.read_text().split()]
    return [each for each in children if is_worker(each)]


def is_worker(process: int) -> bool:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
    return b"serving.py" in command or not command  # a zombie has none


def until(there: Callable[[], Any]) -> None:
    latest = time.monotonic() + SECONDS
    while not there():
        assert time.monotonic() < latest, "it never came"
        time.sleep(0.01)


def ready(most: int) -> None:
    """Wait until workers are there: from then on they take tasks as soon as these are given."""
    futures = [workers(GENERATION).submit(b"no task", most) for _ in range(4 * most)]
    for future in futures:
        assert isinstance(future.exception(SECONDS), pool.Failed)
    until(lambda: len(processes()) == most)


def works_of(graph: Any, count: int, **options: Any) -> list[Work]:
    with override(workers=count, **options):
        found, _ = pipeline.generated(graph, partition(graph).regions, Forms())
    return [work for work in found if work.like is None]


def graph_of(device: torch.device) -> Any:
    with torch.no_grad():
        captured = capture(Net().eval(), (torch.rand(64, 32, 30, 30),), {})
    assert isinstance(captured, Captured)
    simplify(captured.graph)
    return graphs._on(captured.graph, device)


def told(work: Work) -> tuple[Any, ...]:
    candidates = [
        (each.name, each.sources, [part.kernels for part in each.parts], [*each.conversions])
        for each in work.candidates
    ]
    assert work.candidate is None or work.candidate is work.candidates[0]
    return (
        work.region.name, candidates, work.offered, work.beyond_budget, dict(work.ruled_out), work.lost, work.reason, work.choice,
    )  # fmt: skip


def is_from_a_worker(work: Work) -> bool:
    return any(part.recalled is not None for each in work.candidates for part in each.parts)


@pytest.mark.invariant(59)
@pytest.mark.usefixtures("leaving_all_to_workers")
@pytest.mark.parametrize("facts", [DeviceFacts.h200(), DeviceFacts.cpu(cores=8)], ids=lambda facts: facts.target.value)
@pytest.mark.parametrize(
    "options", [{"tune": "off"}, {"tune": "fast", "jobs": 64}, {"tune": "max"}], ids=lambda options: options["tune"]
)
def test_workers_generate_what_this_process_would(
    facts: DeviceFacts, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "times_are_taken", lambda work: True)
    for owner in (generation, sys.modules["fusepass.autotune.candidates"]):
        monkeypatch.setattr(owner, "recall", lambda work: None)
    with taken_for(facts):
        graph = graph_of(torch.device(facts.target.value))
        here = works_of(graph, 0, **options)
        there = works_of(graph, 2, **options)
        assert [told(work) for work in there] == [told(work) for work in here]
        assert not any(map(is_from_a_worker, here))
        assert all(map(is_from_a_worker, there))
        assert not any(work.alone for work in there)
        for one, other in zip(here, there, strict=True):
            for mine, its in zip(one.candidates, other.candidates, strict=True):
                assert (
                    its.generated.unaligned() == mine.generated.unaligned()
                )  # generated here, as nobody asks for it in time


@pytest.mark.usefixtures("leaving_all_to_workers")
def test_what_workers_generate_runs_and_is_kept(records: Path) -> None:
    model, x = Net().eval(), torch.rand(2, 32, 8, 8)
    with torch.no_grad():
        fused = fusepass.optimize(model, workers=1)
        torch.testing.assert_close(fused(x), model(x))
        assert fused.report().fallbacks == ()
        assert dict(fused.report().seconds)["generate"] > 0
    assert len(list(records.glob("*.json"))) > 0


def test_beside_the_program_workers_give_way_to_it() -> None:
    model, x = Net().eval(), torch.rand(2, 32, 8, 8)
    with torch.no_grad():
        fused = fusepass.optimize(model, workers=1, compile="background", tune="off")
        fused(x)
        assert fused.wait(SECONDS)
        torch.testing.assert_close(fused(x), model(x))
    assert pool._pools.keys() == {(GENERATION, True)}
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + pool._NICENESS, 19)
    until(processes)
    until(lambda: all(os.getpriority(os.PRIO_PROCESS, each) == niceness for each in processes()))


def lost(model: nn.Module, x: Tensor) -> fusepass.report.report.Report:  # type: ignore[name-defined]
    """The report of a call whose regions a worker was to generate."""
    with torch.no_grad():
        fused = fusepass.optimize(model, workers=1, tune="off")
        with pytest.warns(
            FusepassWarning, match="generation in several processes runs as generation in this one"
        ) as warned:
            torch.testing.assert_close(fused(x), model(x))
    assert len(warned) == 1
    return fused.report()


@pytest.mark.invariant(59)
def test_a_worker_that_dies_is_told_and_its_region_generated_here(monkeypatch: pytest.MonkeyPatch) -> None:
    ready(1)
    (worker,) = processes()
    real, killed = Workers.submit, list[int]()

    def killing(self: Workers, task: bytes, most: int) -> Future[bytes]:
        if killed:
            return real(self, task, 0)
        os.kill(worker, signal.SIGSTOP)  # so that it has begun when it dies
        future = real(self, task, most)
        until(future.running)
        os.kill(worker, signal.SIGKILL)
        killed.append(worker)
        return future

    monkeypatch.setattr(Workers, "submit", killing)
    (fallback,) = lost(Net().eval(), torch.rand(2, 32, 8, 8)).fallbacks
    assert fallback.reason == "a worker that was to work ended with status -9"
    assert fallback.count == 1


@pytest.mark.invariant(59)
def test_a_worker_that_hangs_is_ended_and_its_region_generated_here(monkeypatch: pytest.MonkeyPatch) -> None:
    ready(1)
    (worker,) = processes()
    os.kill(worker, signal.SIGSTOP)
    monkeypatch.setattr(pool, "PATIENCE", 0.5)
    report = lost(Net().eval(), torch.rand(2, 32, 8, 8))
    assert [each.reason for each in report.fallbacks] == ["a worker took more than 0.5 s to work"]
    until(lambda: worker not in processes())


@pytest.mark.invariant(59)
def test_workers_that_cannot_start_are_told_and_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "serving.py"
    broken.write_text("raise SystemExit('no such module')")
    monkeypatch.setattr(pool, "_PROGRAM", str(broken))
    for _ in range(pool.MOST_FAILURES):
        workers(GENERATION).submit(b"", 1).cancel()
        until(lambda: not workers(GENERATION)._serving)
    assert not workers(GENERATION).submit(b"", 1).running()
    assert not workers(GENERATION)._serving
    report = lost(Net().eval(), torch.rand(2, 32, 8, 8))
    assert [each.reason for each in report.fallbacks] == [
        "a worker that was to start ended with status 1: no such module"
    ]


def test_workers_end_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE", 0.1)
    workers(GENERATION).submit(b"", 2).exception(SECONDS)
    until(lambda: not processes() and not workers(GENERATION)._serving)
    assert not pool._sockets
    assert isinstance(
        workers(GENERATION).submit(b"", 1).exception(SECONDS), pool.Failed
    )  # another one starts when there is


def test_the_memory_of_workers_is_bounded() -> None:
    ready(1)
    (worker,) = processes()
    assert resource.prlimit(worker, resource.RLIMIT_AS) == (pool.MEMORY, pool.MEMORY)


def test_what_others_do_not_know_of_is_generated_here(tmp_path: Path) -> None:
    def most(**options: Any) -> int:
        with override(**options):
            return generation._most(current(), 100)

    assert most(workers=3) == 3
    assert most(workers=3, debug=True) == most(workers=3, dump=tmp_path) == 0
    family = SmallProducts()
    register(family)
    try:
        assert most(workers=3) == 0
    finally:
        unregister(family.name)


def test_workers_start_by_themselves_where_there_are_cores_and_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(cores: int, regions: int, jobs: int = 64) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(cores)})
        return generation._most(Config(jobs=jobs), regions)

    assert [most(cores, 100) for cores in (1, 2, 3, 4, 6, 8, 64)] == [0, 0, 0, 2, 3, 4, 4]
    assert most(64, 100, jobs=2) == 0
    assert most(64, generation._LEAST - 1) == 0 < most(64, generation._LEAST)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert most(64, 100) == 0
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/opt/app/bin/app")
    assert most(64, 100) == 0


@pytest.mark.parametrize("training", [False, True])
def test_workers_start_before_capture_if_nothing_was_ever_generated(
    records: Path, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Workers, "start", lambda self, most: counts.append(most))

    def call(workers: int) -> None:
        if training:
            torch._dynamo.reset()
            model = torch.compile(Net(), backend="fusepass", options={"workers": workers, "tune": "off"})
            model(torch.rand(2, 32, 8, 8)).sum().backward()
            return
        with torch.no_grad():
            fusepass.optimize(Net(), workers=workers, tune="off")(torch.rand(2, 32, 8, 8))

    call(2)
    assert counts[0] >= 1
    assert any(records.glob("*.json"))
    counts.clear()
    call(2)
    assert counts == []  # all was recorded


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import fusepass
from fusepass.codegen import workers
from fusepass.codegen.search.apart import GENERATION

print("main")
class Net(nn.Module):
    def forward(self, x):
        return torch.softmax(torch.tanh(x) * 2, 1)

def ready():
    try:
        workers.workers(GENERATION).submit(b"no task", 2).result(60)
    except workers.Failed:
        pass
    while True:
        children = [each for path in Path("/proc/self/task").glob("*/children") for each in path.read_text().split()]
        if len(children) == 2:
            return children
        time.sleep(0.01)
"""


def run(text: str, tmp_path: Path, **options: Any) -> subprocess.Popen[str]:
    """Runs `PROGRAM` and `text` as a file: a `__main__` without a guard."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FUSEPASS_WORKERS": "2", "FUSEPASS_CACHE_DIR": str(tmp_path)}
    return subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", str(path)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def gone(children: str) -> None:
    until(lambda: not any(is_worker(int(each)) for each in children.split()))


def test_a_program_without_a_guard_runs_once_and_its_workers_end_with_it(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "pickle.py").write_text("raise ImportError('a file of the working directory')")
    process = run(
        """
        print(*ready())
        with torch.no_grad():
            x = torch.rand(8, 64)
            model = Net()
            torch.testing.assert_close(fusepass.optimize(model, tune="off")(x), model(x))
        """,
        tmp_path,
        cwd=elsewhere,
    )
    out, said = process.communicate(timeout=200)
    assert (process.returncode, said) == (0, "")
    once, children = out.splitlines()
    assert once == "main"
    gone(children)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_a_program_that_is_interrupted(tmp_path: Path, by: signal.Signals) -> None:
    process = run(
        """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what they start in the background ignore it
        print(*ready(), flush=True)
        time.sleep(100)
        """,
        tmp_path,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    children = process.stdout.readline()
    os.killpg(process.pid, by)  # as a terminal does
    _, said = process.communicate(timeout=200)
    assert said.count("Traceback") == (by is signal.SIGINT)
    gone(children)


def test_a_process_that_was_forked_keeps_no_worker_and_has_its_own(tmp_path: Path) -> None:
    process = run(
        """
        children = ready()
        child = os.fork()
        if child == 0:
            if workers._sockets or workers._pools:
                os._exit(1)
            own = ready()
            os._exit(2 if {*own} & {*children} else 0 if len(own) == 2 else 3)
        _, status = os.waitpid(child, 0)
        if os.fork() == 0:
            os.close(1); os.close(2)
            time.sleep(100)
        print(os.waitstatus_to_exitcode(status), *children, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
        start_new_session=True,
    )
    out, _ = process.communicate(timeout=200)
    status, *children = out.splitlines()[1].split()
    assert status == "0"
    gone(" ".join(children))  # although the second child lives on
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_threads_share_workers() -> None:
    results: list[BaseException | None] = []
    threads = [
        threading.Thread(target=lambda: results.append(workers(GENERATION).submit(b"", 2).exception(SECONDS)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(each, pool.Failed) for each in results)
    assert len(results) == 8
    until(lambda: len(processes()) == 2)


def test_a_worker_has_no_torch() -> None:
    text = """
        import sys
        sys.modules["torch"] = None
        import fusepass.codegen.serving, fusepass.codegen.search.apart, fusepass.codegen.render.cuda.families
        print("there")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("there\n", "")


@pytest.mark.usefixtures("leaving_all_to_workers")
def test_what_was_chosen_earlier_is_in_force(records: Path) -> None:
    """A choice on disk, with what was generated lost: the worker's candidates are those that it is about."""
    model, x = Net().eval(), torch.rand(2, 32, 8, 8)
    torch.use_deterministic_algorithms(True)  # no times are taken, so that each choice is kept
    try:
        with torch.no_grad():
            first = fusepass.optimize(model, tune="fast")
            first(x)
            for path in records.glob("*.json"):
                path.unlink()
            again = fusepass.optimize(model, tune="fast", workers=1)
            torch.testing.assert_close(again(x), model(x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert again.report().fallbacks == ()
    for one, other in zip(first.report().regions, again.report().regions, strict=True):
        assert (one.state, one.sources) == (other.state, other.sources)
        assert one.choice is not None
        assert other.choice is not None
        assert (one.choice.recorded, other.choice.recorded) == (False, True)
