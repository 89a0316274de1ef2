"""The command line: which model it finds, what it prints, and how it ends."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusepass
from fusepass.cli import doctor, main
from fusepass.cli.model import InputSpec, UsageError, load_call
from fusepass.codegen import cache, choices
from fusepass.codegen.source import Source, Target
from fusepass.report.report import CaptureRoute, RegionReport, Report, SourceFile

NET = """
import torch
from torch import nn

class Gelu(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 2.0))

    def forward(self, x):
        return nn.functional.gelu(x) * self.weight

class Two(nn.Module):
    def forward(self, x, index):
        return x.sum() + index.sum()

class Wide(nn.Module):
    def __init__(self, size):
        super().__init__()

    def forward(self):
        return torch.zeros(3)

def pair():
    return Gelu(4), torch.ones(2, 4)

def named():
    return Gelu(1), {"x": torch.ones(1)}

def listed():
    return Two(), [torch.ones(2), torch.zeros(1)]

def broken():
    raise OSError("no weights\\nsecond line")

class holder:
    instance = Gelu(5)

number = 7
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module with models in the current directory."""
    name = "net_of_test_cli"
    (tmp_path / f"{name}.py").write_text(NET)
    (tmp_path / "wrong_of_test_cli.py").write_text("import nowhere_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    for module in (name, "wrong_of_test_cli"):
        sys.modules.pop(module, None)


def region(name: str) -> RegionReport:
    source = SourceFile("k.cpp", None, f"// {name}\n")
    return RegionReport(name, "pointwise", (), (), 2048, 1024, None, "cpu", "", sources=(source,))


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Stands in for `fusepass.explain`; records its arguments and reports two regions of one name."""
    calls: list[tuple[object, ...]] = []

    def explain(model: torch.nn.Module, *inputs: object, **named: object) -> Report:
        calls.append((model, *inputs, *named.items()))
        return Report(type(model).__name__, "cpu", CaptureRoute.TRACED, (region("a/b"), region("a/b")))

    monkeypatch.setattr(fusepass, "explain", explain)
    return calls


def test_input_spec() -> None:
    assert InputSpec.parse("2,3,8,8") == InputSpec((2, 3, 8, 8), None)
    assert InputSpec.parse("4, 0:bfloat16") == InputSpec((4, 0), torch.bfloat16)
    assert InputSpec.parse(":float64") == InputSpec((), torch.float64)
    for text in ("2,x", "-1", "2,,3", "3.5"):
        with pytest.raises(UsageError, match=r"is not \[NAME=\]SIZE"):
            InputSpec.parse(text)
    for text in ("2:float31", "2:nn"):
        with pytest.raises(UsageError, match="is not a torch dtype"):
            InputSpec.parse(text)


def test_inputs_are_the_same_each_time_and_valid_indices() -> None:
    cpu = torch.device("cpu")
    first, second = (InputSpec((100,), torch.float16).tensor(cpu) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype is torch.float16
    assert 0 <= first.min() < 0.1 < 0.9 < first.max() <= 1
    assert torch.equal(InputSpec((2, 3), torch.int64).tensor(cpu), torch.zeros(2, 3, dtype=torch.int64))


def test_a_class_an_instance_a_pair_a_list_and_a_dict(net: str) -> None:
    one = [InputSpec((1, 3), torch.float32)]
    call = load_call(f"{net}:Gelu", one, None)
    assert (type(call.model).__name__, [x.shape for x in call.args]) == ("Gelu", [(1, 3)])
    assert load_call(f"{net}:holder.instance", one, None).model.weight.shape == (5,)
    call = load_call(f"{net}:pair", [], None)
    assert (call.model.weight.shape, [x.tolist() for x in call.args]) == ((4,), [[[1.0] * 4] * 2])
    assert [x.tolist() for x in load_call(f"{net}:listed", [], None).args] == [[1.0, 1.0], [0.0]]
    call = load_call(f"{net}:named", [], None)
    assert (call.args, {name: x.tolist() for name, x in call.kwargs.items()}) == ((), {"x": [1.0]})
    for name in ("pair", "named"):
        call = load_call(f"{net}:{name}", one, None)
        assert ([x.shape for x in call.args], call.kwargs) == ([(1, 3)], {}), "--input goes before the pair's"


@pytest.mark.parametrize("name", ["pair", "named"])
def test_device_moves_model_and_inputs(name: str, net: str) -> None:
    meta = torch.device("meta")
    for specs in ([], [InputSpec((3,), torch.float32)]):
        call = load_call(f"{net}:{name}", specs, meta)
        assert call.device == meta
        assert [x.device for x in (*call.args, *call.kwargs.values())] == [meta]


def test_explain_prints_the_report(net: str, explained: list, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", f"{net}:Two", "--input", "2,3", "--input", "4:int64", "--device", "cpu"]
    assert main.main(argv) == 0
    [(model, x, index)] = explained
    assert type(model).__name__ == "Two"
    assert (x.shape, x.dtype, index.shape, index.dtype) == ((2, 3), torch.float32, (4,), torch.int64)
    out = capsys.readouterr().out
    assert out.startswith("Two on cpu, traced\n")
    assert "memory traffic saved per call: 2.00 KiB of 4.00 KiB (50%)" in out
    assert "// a/b" not in out


def test_explain_passes_keyword_arguments(net: str, explained: list) -> None:
    assert main.main(["explain", f"{net}:named"]) == 0
    [(_, (name, value))] = explained
    assert (name, value.tolist()) == ("x", [1.0])


def test_explain_as_json(net: str, explained: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", f"{net}:pair", "--json", "--sources", "out"]) == 0
    streams = capsys.readouterr()
    assert Report.from_json(streams.out).regions == (region("a/b"),) * 2
    assert streams.err == "wrote 2 sources below out\n"
    assert Path("out/a_b/k.cpp").read_text() == "// a/b\n"
    assert Path("out/a_b_2/k.cpp").read_text() == "// a/b\n"


def test_show_sources(net: str, explained: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", f"{net}:pair", "--show-sources"]) == 0
    assert "\n==> a_b/k.cpp <==\n// a/b\n\n==> a_b_2/k.cpp <==\n// a/b\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere_at_all:x"],
            "importing nowhere_at_all: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        (
            ["wrong_of_test_cli:x"],
            "importing wrong_of_test_cli: ModuleNotFoundError: No module named 'nowhere",
        ),
        (["NET"], "'NET' is not module:attribute, such as net:make_model"),
        ([":make"], "':make' is not module:attribute, such as net:make_model"),
        (["NET:absent"], "looking up NET:absent: AttributeError: module 'NET' has no attribute 'absent'"),
        (["NET:broken"], "calling NET:broken: OSError: no weights"),
        (["NET:Wide"], "calling NET:Wide: TypeError: Wide.__init__() missing 1 required positional argument"),
        (["NET:number"], "NET:number gives int, but must give an nn.Module or a (model, inputs) pair"),
        (
            ["NET:Gelu"],
            "forward() of NET:Gelu does not take 0 inputs: missing a required argument: 'x'; give them",
        ),
        (
            ["NET:Gelu", "--input", "3", "--input", "3"],
            "does not take 2 inputs: too many positional arguments",
        ),
        (["NET:Gelu", "--input", "3,y"], "input '3,y' is not [NAME=]SIZE,SIZE,...[:DTYPE], such as 2,3,8,8:float32"),
        (["NET:Gelu", "--input", "3:f99"], "input '3:f99': 'f99' is not a torch dtype such as float32"),
        (["NET:pair", "--device", "abacus"], "device 'abacus': RuntimeError: "),
        (["NET:pair", "--sources", "NET.py"], "writing the sources: "),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str], message: str, net: str, explained: list, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["explain", *(argument.replace("NET", net) for argument in arguments)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fusepass: error: ")
    assert message.replace("NET", net) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["melt"], ["cache"], ["explain"], ["explain", "a:b", "--json", "--show-sources"]])
def test_arguments_that_do_not_parse(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(argv)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert ": error: " in err
    assert err.count("\n") == 1


def test_a_fault_in_explain_is_one_line(
    net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explain(*_: object) -> Report:
        raise ValueError("device 'meta' is not supported\nmore")

    monkeypatch.setattr(fusepass, "explain", explain)
    assert main.main(["explain", f"{net}:pair"]) == 2
    message = f"fusepass: error: explaining {net}:pair: ValueError: device 'meta' is not supported\n"
    assert capsys.readouterr().err == message
    monkeypatch.setenv("FUSEPASS_DEBUG", "1")
    assert main.main(["explain", f"{net}:pair"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith(message)


def test_a_wrong_variable_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FUSEPASS_DEBUG", "perhaps")
    assert main.main(["cache", "path"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fusepass: error: reading the options: ValueError: FUSEPASS_DEBUG is 'perhaps'")
    assert err.count("\n") == 1


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, in force; what other processes leave in the system's temporary directory is not seen."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return directory


def store(name: str, key: str, library: bytes) -> None:
    """Put `library` into the cache as if a compiler had made it from a source called `name`."""

    def compile(directory: Path) -> Path:
        path = directory / "made.so"
        path.write_bytes(library)
        return path

    cache.store(key, Source(name, "entry", Target.CPU, "// text", (), "native"), compile)


def test_build_and_run(net: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    assert main.main(["build", f"{net}:Gelu", "--input", "2,3", "--out", "net.fuse"]) == 0
    assert re.fullmatch(r"wrote net.fuse, [\d.]+ KiB\n", capsys.readouterr().out)
    assert main.main(["run", "net.fuse"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Gelu, 1 signature"
    assert re.fullmatch(r"float32\[2, 3\] +float32\[2, 3\] +[\d.]+", said[-1])
    assert main.main(["build", f"{net}:Gelu", "--input", "1..3,3", "--out", "net.fuse"]) == 0
    assert main.main(["run", "net.fuse"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "Gelu, 3 signatures"
    assert [line.partition("]")[0] for line in said[-3:]] == [f"float32[{rows}, 3" for rows in (1, 2, 3)]
    assert (
        main.main(["build", f"{net}:Gelu", "--input", "1..40,3", "--dynamic", "--tune", "off", "--out", "net.fuse"])
        == 0
    )
    loaded, x = fusepass.load("net.fuse"), torch.randn(7, 3)
    assert loaded.extra_repr() == "Gelu, 2 signatures"
    torch.testing.assert_close(loaded(x), torch.nn.functional.gelu(x) * 2)
    for wrong in (["3..1,3"], ["1..2,1..3"], ["1..2,3", "--input", "1..3,3"]):
        assert main.main(["build", f"{net}:Gelu", "--input", *wrong, "--out", "net.fuse"]) == 2
        assert "ranges" in capsys.readouterr().err
    assert main.main(["build", f"{net}:Gelu", "--input", "2,3", "--out", "net.fuse", "--arch", "sm_1"]) == 2
    assert "'sm_1' is no architecture" in capsys.readouterr().err
    Path("net.fuse").write_bytes(b"nothing")
    assert main.main(["run", "net.fuse"]) == 2
    assert "net.fuse is damaged" in capsys.readouterr().err


def test_empty_cache(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("list", "verify"):
        assert main.main(["cache", action]) == 0
        assert capsys.readouterr().out == f"the cache is empty: {cache_dir}\n"
    assert main.main(["cache", "path"]) == 0
    assert capsys.readouterr().out == f"{cache_dir}\n"
    assert main.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "freed 0 B\n"


def test_cache_list_verify_and_clear(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store("conv_gelu", "ab" * 32, b"x" * 3000)
    store("layer_norm", "cd" * 32, b"y" * 5000)
    assert main.main(["cache", "list"]) == 0
    head, first, second, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "target", "arch", "size", "built", "key"]
    assert first.split()[:3] == ["conv_gelu", "cpu", "native"]
    assert first.endswith("  abababababab")
    assert second.endswith("  cdcdcdcdcdcd")
    assert total.startswith("2 libraries, 8.")

    assert main.main(["cache", "verify"]) == 0
    assert capsys.readouterr().out == "2 libraries intact\n"
    cache.entries()[1].library.write_bytes(b"z" * 5000)
    assert main.main(["cache", "verify"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("layer_norm ")
    assert lines[2] == "1 of 2 libraries damaged; each is rebuilt when it is needed"

    assert main.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out.startswith("freed 8.")
    assert cache.entries() == []


def test_measured_choices_are_listed_verified_and_cleared(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, speedup in (("ab" * 32, 0.75), ("cd" * 32, 1.5)):
        chosen = {"chosen": "eager" if speedup < 1 else "generated", "speedup": speedup}
        chosen |= {"dropped": [["channels last", "wrong"]]} if speedup > 1 else {}
        choices.store(key, choices.Record("softmax_add", "CPU, 2 cores", "fast", "", chosen))
    assert main.main(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["softmax_add", "eager", "0.75", "fast", "CPU,", "2", "cores", "abababababab"]
    assert "generated (1 dropped)" in lines[2]
    assert lines[-1] == "2 measured choices"
    assert main.main(["cache", "verify"]) == 0
    assert capsys.readouterr().out == "2 measured choices intact\n"
    path = choices.entries()[0].path
    path.write_text(path.read_text().replace("0.75", "1.75"))
    assert main.main(["cache", "verify"]) == 1
    out = capsys.readouterr().out
    assert "(unreadable)" in out
    assert "1 of 2 measured choices damaged" in out
    assert main.main(["cache", "clear"]) == 0
    assert choices.entries() == []


def test_cache_list_fits_a_narrow_terminal(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store("conv_transpose_" * 8, "ab" * 32, b"x")
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main.main(["cache", "list"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


@pytest.mark.parametrize("ok", [True, False])
def test_doctor_ends_with_what_it_found(
    ok: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor.Diagnosis((doctor.Check("ninja", ok, "1.13", "" if ok else "pip install ninja"),))
    monkeypatch.setattr(doctor, "diagnose", lambda environment: found)
    assert main.main(["doctor"]) == (0 if ok else 1)
    assert capsys.readouterr().out == f"{found}\n"
    assert main.main(["doctor", "--json"]) == (0 if ok else 1)
    assert json.loads(capsys.readouterr().out)["ok"] is ok


def test_doctor_adds_what_pytorch_says_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "get_pretty_env_info", lambda: "PyTorch version: of this machine")
    for name in ("_kernel", "_cuda_compiler", "_cache", "_calls"):
        monkeypatch.setattr(doctor, name, lambda *_: doctor.Check("left out", True, ""))
    assert main.main(["doctor", "--environment"]) == 0
    assert capsys.readouterr().out.endswith("\n\nPyTorch version: of this machine\n")
    assert doctor.diagnose().environment == ""


def test_as_a_program(net: str, cache_dir: Path) -> None:
    """The exit status reaches the shell; the current directory is searched for the model."""
    done = subprocess.run(
        [sys.executable, "-m", "fusepass", "explain", f"{net}:number"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"fusepass: error: {net}:number gives int, but must give an nn.Module or a (model, inputs) pair\n"
    )


def test_explain_for_real(net: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Capture to build, as a user runs it: the two operators of the model are one region with one source."""
    assert main.main(["explain", f"{net}:pair", "--json", "--sources", "out"]) == 0
    report = Report.from_json(capsys.readouterr().out)
    assert (report.model, report.capture, report.ops_total, report.ops_fused) == ("Gelu", CaptureRoute.TRACED, 2, 2)
    [found] = report.regions
    assert [op.target for op in found.ops] == ["aten.gelu", "aten.mul"]
    assert {op.location for op in found.ops} == {f"{net}.py:11 in forward"}
    # x and y are 32 bytes each, the weight 16: gelu moves x + y, mul moves y + weight + y.
    assert (found.bytes_before, found.bytes_after) == (64 + 80, 32 + 16 + 32)
    [source] = found.sources
    assert Path("out", found.name, source.name).read_text() == source.text
    assert "normal_cdf" in source.text
    assert [entry.name for entry in cache.entries()] == [found.name]


def test_who_reads_the_output_may_stop(cache_dir: Path) -> None:
    """As in ``fusepass cache list | head``: no fault, and no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "fusepass", "cache", "path"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
