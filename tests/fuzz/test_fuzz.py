"""The search for wrong answers finds one that is planted, makes it small, and goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fusepass.config import Algebra
from fusepass.numerics.check import compare, observe
from tests.fuzz import chunk
from tests.fuzz.chunk import Example, Failure, draw
from tests.fuzz.noise import is_noise
from tests.fuzz.places import is_as_on_a_cpu
from tests.fuzz.record import Record
from tests.fuzz.shrink import smallest
from tests.property import steps
from tests.property.expressions import SQUARES
from tests.property.script import Model
from tests.property.steps import Sketch

ROOT = Path(__file__).parents[2]
LONG = Model(
    torch.float32, 1, False, False,
    inputs=["torch.randn((4, 3)).to(torch.float32).transpose(0, 1)", "torch.randn((3, 4)).to(torch.float32)"],
    layers={"l0": "nn.Linear(4, 4)"},
    lines=["v2 = self.l0(x1)", "v3 = torch.tanh(x0)", "v4 = v3 + v2", "v5 = torch.sin(v4)", "v6 = v5 * 2"],
    results=["v6", "v2"],
)  # fmt: skip


def test_the_same_seed_draws_the_same_models() -> None:
    first, second = draw(3, 5), draw(3, 5)
    assert [example.model.text for example in first] == [example.model.text for example in second]
    assert len({example.model.text for example in first}) == 5


@given(data=st.data(), long=st.booleans())
def test_no_square_of_a_long_dimension_is_drawn(data: st.DataObject, long: bool) -> None:
    """It would be thrown away, after minutes for its gigabytes."""
    sketch = Sketch(data.draw, LONG, 20_000)
    sketch.values["x0"] = torch.zeros(65_537 if long else 4)
    with mock.patch.object(Sketch, "add") as add, mock.patch.object(steps, "ODD", ("{x} * 2",)):
        steps._odd(sketch)
    text = add.call_args.args[0]
    assert text == "x0 * 2" if long else text in {"x0 * 2", *(each.format(x="x0") for each in SQUARES)}


def _wrong_about_sines(examples: list[Example], device: str) -> list[Failure]:
    return [Failure(each, "first call: wrong") for each in examples if "torch.sin" in each.model.text]


def test_a_failure_is_made_smaller() -> None:
    failure = Failure(Example(LONG, Algebra.SAFE), "first call: wrong")
    with mock.patch("tests.fuzz.shrink.run", _wrong_about_sines):
        found = smallest(failure, "cpu").example
    assert found.level is Algebra.OFF
    assert found.model.layers == {}
    assert len(found.model.lines) <= 2
    assert "torch.sin" in found.model.text
    found.model.make()


def test_exceptions_are_failures() -> None:
    with mock.patch.object(chunk.fusepass, "optimize", side_effect=RuntimeError("planted")):
        (failure,) = chunk.run([Example(LONG, Algebra.SAFE)], "cpu")
    assert failure.kind == "RuntimeError"
    assert "planted" in failure.problem


def test_what_eager_refuses_is_no_failure() -> None:
    refused = dataclasses.replace(LONG, lines=[*LONG.lines[:-1], "v5 = x0.view(7, 7)"])
    assert chunk.run([Example(refused, Algebra.SAFE)], "cpu") == []


class _Cancels(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return (y - y).sum()


def test_rounding_errors_are_told_from_wrong_results() -> None:
    model, x = _Cancels(), torch.rand(1000)
    for off, noise in ((2e-7, True), (1e-4, False)):
        wrong = torch.tensor(off)
        outcome = compare(
            {"output": wrong}, {"output": torch.zeros(())}, {"output": torch.zeros((), dtype=torch.float64)}
        )
        assert not outcome.ok
        assert is_noise(model, (x,), outcome, x.dtype) is noise


class _NormalisesZeros(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.unsqueeze(-1).log_softmax(-1).squeeze(-1), x.shape[1:], eps=1e-4)


def test_rounding_errors_may_be_normalised() -> None:
    """A logarithm of ones is zero but for roundings, which a small variance makes a hundred times as large."""
    model, x = _NormalisesZeros(), torch.rand(4, 8)
    for off, noise in ((1e-5, True), (1e-3, False)):
        zeros = torch.zeros(4, 8)
        outcome = compare({"output": zeros + off}, {"output": zeros}, {"output": zeros.double()})
        assert not outcome.ok
        assert is_noise(model, (x,), outcome, x.dtype) is noise


class _Norms(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.norm(dim=0)


def test_a_double_is_no_better_than_the_oracle() -> None:
    model, x = _Norms(), torch.rand(10_000, 2, dtype=torch.float64)
    for off, noise in ((1e-12, True), (1e-10, False)):
        truth = model(x)
        outcome = compare({"output": truth * (1 + off)}, {"output": truth}, {"output": truth})
        assert not outcome.ok
        assert is_noise(model, (x,), outcome, x.dtype) is noise


INFINITE = Model(
    torch.float32, 1, False, False,
    inputs=["torch.randn((13, 3)).to(torch.float32)"], marks=["x0[(8, 1)] = float('inf')"],
    layers={"l0": "nn.Linear(3, 8, bias=False)", "l1": "nn.Linear(8, 8, bias=False)"},
    lines=["v1 = self.l0(x0)", "v2 = self.l1(v1)", "v3 = torch.sigmoid(v2)"], results=["v3"],
)  # fmt: skip


def test_infinities_in_sums_of_another_order_are_told_from_wrong_ones() -> None:
    """One product of both weights gives an infinity where eager's second sum is NaN, and sigmoid forgets it."""
    (found,) = chunk.run([Example(INFINITE, Algebra.SAFE)], "cpu")
    assert found.noise
    with mock.patch("tests.fuzz.places.REORDERING", frozenset()):
        (found,) = chunk.run([Example(INFINITE, Algebra.SAFE)], "cpu")
    assert not found.noise
    assert "out of place" in found.problem


def test_infinities_on_a_gpu_may_stand_where_they_do_on_a_cpu() -> None:
    module, inputs = INFINITE.make()
    right = observe(module, inputs)
    assert is_as_on_a_cpu(INFINITE, right)
    right["output"][0][0, 0] = torch.nan
    assert not is_as_on_a_cpu(INFINITE, right)


def _branching(line: str) -> Model:
    """A model that Dynamo has to trace: it writes to its input and branches on it."""
    return Model(
        torch.float32, 1, False, False,
        inputs=["torch.randn((3, 4, 5)).to(torch.float32).permute(2, 0, 1)"],
        lines=["x0[..., :1].mul_(2)", line, "v2 = v1.relu() if x0.flatten()[0] > 0.5 else v1.tanh() * 2"],
        results=["v2", "v1"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "problem", "excuse"),
    [
        ("v1 = 2 ** x0", "strides", "is_laid_out_otherwise"),
        ("v1 = F.dropout(x0, 0.3, training=False)", "memory is shared otherwise", "is_aliased_otherwise"),
    ],
)
def test_what_dynamo_loses_is_told_from_wrong_results(line: str, problem: str, excuse: str) -> None:
    example = Example(_branching(line), Algebra.SAFE)
    (found,) = chunk.run([example], "cpu")
    assert problem in found.problem
    assert found.noise
    with mock.patch.object(chunk, excuse, return_value=False):
        (found,) = chunk.run([example], "cpu")
    assert not found.noise


def test_what_is_not_done_in_time_is_not_tried(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    command = [sys.executable, "-m", "tests.fuzz", "--size", "200", "--workers", "1", "--record", str(path)]
    limits = "import tests.fuzz.__main__ as m; m._GRACE = 0.0; raise SystemExit(m.main())"
    done = subprocess.run(
        [sys.executable, "-c", limits, *command[3:], "--minutes", "0.02"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not path.exists()


def test_a_record_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    command = [sys.executable, "-m", "tests.fuzz", "--size", "2", "--workers", "1", "--record", str(path)]
    for examples in (2, 4):
        subprocess.run([*command, "--examples", str(examples)], check=True, capture_output=True)
        told = json.loads(path.read_text())
        assert told["total"] == examples
        assert told["wrong"] == 0
    assert set(told["examples"]) == {"0", "1"}
    record = Record.of(path, "cpu")
    record.failures.append({"seed": 1})
    record.begin(again=True)
    assert set(record.examples) == {"0"}
    assert not record.failures


class StepsAtZero(nn.Module):
    """A difference that eager rounds to zero, and a product that is not rounded before leaves something of, asked for its sign."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 0.1
        return 1 - ((y - y.mean(0, keepdim=True) + self.error) > 0).to(x.dtype) * 0.1


def test_the_sign_of_nothing_is_noise_and_a_large_error_is_not() -> None:
    model, inputs = StepsAtZero(0.0), (torch.full((1,), 3.0),)
    wrong = compare(observe(StepsAtZero(1e-9), inputs), observe(model, inputs), observe(model.double(), inputs))
    assert not wrong.ok
    assert is_noise(StepsAtZero(0.0), inputs, wrong, torch.float32)
    plain, other = nn.Identity(), nn.Hardtanh(-2, 2)
    wrong = compare(observe(other, inputs), observe(plain, inputs), observe(plain.double(), inputs))
    assert not wrong.ok
    assert not is_noise(plain, inputs, wrong, torch.float32)


@pytest.mark.parametrize(
    ("cast", "dtype"), [("", torch.float64), (".float()", torch.float32), (".half()", torch.float16)]
)
def test_the_coarsest_type_that_a_model_names(cast: str, dtype: torch.dtype) -> None:
    model = Model(torch.float64, 1, False, False, inputs=["torch.randn(3)"], lines=[f"v1 = x0{cast}"], results=["v1"])
    assert model.coarsest is dtype


def test_written_views_of_parameters_are_compared() -> None:
    parameter = nn.Parameter(torch.ones(1))
    with torch.no_grad():
        view = parameter.expand(3)
        parameter.add_(1)
    assert chunk._same([view], [torch.full((3,), 2.0)])
    assert not chunk._same([view], [torch.ones(3)])
