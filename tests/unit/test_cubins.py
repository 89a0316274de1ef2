"""nvcc or, without it, NVRTC takes what the generator emits, and the C++ compiler what launches it. Nothing is launched: that needs a device."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import importlib.metadata
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from benchmarks.layers import Workload
from fusepass.cli import doctor
from fusepass.codegen import build as build_module
from fusepass.codegen import cubins, nvrtc_program, toolchain
from fusepass.codegen import workers as pool
from fusepass.codegen.build import build, build_all, loaded
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.key import cache_key
from fusepass.codegen.source import Source, Target
from fusepass.config import override
from fusepass.errors import BuildError
from tests.golden_sources.digests import GROUPS, sources

pytestmark = pytest.mark.skipif(toolchain.nvrtc() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")

_EVERY = 40  # a usual run looks at the first of so many workloads of a group


def _cases() -> Iterator[ParameterSet]:
    for group in ("mission", "visible", "extra", "single", "chains", "networks"):
        for number, workload in enumerate(GROUPS[group][0]):
            marks = [pytest.mark.slow] if number % _EVERY else []
            yield pytest.param(group, workload, id=f"{group}-{workload.name}", marks=marks)


@pytest.fixture(autouse=True, params=["nvrtc"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The one that there is: NVRTC, unless a test takes nvcc, too."""

    def missing() -> toolchain.Compiler:
        raise BuildError("no nvcc was found; install it")

    name: str = request.param
    if name == "nvrtc":
        monkeypatch.setattr(toolchain, "nvcc", missing)
    elif shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with override(cache_dir=tmp_path / "cache", cuda_compiler="auto" if name == "nvrtc" else name):
        yield name


by_both = pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"], indirect=True)


def _first(group: str, name: str, facts: DeviceFacts) -> Source:
    (workload,) = (each for each in GROUPS[group][0] if each.name == name)
    for _, made in sources(group, workload, facts):
        if isinstance(made, list):
            return made[0]
    pytest.skip("nothing is generated of it")


def kernels_of(host: str) -> dict[str, str]:
    """What the cubin calls each kernel, as the source that launches it says."""
    return dict(re.findall(r'^FP_KERNEL\((\w+), "(\w+)"', host, re.MULTILINE))


@by_both
@pytest.mark.parametrize(("group", "workload"), list(_cases()))
def test_a_source_compiles(group: str, workload: Workload, tmp_path: Path) -> None:
    """The first candidate of the first region of a workload."""
    source = _first(group, workload.name, DeviceFacts.h200())
    host, image = cubins.compiled([source], tmp_path), (tmp_path / cubins.IMAGE).read_bytes()
    assert [*kernels_of(host)] == re.findall(r"^__global__ .*? (\w+)\($", source.text, re.MULTILINE)
    assert all(f".text.{name}\0".encode() in image for name in kernels_of(host).values())
    assert image.startswith(b"\x7fELF")


@by_both
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_a_library_has_the_entries_of_its_source(arch: str) -> None:
    source = _first("mission", "convt3d_batchnorm_submean", DeviceFacts.described(arch))
    assert source.replay is not None
    library = loaded(build(source))
    for entry in (source.entry, source.replay):
        function = library[entry]
        function.argtypes = [ctypes.c_void_p] * len(
            re.findall(r"^    void\* ", source.text.partition(entry)[2].partition(")")[0], re.MULTILINE)
        )
        if not torch.cuda.is_available():
            assert function(*[None] * len(function.argtypes)) != 0, "there is no device that it could have run on"


@by_both
def test_what_does_not_compile_is_told(tmp_path: Path) -> None:
    source = _first("single", "to_channels_first", DeviceFacts.h200())
    broken = dataclasses.replace(source, text=source.text.replace("{\n    ", "{\n    undeclared();\n    ", 1))
    with pytest.raises(BuildError, match="does not compile for sm_90") as error:
        build(broken)
    assert 'identifier "undeclared" is undefined' in error.value.stderr


@by_both
def test_sources_share_a_library_and_what_does_not_compile_is_told_apart(tmp_path: Path) -> None:
    facts = DeviceFacts.h200()
    sources = [_first("mission", "convt3d_batchnorm_submean", facts), _first("single", "to_channels_first", facts)]
    broken = dataclasses.replace(sources[1], name="broken", entry="run_broken", text="broken;\n" + sources[1].text)
    with override(jobs=1):
        first, second, error = build_all([*sources, broken])
    assert isinstance(error, BuildError)
    assert "broken" in error.stderr
    for made, source in ((first, sources[0]), (second, sources[1])):
        assert isinstance(made, Path)
        assert loaded(made)[source.entry]
    with override(jobs=1, cache_dir=tmp_path / "of two"):
        build_all(sources)
        (library,) = (tmp_path / "of two").rglob("*.so")
        assert all(ctypes.CDLL(str(library))[source.entry] for source in sources)


@pytest.mark.parametrize("compiler", ["nvcc"], indirect=True)
def test_a_full_disk_is_no_fault_of_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = _first("single", "flip", DeviceFacts.h200())
    full = subprocess.CompletedProcess([], 1, "", "cannot write kernels.cubin: No space left on device")
    monkeypatch.setattr(cubins.subprocess, "run", lambda *args, **options: full)
    with pytest.raises(OSError, match="No space left"):
        build_module._load_inline_in([source], "a" * 16, tmp_path)


def _file(path: Path, text: str) -> pool.Kind:
    """Workers that run `text` in place of NVRTC."""
    path.write_text(textwrap.dedent(text))
    return pool.Kind(f"{path}:answer", bounded=False)


def test_a_worker_that_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies_once = f"""
        import os, runpy
        def answer(task):
            if not os.path.exists({str(tmp_path / "died")!r}):
                open({str(tmp_path / "died")!r}, "w").close()
                os.abort()
            return runpy.run_path({nvrtc_program.__file__!r})["answer"](task)
        """
    monkeypatch.setattr(cubins, "COMPILATION", _file(tmp_path / "once.py", dies_once))
    source = _first("single", "to_channels_first", DeviceFacts.h200())
    assert loaded(build(source))[source.entry]
    assert (tmp_path / "died").exists()
    monkeypatch.setattr(
        cubins, "COMPILATION", _file(tmp_path / "ever.py", "import os\ndef answer(task):\n    os.abort()\n")
    )
    for name in ("gelu_small", "gelu_large", "flip", "roll"):
        with pytest.raises(BuildError, match="by NVRTC: a worker that was to work ended with status -6"):
            build(_first("single", name, DeviceFacts.h200()))


@pytest.mark.parametrize("how", ["frozen", "broken"])
def test_where_no_worker_can_be_started_this_process_compiles(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(cubins, "COMPILATION", _file(tmp_path / "broken.py", "raise SystemExit('it does not start')"))
    source = _first("single", "to_channels_first", DeviceFacts.h200())
    assert loaded(build(source))[source.entry]


def test_a_task_that_comes_as_the_last_worker_ends_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real, source = pool.Workers.start, _first("single", "flip", DeviceFacts.h200())
    calls: list[int] = []
    # The first time that one is wanted, one seems to be there.
    monkeypatch.setattr(
        pool.Workers, "start", lambda self, most: calls.append(most) or (len(calls) > 1 and real(self, most))
    )
    monkeypatch.setattr(nvrtc_program, "compiled", None)  # in this process
    monkeypatch.setattr(pool, "_pools", {})
    assert loaded(build(source))[source.entry]


def test_workers_are_no_more_than_compilations_and_serve_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    real = pool._Worker.__init__
    monkeypatch.setattr(pool._Worker, "__init__", lambda self, *given: (started.append(self), real(self, *given))[1])
    sources = [_first("single", name, DeviceFacts.h200()) for name in ("gelu_small", "flip", "roll", "cumsum_odd")]
    for source in sources[:2]:
        assert build(source)
    assert len(started) == 1
    with override(jobs=2):
        assert not [each for each in build_all(sources[2:]) if isinstance(each, BuildError)]
    assert 1 <= len(started) <= 2


def test_a_program_that_ends_waits_for_no_compilation(tmp_path: Path) -> None:
    slow = _file(tmp_path / "slow.py", f"""
        import time
        def answer(task):
            open({str(tmp_path / "started")!r}, "w").close()
            time.sleep(1000)
        """)  # fmt: skip
    (tmp_path / "source").write_bytes(pickle.dumps(_first("single", "flip", DeviceFacts.h200())))
    program = f"""
        import os, pickle, time
        import torch
        from fusepass import background, override
        from fusepass.codegen import cubins
        from fusepass.codegen.build import build
        from fusepass.codegen.workers import Kind
        torch.version.cuda, cubins.COMPILATION = "13.0", {slow!r}
        source = pickle.loads(open({str(tmp_path / "source")!r}, "rb").read())
        with override(cuda_compiler="nvrtc"):
            background.start(background.Job("build", lambda: build(source)))
        while not os.path.exists({str(tmp_path / "started")!r}):
            time.sleep(0.01)
        print([each for path in cubins.Path("/proc/self/task").glob("*/children") for each in path.read_text().split()])
        """
    environment = os.environ | {"FUSEPASS_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    start = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (worker,) = ast.literal_eval(done.stdout)
    while Path(f"/proc/{worker}").exists() and "serving.py" in Path(f"/proc/{worker}/cmdline").read_text():
        assert time.monotonic() < start + 100
        time.sleep(0.01)
    assert not list((tmp_path / "cache").glob("v1/tmp-*"))


def test_the_compiler_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    source = _first("single", "to_channels_first", DeviceFacts.h200())
    by_nvrtc = cache_key(source)
    monkeypatch.setattr(toolchain, "nvcc", toolchain.cxx)
    with override(cuda_compiler="nvcc"):
        by_nvcc = cache_key(source)
    with override(cuda_compiler="nvrtc"):
        assert cache_key(source) == by_nvrtc != by_nvcc
        monkeypatch.setattr(toolchain, "LAUNCHER_FLAGS", ("-O0",))
        assert cache_key(source) != by_nvrtc


@pytest.mark.parametrize(("version", "first"), [("13.0.88", "nvcc"), ("13.1.0", "nvrtc"), ("14.0.1", "nvrtc")])
def test_one_that_makes_other_code_goes_behind_nvcc(version: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.setattr(toolchain, "_nvrtc_is_as_good", toolchain._nvrtc_is_as_good.__wrapped__)
    assert toolchain.cuda_compiler().is_nvrtc, "there is no other one"
    monkeypatch.setattr(toolchain, "nvcc", toolchain.cxx)
    assert toolchain.cuda_compiler().is_nvrtc == (first == "nvrtc")
    for wanted in ("nvcc", "nvrtc"):
        with override(cuda_compiler=wanted):
            assert toolchain.cuda_compiler().is_nvrtc == (wanted == "nvrtc")


def test_the_doctor_says_what_serves_and_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor._cuda_compiler()
    assert check.ok
    assert re.fullmatch(r"/.*libnvrtc.*: NVRTC \d+\.\d+", check.found)
    source = doctor._source(Target.CUDA, "sm_90")
    assert loaded(build(source))[source.entry]
    monkeypatch.setattr(toolchain, "nvrtc", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor._cuda_compiler().remedy == "install it"
