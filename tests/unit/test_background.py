"""``compile="background"``: calls run the original operators until kernels are there, and nothing but speed tells that they are."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass import background, errors
from fusepass.api.module import OptimizedModule
from fusepass.background import Job
from fusepass.codegen import toolchain
from fusepass.dispatch import making
from fusepass.report.records import CaptureRoute
from fusepass.report.report import Report
from tests.support.layout import ROOT

SECONDS = 60.0


class Net(nn.Module):
    """A little of everything: statistics, random numbers, a setting in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.norm(self.linear(x)) * self.scale)) + 1


def beside(model: nn.Module, **options: Any) -> OptimizedModule:
    return fusepass.optimize(model, compile="background", **{"tune": "off", **options})


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Holds up all jobs until it is set."""
    event = threading.Event()

    def hold() -> None:
        event.wait(SECONDS)

    background.start(Job("hold", hold))
    yield event
    event.set()


def fused(optimised: OptimizedModule) -> bool:
    return optimised.report().ops_fused > 0


def test_calls_run_the_original_until_kernels_are_there(held: threading.Event) -> None:
    model = Net().eval()
    optimised, x = beside(model), torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(optimised(x), model(x))  # the operators themselves: not a bit differs
        assert torch.equal(optimised(x), model(x))
        waiting = optimised.report()
        assert waiting.background == ("Net for float32[4, 8]: waits for its turn",)  # one job for both calls
        assert "waits for its turn" in str(waiting)
        assert Report.from_json(waiting.to_json()) == waiting
        assert not optimised.wait(0.01)
        held.set()
        assert optimised.wait(SECONDS)
        report = optimised.report()
        assert (report.background, report.capture, fused(optimised)) == ((), CaptureRoute.TRACED, True)
        torch.testing.assert_close(optimised(x), model(x))
        assert optimised(x).stride() == model(x).stride()
        assert not report.fallbacks


def test_statistics_and_random_numbers_are_those_of_eager() -> None:
    torch.manual_seed(0)
    model = Net().train()
    eager, optimised = copy.deepcopy(model), beside(model)
    with torch.no_grad():
        for number in range(4):
            x = torch.randn(6, 8)
            torch.manual_seed(number), random.seed(number), numpy.random.seed(number)
            expected, drawn = eager(x), (torch.rand(3), random.random(), numpy.random.rand())
            torch.manual_seed(number), random.seed(number), numpy.random.seed(number)
            torch.testing.assert_close(optimised(x), expected)
            if number == 1:  # the job draws meanwhile, from generators of its own
                assert optimised.wait(SECONDS)
            assert torch.equal(torch.rand(3), drawn[0])
            assert (random.random(), numpy.random.rand()) == drawn[1:]
    assert fused(optimised)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)
    assert model.norm.num_batches_tracked == 4


def test_a_model_that_changes_while_it_is_captured_or_built_is_compiled_for_what_it_is() -> None:
    model = Net().eval()
    optimised, x = beside(model), torch.randn(4, 8)
    started, go_on = threading.Event(), threading.Event()
    real = making.compile_graph

    def slowly(*args: Any, **kwargs: Any) -> Any:
        started.set()
        assert go_on.wait(SECONDS)
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(making, "compile_graph", slowly)
        optimised(x)
        assert started.wait(SECONDS)  # captured with a scale of 2
        model.scale = 3.0
        model.linear.weight.mul_(2)  # tensors are read at each call
        torch.testing.assert_close(optimised(x), model(x), rtol=0, atol=0)
        go_on.set()
        assert optimised.wait(SECONDS)
        for scale in (3.0, 2.0):
            model.scale = scale
            torch.testing.assert_close(optimised(x), model(x))
            assert optimised.wait(SECONDS)
            torch.testing.assert_close(optimised(x), model(x))
        model.double()
        torch.testing.assert_close(optimised(x.double()), model(x.double()))
        assert optimised.wait(SECONDS)
        torch.testing.assert_close(optimised(x.double()), model(x.double()))
        model.train()
        other = copy.deepcopy(model)
        torch.manual_seed(1)
        expected = other(x.double())
        torch.manual_seed(1)
        torch.testing.assert_close(optimised(x.double()), expected)
    assert len(list(optimised._specialiser.table)) == 3


def test_what_is_captured_while_the_model_changes_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net().eval()
    optimised, x = beside(model), torch.randn(4, 8)
    real = making.capture_beside

    def changed(*args: Any, **kwargs: Any) -> Any:
        captured = real(*args, **kwargs)
        model.scale += 1
        return captured

    monkeypatch.setattr(making, "capture_beside", changed)
    with torch.no_grad():
        optimised(x)
        assert optimised.wait(SECONDS)
        assert not list(optimised._specialiser.table)
        monkeypatch.undo()
        torch.testing.assert_close(optimised(x), model(x))
        assert optimised.wait(SECONDS)
        torch.testing.assert_close(optimised(x), model(x))
    assert fused(optimised)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return torch.tanh(x) * 2 + 1


_steps = [0]


class AroundIt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        _steps[0] += 1
        return torch.tanh(x) * 2 + 1


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * random.random()


class DrawingFromNumPy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * float(numpy.random.rand())


class Setting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return torch.tanh(x) * 2 + 1


class Precise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]
        y = torch.tanh(x @ x.T)
        torch.backends.mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]
        return y


class Seeding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return torch.tanh(x) + torch.rand_like(x)


@pytest.mark.parametrize("kind", [Counting, AroundIt, Drawing, DrawingFromNumPy, Setting, Precise, Seeding])
def test_what_threads_share_is_left_alone_by_a_capture_beside_a_call(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a forward must not run in another thread: what it does there would show, or could not be put back."""
    monkeypatch.setattr(making.Maker, "begin", lambda *_: pytest.fail("captured by a call"))
    model, x = kind(), torch.randn(4, 8)
    optimised = beside(model)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    _steps[0] = 0
    with torch.no_grad():
        optimised(x)
        states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        mkldnn = torch.backends.mkldnn.enabled
        assert optimised.wait(SECONDS)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert torch.backends.mkldnn.enabled == mkldnn
    assert _steps[0] == (kind is AroundIt)
    assert getattr(model, "seen", [4]) == [4]
    assert not list(optimised._specialiser.table)
    assert optimised._specialiser._beside._left


def test_what_cannot_be_captured_beside_is_captured_by_a_later_call() -> None:
    class Config:
        act = "tanh"

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.told = Config()  # a plain object: a copy of it serves the capture
            self.mask = torch.ones(8)  # no buffer: leads out of a copy of the module

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * self.mask + 1

    for masked in (True, False):
        model, x = Told(), torch.randn(4, 8)
        if not masked:
            del model.mask
            model.register_buffer("mask", torch.ones(8))
        optimised = beside(model)
        with torch.no_grad():
            optimised(x)
            assert optimised.wait(SECONDS)
            assert fused(optimised) is not masked
            torch.testing.assert_close(optimised(x), model(x))
            assert optimised.wait(SECONDS)
            torch.testing.assert_close(optimised(x), model(x))
        assert fused(optimised)


def test_a_job_that_fails_is_warned_of_where_the_call_was_and_kept_in_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(making, "compile_graph", broken)
    optimised, x = beside(Net().eval()), torch.randn(4, 8)

    def calls() -> None:
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(optimised(x), optimised.original(x))
                assert optimised.wait(SECONDS)

    with pytest.warns(fusepass.FusepassWarning, match="a bug of ours") as told:
        calls()
    (warning,) = (each for each in told if "is not captured whole" in str(each.message))
    assert warning.filename == __file__
    assert "a bug of ours" in str(optimised.report())

    monkeypatch.setattr(making, "_describes", broken)  # no part of what is expected to fail
    optimised = beside(Net().eval())
    with pytest.warns(fusepass.FusepassWarning, match="compiling it beside failed") as told:
        calls()
    assert [each.filename for each in told] == [__file__]  # tried once
    assert optimised.report().background == ("Net for float32[4, 8]: failed with ZeroDivisionError: a bug of ours",)


def test_threads_call_while_signatures_come_and_are_built() -> None:
    model = Net().eval()
    optimised, raised = beside(model), list[BaseException]()

    def calls(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for size in (3, 4, 5, 3, 4):
                    x = torch.randn(size, 8, generator=generator)
                    torch.testing.assert_close(optimised(x), model(x))
                    time.sleep(0.02)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert optimised.wait(SECONDS)
    assert raised == []
    assert len(list(optimised._specialiser.table)) == 3


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A child of a fork has no threads of OpenMP."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_child_of_a_fork_has_its_jobs_done_itself(held: threading.Event) -> None:
    model = Net().eval()
    optimised, x = beside(model), torch.randn(4, 8)
    with torch.no_grad():
        optimised(x)
        assert optimised.report().background
        child = os.fork()
        if not child:
            code = 1
            signal.alarm(int(SECONDS))
            try:
                assert optimised.wait(0)  # nothing is under way here
                assert torch.equal(optimised(x), model(x))
                assert optimised.wait(SECONDS)
                assert fused(optimised)
                torch.testing.assert_close(optimised(x), model(x))
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held.set()
        assert optimised.wait(SECONDS)
        assert fused(optimised)


def test_a_fork_finds_the_thread_of_the_jobs_between_two_steps() -> None:
    inside, forked = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        while not forked.wait(0.01):
            background.checkpoint()

    job = Job("steps", work)
    background.start(job)
    assert inside.wait(SECONDS)
    child = os.fork()
    if not child:
        os._exit(0 if background._moving.acquire(timeout=1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    forked.set()
    assert job.wait(SECONDS)


EXIT = """
    import os, time
    import torch
    from torch import nn
    import fusepass

    class Net(nn.Module):
        def forward(self, x):
            return torch.tanh(x).softmax(1)

    optimised = fusepass.optimize(Net(), compile="background", tune="off")
    with torch.no_grad():
        optimised(torch.randn(4, 8))
    while not WAITED_FOR:
        time.sleep(0.001)
    print("under way", flush=True)
"""


@pytest.mark.parametrize("compiling", [True, False])
def test_a_process_ends_while_jobs_are_under_way(compiling: bool, tmp_path: Path) -> None:
    """Without waiting for a compiler that takes its time, without an error, and with nothing half made in the cache."""
    compiler, started, directory = tmp_path / "c++", tmp_path / "started", tmp_path / "cache"
    text = textwrap.dedent(EXIT).replace("WAITED_FOR", f"os.path.exists({str(started)!r})" if compiling else "True")
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) touch {started}; exec sleep 1000; esac\nexec {toolchain.cxx().path} "$@"\n'
    )
    compiler.chmod(0o755)
    environment = os.environ | {"FUSEPASS_CACHE_DIR": str(directory), "CXX": str(compiler)}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "under way\n"
    assert not list(directory.glob("v1/tmp-*"))
    assert not list(directory.glob("v1/failed/*"))
    assert not list(directory.glob("v1/??/*/"))


def test_a_model_that_nobody_has_any_more_is_not_compiled(held: threading.Event) -> None:
    model = Net().eval()
    optimised = beside(model)
    with torch.no_grad():
        optimised(torch.randn(4, 8))
    gone, job = weakref.ref(model), optimised._specialiser.jobs[0]
    del model, optimised
    gc.collect()
    assert gone() is None
    held.set()
    assert job.wait(SECONDS)
    assert job.error is None


def test_training_runs_the_operators_until_its_graphs_are_compiled() -> None:
    torch.manual_seed(0)
    model = Net().train()
    eager, optimised = copy.deepcopy(model), beside(model)
    for number in range(5):
        x = torch.randn(6 + (number > 3), 8)
        results = []
        for each in (eager, optimised):
            torch.manual_seed(number)
            each.zero_grad()
            y = each(x)
            y.square().sum().backward()
            results.append([y, torch.rand(2), *(parameter.grad.clone() for parameter in each.parameters())])
        # The gradient of a bias before a batch norm is rounding alone.
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=3e-5)
        assert optimised.wait(SECONDS)
    report = optimised.report()
    assert (report.capture, report.background) == (CaptureRoute.DYNAMO, ())
    assert report.ops_fused
    assert report.backward is not None
    assert report.backward.ops_fused
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


def test_the_backend_compiles_beside_the_calls_of_what_torch_compile_made(held: threading.Event) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.tanh(x).softmax(1) * 3

    compiled = torch.compile(function, backend="fusepass", options={"compile": "background", "tune": "off"})
    for size in (4, 5, 6):
        x = torch.randn(size, 8)
        assert torch.equal(compiled(x), function(x))
    held.set()
    last = Job("last", lambda: None)
    background.start(last)
    assert last.wait(SECONDS)
    for size in (4, 5, 6):
        x = torch.randn(size, 8)
        torch.testing.assert_close(compiled(x), function(x))


def test_children_are_compiled_beside_the_calls_of_a_model_that_is_not_captured() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return y * 2 if y.numpy().sum() > 0 else y

    model, x = Deciding(), torch.randn(4, 8)
    optimised = beside(model)
    with torch.no_grad():
        for _ in range(6):
            torch.testing.assert_close(optimised(x), model(x))
            assert optimised.wait(SECONDS)
    assert fused(optimised)


def test_the_modes_of_the_call_are_those_of_the_capture() -> None:
    model, x = Net().eval(), torch.randn(4, 8)
    optimised = beside(model)
    for context in (torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context, torch.no_grad():
            expected = optimised(x)
            assert optimised.wait(SECONDS)
            result = optimised(x)
            assert (result.dtype, result.is_inference()) == (expected.dtype, expected.is_inference())
            torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
    assert len(list(optimised._specialiser.table)) == 2
    assert not torch.is_autocast_enabled("cpu")


def test_a_capture_beside_leaves_no_casts_without_gradients_in_the_cache_of_autocast() -> None:
    """All threads share that cache: a weight whose cast was found there would get no gradient."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    optimised = beside(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            optimised(x)
            assert optimised.wait(SECONDS)
        model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_warnings_of_code_without_a_file_have_its_line() -> None:
    """As at a prompt, whose loader has no source and raises where it is asked for one."""
    command = [sys.executable, "-c", "import fusepass.errors\nfusepass.errors.warn('said')"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == "<string>:2: FusepassWarning: said\n"


def test_warnings_without_a_line_of_the_user_are_shown_all_the_same() -> None:
    assert errors.place_of_user().file == __file__
