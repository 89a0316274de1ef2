"""One call of each way into fusepass: that it fuses, what eager gives, and that nothing falls back. `make test-torch VERSION=2.15 TESTS=tests/smoke`."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.cli.doctor import diagnose
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import check
from fusepass.report.report import CaptureRoute, RegionState
from fusepass.runtime import fast_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nothing_falls_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusepassWarning)
        yield


def chain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1))


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Dropout(0.0))


def training_step(model: nn.Module, call: nn.Module, x: Tensor) -> list[Tensor]:
    """Result and gradients of `model`'s parameters and of `x`."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    out = call(x)
    out.square().mean().backward()
    return [out, x.grad, *(parameter.grad for parameter in model.parameters())]


def close(found: list[Tensor], model: nn.Module, x: Tensor) -> None:
    """Compares with a step of the model in float64."""
    exact = copy.deepcopy(model).double()
    for one, other in zip(found, training_step(exact, exact, x.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


class Counting(nn.Module):
    """Writes to a buffer, branches on a number, and on what a tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.inner = chain()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls.add_(1)
        if scale > 1 and bool((x > 0).any()):
            x = x * scale
        return self.inner(x).relu()


class WritesItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return (x.exp() * 2).tanh()


def test_a_chain_is_one_region_and_right() -> None:
    model, x = chain(), torch.rand(2, 3, 12, 12)
    fused = fusepass.optimize(model)
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    report = fused.report()
    assert [region.state for region in report.regions] == [RegionState.FUSED]
    assert not report.refusals
    assert report.capture is CaptureRoute.TRACED
    assert fusepass.explain(model, x).regions[0].name == report.regions[0].name


def test_changes_show_in_the_next_call() -> None:
    model = Counting()
    fused = fusepass.optimize(model)
    with torch.no_grad():
        for size, scale in ((12, 1.0), (12, 3.0), (9, 3.0), (12, 1.0)):
            x = torch.rand(2, 3, size, size)
            torch.testing.assert_close(fused(x, scale), model.inner(x * scale).relu())
            model.inner[0].weight.mul_(1.5)
    assert model.calls.item() == 4


def test_a_write_to_an_input_is_captured_by_export() -> None:
    model, x = WritesItsInput(), torch.rand(4, 8)
    fused, given = fusepass.optimize(model), x.clone()
    with torch.no_grad():
        torch.testing.assert_close(fused(given), ((x + 1).exp() * 2).tanh())
    torch.testing.assert_close(given, x + 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_backend_trains(dynamic: bool) -> None:
    torch._dynamo.reset()
    model = layer()
    compiled = torch.compile(model, backend="fusepass", dynamic=dynamic)
    for rows in (16, 17):
        x = torch.rand(rows, 24)
        close(training_step(model, compiled, x), model, x)


def test_an_optimised_model_trains() -> None:
    torch._dynamo.reset()
    model = layer()
    fused = fusepass.optimize(model, training="fused")
    for _ in range(3):
        x = torch.rand(16, 24)
        close(training_step(model, fused, x), model, x)
    assert {region.state for region in fused.report().regions} == {RegionState.FUSED}


def test_threads_call_while_another_one_exports() -> None:
    model = chain()
    fused, inputs = fusepass.optimize(model), [torch.rand(2, 3, size, size) for size in (9, 10, 11)]
    results = dict[int, Tensor]()

    def call(number: int) -> None:
        with torch.no_grad():
            results[number] = fused(inputs[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    threads.append(threading.Thread(target=torch.export.export, args=(layer(), (torch.rand(2, 24),))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for number, x in enumerate(inputs):
            torch.testing.assert_close(results[number], model(x))


def test_calls_need_no_python() -> None:
    fast_path.wait()
    assert fast_path.types() is not None


def test_the_doctor_finds_nothing_wrong() -> None:
    diagnosis = diagnose()
    assert diagnosis.ok, str(diagnosis)


def test_the_command_line_explains() -> None:
    command = [sys.executable, "-m", "fusepass", "explain", "examples.conv_transpose2d_gelu_group_norm:Model"]
    command += ["--input", "2,64,8,8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "regions: 1 fused" in done.stdout
