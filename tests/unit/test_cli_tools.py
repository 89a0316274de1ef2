"""The commands `compare`, `check` and `extract`, and the arguments that commands share."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.cli import compare, main
from fusepass.cli.model import Call, InputSpec, UsageError, load_call
from fusepass.codegen import toolchain
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Role
from fusepass.codegen.render import render
from fusepass.errors import CaptureError
from fusepass.numerics.comparison import Leaf
from fusepass.profiling.extract import Standalone, write_program
from fusepass.runtime.call_text import CallText
from fusepass.runtime.region import FusedRegion
from tests.support.calls import replace_calls
from tests.support.kernels import softmax_rows

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x, scale=None, keep=None):
        y = self.norm(nn.functional.gelu(self.linear(x)))
        y = y if scale is None else y * scale
        return y if keep is None else torch.where(keep, y, 0).tanh()
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module with a model in the current directory."""
    name = "net_of_test_cli_tools"
    (tmp_path / f"{name}.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "100")
    yield f"{name}:Net"
    sys.modules.pop(name, None)


def test_inputs_have_names_and_types(net: str) -> None:
    assert InputSpec.parse("scale=2,3:int64") == InputSpec((2, 3), torch.int64, "scale")
    assert InputSpec.parse("keep=:bool") == InputSpec((), torch.bool, "keep")
    with pytest.raises(UsageError, match="'2,3' is not the name of an argument"):
        InputSpec.parse("2,3=4")
    specs = [InputSpec.parse(text) for text in ("4,6", "scale=4,8:float64", "keep=4,8:bool")]
    call = load_call(net, specs, None, torch.bfloat16)
    assert [value.dtype for value in call.args] == [torch.bfloat16]
    assert {name: value.dtype for name, value in call.kwargs.items()} == {"scale": torch.float64, "keep": torch.bool}
    assert call.model.linear.weight.dtype is torch.bfloat16


def test_options_reach_the_commands(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def explain(*_: object, **__: object) -> str:
        seen.append((fusepass.current().tune, fusepass.current().cuda_graphs))
        return "report"

    monkeypatch.setattr(fusepass, "explain", explain)
    assert main.main(["explain", net, "--input", "4,6", "--tune", "off", "--graphs"]) == 0
    assert seen == [("off", True)]
    with pytest.raises(SystemExit):
        main.main(["explain", net, "--input", "4,6", "--tune", "much"])


def test_explain_a_step_of_training(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", net, "--input", "4,6", "--train", "--tune", "off", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["capture"] == "dynamo"
    assert report["regions"]
    assert report["backward"]["regions"]


def test_check_finds_the_region_that_is_wrong(
    net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", net, "--input", "4,6", "--input", "scale=4,8", "--tune", "off"]
    assert main.main(arguments) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in out[3:]] == ["right", "right", "right"]

    def doubled(_: FusedRegion, text: CallText) -> tuple[str, dict[str, Any]]:
        return f"{text.source}\nright = run\ndef run(*inputs): return right(*inputs) * 1.0001\n", text.scope

    replace_calls(monkeypatch, doubled)
    assert main.main([*arguments, "--json"]) == 1
    records = {each["name"]: each for each in json.loads(capsys.readouterr().out)["records"]}
    assert [each["verdict"] for each in records.values()] == ["right", "wrong", "wrong"]
    (wrong,) = (each for each in records.values() if each["state"] == "fused")
    assert wrong["operators"] == 5
    assert wrong["fused"] == pytest.approx(1e-4, rel=0.01)
    assert wrong["eager"] < 1e-6


def test_check_takes_numbers_of_parts_that_write_and_draw() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.norm(x).relu() * 2, (x > 0.5).sum(1)

    model, x = Writes(), torch.rand(8, 6)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    errors = fusepass.check(fusepass.optimize(model, tune="off"), x)
    assert errors.ok
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    with pytest.raises(CaptureError, match="has no single graph"):
        fusepass.check(nn.ModuleList([model]), x)
    with pytest.raises(TypeError, match=r"fusepass\.check takes a torch\.nn\.Module"):
        fusepass.check(torch.relu, x)  # type: ignore[arg-type]


def build_command(program: Path) -> list[str]:
    """What the program's first lines say, for ``sh``."""
    line = next(line for line in program.read_text().splitlines() if "-Iinclude" in line)
    plain = re.sub(r"-include \S+", "", line)  # precompiled headers of tests
    return ["sh", "-c", plain.removeprefix("//").strip().replace("-O3", "-O1")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_extracted_region_builds_checks_and_times_itself(
    dtype: str, net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library call before the kernels, whose results are in the file; 16-bit numbers are read back."""
    arguments = [net, "--input", "4,6", "--input", "keep=4,8:bool", "--dtype", dtype, "--tune", "off"]
    with pytest.raises(SystemExit):
        main.main(["extract", *arguments])
    assert main.main(["extract", *arguments, "nothing"]) == 2
    said = capsys.readouterr().err
    assert "there is no region 'nothing'; there are linear_" in said
    name = said.split()[-1]
    assert main.main(["extract", *arguments, name, "--out", "here"]) == 0
    program = tmp_path / "here" / f"{name}.cpp"
    assert f"wrote here/{program.name}" in capsys.readouterr().out
    subprocess.run(build_command(program), cwd=program.parent, check=True)
    done = subprocess.run([program.with_suffix(""), "3"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ": right\ntime: median " in done.stdout
    assert " of 3 runs; " in done.stdout
    data = program.with_suffix(".bin")
    spoiled = bytearray(data.read_bytes())
    spoiled[-1] ^= 64  # the exponent of the last expected number
    data.write_bytes(spoiled)
    done = subprocess.run([program.with_suffix(""), "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "WRONG" in done.stdout


def test_a_region_that_was_left_to_eager_is_built_for_its_program(tmp_path: Path) -> None:
    model = nn.Sequential(nn.GELU(), nn.Softmax(1)).eval()
    program = fusepass.extract(fusepass.optimize(model, tune="off"), "gelu_softmax", tmp_path, torch.rand(3, 5))
    assert program == tmp_path / "gelu_softmax.cpp"
    assert (tmp_path / "gelu_softmax.bin").stat().st_size == 3 * 5 * (4 + 8) + 4  # aligned to 8 bytes
    assert (tmp_path / "include" / "fp_common.h").exists()  # included by a header


@pytest.mark.skipif(shutil.which("nvcc", path="/usr/local/cuda/bin") is None, reason="needs nvcc")
def test_a_program_for_a_gpu_compiles(tmp_path: Path) -> None:
    facts = DeviceFacts.h200()
    program = softmax_rows(4, 64)
    source = render(program, facts)
    held = {each.name: bytes(each.nbytes) for each in program.arguments if each.role is Role.INPUT}
    expected = {
        name: (torch.zeros(program.buffer(name).shape, dtype=torch.float64), Leaf("")) for name in program.outputs
    }
    path = write_program(source, program.arguments, Standalone(held, expected, 1), "a title", tmp_path)
    assert path.suffix == ".cu"
    nvcc = str(toolchain.nvcc().path)
    flags = [*toolchain.flags(source.target, source.arch), "-Iinclude"]
    subprocess.run([nvcc, *flags, "-c", path.name, "-o", "program.o"], cwd=tmp_path, check=True)


def ways_of(call: Call, **models: Any) -> dict[str, compare.Way]:
    ways, _ = compare.compared(call, models, 0.01, train=False)
    return {way.name: way for way in ways}


def test_ways_are_compared_by_time_memory_and_error() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() * 2

    def failing(model: nn.Module) -> Any:
        raise RuntimeError("no compiler\nat all")

    call = Call(Doubled(), (torch.rand(1 << 16) - 0.5,))
    ways = ways_of(call, eager=lambda m: m, wrong=lambda m: lambda x: m(x) * 1.001, failing=failing)
    assert (ways["eager"].right, ways["wrong"].right) == (True, False)
    assert ways["wrong"].error == pytest.approx(1e-3, rel=0.01)
    assert ways["failing"].failed == "RuntimeError: no compiler"
    assert ways["eager"].memory == pytest.approx(2 << 18, abs=256)  # two results of 2^18 bytes at once
    assert all(ways[name].milliseconds > 0 and ways[name].first > 0 for name in ("eager", "wrong"))
    lines = "\n".join(compare._lines("title", list(ways.values()), 3, 100))
    assert "failing failed: RuntimeError: no compiler" in lines
    assert "3 rounds were interrupted" in lines
    assert "WRONG" in lines


def test_compare_prints_three_ways(
    net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inductor takes long; what it would make is the model itself here."""
    modes: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: (modes.append(mode), model)[1])
    arguments = ["compare", net, "--input", "4,6", "--tune", "off", "--seconds", "0.01"]
    assert main.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Net on cpu, torch ")
    assert [line.split()[0] for line in lines[3:6]] == ["eager", "torch.compile", "fusepass"]
    assert main.main([*arguments, "--graphs", "--json"]) == 0
    assert modes == ["default", "reduce-overhead"]
    assert [way["name"] for way in json.loads(capsys.readouterr().out)["ways"]] == [
        "eager",
        "torch.compile",
        "fusepass",
    ]


def test_gradients_of_a_step_are_compared() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def frozen(model: nn.Module) -> nn.Module:
        model[0].weight.requires_grad_(False)  # type: ignore[operator, union-attr]
        return model

    ways, _ = compare.compared(
        Call(model, (torch.rand(3, 4),)), {"eager": lambda m: m, "frozen": frozen}, 0.01, train=True
    )
    assert [way.right for way in ways] == [True, False]
    with pytest.raises(UsageError, match="nothing to train"):
        compare.compared(Call(nn.ReLU(), (torch.rand(3),)), {"eager": lambda m: m}, 0.01, train=True)
