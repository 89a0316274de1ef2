"""Builds with the real compilers: what runs, what is said when it does not, and what a warm start costs."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fusepass.background import threads_soon
from fusepass.cli import doctor
from fusepass.cli.doctor import diagnose
from fusepass.codegen import build as builds
from fusepass.codegen import cache, toolchain
from fusepass.codegen.build import build, build_all, load
from fusepass.codegen.detect import device_facts
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.source import Source, Target
from fusepass.codegen.units import joined
from fusepass.config import override
from fusepass.errors import BuildError
from tests.support import precompiled

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def scale(factor: int, name: str = "scale") -> Source:
    """``out[i] = factor * in[i]`` for 1000 floats, in parallel."""
    text = f"""\
extern "C" int run(const float* in, float* out, void*) {{
    #pragma omp parallel for
    for (int i = 0; i < 1000; ++i) out[i] = {factor} * in[i];
    return 0;
}}
"""
    return Source(name, "run", Target.CPU, text, (), "native")


SCALE = """\
#include "fp_launch.cuh"

namespace {

__global__ void __launch_bounds__(1024) scale(
    const float* __restrict__ in,
    float* __restrict__ out)
{
    out[threadIdx.x] = in[threadIdx.x] * 3.f + 1.f;
}

}  // namespace

extern "C" int run(void* in, void* out, void* stream)
{
    fp::launch<scale>(1, 1000, 0, stream, static_cast<const float*>(in), static_cast<float*>(out));
    return cudaGetLastError();
}
"""


def cuda(arch: str) -> Source:
    return Source("scale", "run", Target.CUDA, SCALE, ("fp_launch.cuh",), arch)


def run(library: Path) -> torch.Tensor:
    given = torch.arange(1000, dtype=torch.float32)
    out = torch.full_like(given, -1)
    assert load(library, "run", arguments=2)(given.data_ptr(), out.data_ptr(), 0) == 0
    return out


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line for each compilation."""
    log = tmp_path / "compilations"
    log.touch()
    wrapper = tmp_path / "logged-g++"
    wrapper.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) echo compiled >> {log};; esac\nexec {toolchain.cxx().path} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return log


@pytest.mark.usefixtures("directory")
def test_a_built_library_computes() -> None:
    assert torch.equal(run(build(scale(3))), 3 * torch.arange(1000.0))


@pytest.mark.usefixtures("directory")
@pytest.mark.invariant(18)
def test_a_built_library_needs_no_torch() -> None:
    program = f"import ctypes, sys; ctypes.CDLL({str(build(scale(3)))!r}).run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.usefixtures("directory")
def test_the_linker_reads_no_library_of_torch(tmp_path: Path) -> None:
    library = builds._load_inline([scale(3)], 16 * "0", tmp_path)
    (flags,) = re.findall(r"^ldflags = (.*)", (tmp_path / "build.ninja").read_text(), re.MULTILINE)
    named = re.findall(r"-l((?:c10|torch)\w*)", flags)
    first = re.findall(r"-L(\S+)", flags)[0]
    assert {"c10", "torch_cpu"} <= {*named}
    assert all((tmp_path / first / f"lib{name}.a").read_bytes() == b"!<arch>\n" for name in named)
    assert torch.equal(run(library), 3 * torch.arange(1000.0))


@pytest.mark.usefixtures("directory")
def test_equal_sources_are_built_once(compiler_log: Path) -> None:
    sources = [scale(2), scale(5), scale(2, name="again"), scale(2)]
    results = build_all(sources)
    assert [run(path)[1].item() for path in results if isinstance(path, Path)] == [2, 5, 2, 2]
    assert results[0] == results[2] == results[3]
    assert compiler_log.read_text().splitlines() == 2 * ["compiled"]
    assert build_all(sources) == results
    assert compiler_log.read_text().splitlines() == 2 * ["compiled"]


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("jobs", [1, 3])
def test_as_many_are_built_at_once_as_there_are_jobs(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, at_once, most = threading.Lock(), 0, 0
    all_there = threading.Barrier(jobs)

    def slow(_: Sequence[Source], __: str, directory: Path) -> Path:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        all_there.wait(30)
        time.sleep(0.05)  # one more would come meanwhile
        with lock:
            at_once -= 1
        (directory / "out.so").touch()
        return directory / "out.so"

    monkeypatch.setattr(builds, "_load_inline", slow)
    with override(jobs=jobs):
        build_all([scale(factor) for factor in range(3)])
    assert most == jobs


def test_threads_are_let_in_soon_while_somebody_wants_it() -> None:
    usual = sys.getswitchinterval()
    with threads_soon():
        soon = sys.getswitchinterval()
        with threads_soon():
            assert sys.getswitchinterval() == soon < usual / 10
        assert sys.getswitchinterval() == soon
    assert sys.getswitchinterval() == usual


@pytest.mark.usefixtures("directory")
def test_a_build_goes_on_beside_what_else_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun is not built again; with one job nothing is begun."""
    real, built, begun = builds._load_inline, [], threading.Event()

    def logged(sources: Sequence[Source], key: str, directory: Path) -> Path:
        built.append(joined(sources).text)
        begun.set()
        return real(sources, key, directory)

    monkeypatch.setattr(builds, "_load_inline", logged)
    with override(jobs=1):
        builds.begin(scale(11))
    assert not built
    with override(jobs=2):
        builds.begin(scale(11))
        assert begun.wait(60)
        builds.begin(scale(12))  # as many are under way as may be
        found = build_all([scale(11), scale(12)])
        builds.begin(scale(11))  # which is there
    assert [run(path)[1].item() for path in found if isinstance(path, Path)] == [11, 12]
    assert sorted(built) == sorted([scale(11).text, scale(12).text])


@pytest.mark.usefixtures("directory")
def test_what_was_begun_and_fails_is_told_by_who_waits_for_it() -> None:
    broken = Source("broken", "run", Target.CPU, "int g() { return missing_name; }\n", (), "native")
    with override(jobs=4):
        builds.begin(broken)
        (failed,) = build_all([broken])
    assert isinstance(failed, BuildError)
    assert "missing_name" in failed.stderr


@pytest.mark.usefixtures("directory")
def test_one_broken_source_does_not_stop_the_others() -> None:
    broken = Source("broken", "run", Target.CPU, "int f() { return missing_name; }\n", (), "native")
    good, bad = build_all([scale(7), broken])
    assert isinstance(good, Path)
    assert run(good)[1] == 7
    assert isinstance(bad, BuildError)
    assert "broken does not compile for native" in str(bad)
    assert "missing_name" in bad.stderr
    assert "ninja" not in bad.stderr
    assert "-march=native" in bad.command
    assert bad.path is not None
    assert bad.path.read_text() == broken.text
    with pytest.raises(BuildError, match="missing_name"):
        build(broken)


@pytest.mark.usefixtures("directory")
def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found; install one .*apt install g\+\+"):
        build(scale(2))


@pytest.mark.usefixtures("directory")
def test_ninja_and_compiler_need_not_be_on_the_path_as_torch_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: tmp_path / name for name in ("bin", "scripts")}
    ninja, cxx = toolchain.ninja().resolve(), toolchain.cxx().path.resolve()
    for folder in folders.values():
        folder.mkdir()
    (folders["scripts"] / "ninja").symlink_to(ninja)
    (folders["bin"] / "g++").symlink_to(cxx)
    for tool in ("sh", "as", "ld"):
        (folders["bin"] / tool).symlink_to(shutil.which(tool) or pytest.skip(f"needs {tool}"))
    monkeypatch.setenv("PATH", str(folders["bin"]))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name, **_: str(folders["scripts"]))
    before = dict(os.environ)
    assert run(build(scale(2)))[1] == 2
    assert dict(os.environ) == before


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
@needs_nvcc
@pytest.mark.usefixtures("directory")
def test_a_torch_without_cuda_is_named() -> None:
    with pytest.raises(BuildError, match=r"scale needs CUDA, and this PyTorch .* has none"):
        build(cuda("sm_90"))


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")
@pytest.mark.skipif(toolchain._pip_nvcc() is None, reason="needs nvcc by pip: fusepass[cuda13]")
@pytest.mark.usefixtures("directory")
def test_pip_s_toolkit_builds_what_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    with override(cuda_compiler="nvcc"):
        library = build(cuda("sm_90"))
    assert load(library, "run", 2)(None, None, None) != 0 or torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_a_cuda_library_computes_on_the_stream_it_is_given(compiler: Any) -> None:
    source = cuda(device_facts(torch.device("cuda")).arch)
    with override(cuda_compiler=compiler):
        run = load(build(source), "run", arguments=2)
    given = torch.arange(1000, device="cuda", dtype=torch.float32) / 4
    out = torch.zeros_like(given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    assert run(given.data_ptr(), out.data_ptr(), stream.cuda_stream) == 0
    stream.synchronize()
    assert torch.equal(out, 3 * given + 1)


@pytest.mark.gpu
def test_facts_of_this_device_match_the_description_of_its_kind() -> None:
    facts = device_facts(torch.device("cuda"))
    if facts.name != DeviceFacts.h200().name:
        pytest.skip("only the H200 is described")
    assert facts.bandwidth == pytest.approx(DeviceFacts.h200().bandwidth, rel=0.02)
    assert dataclasses.replace(facts, bandwidth=DeviceFacts.h200().bandwidth) == DeviceFacts.h200()


@pytest.mark.usefixtures("directory")
def test_what_cannot_be_loaded_is_a_build_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cannot be loaded.*absent"):
        load(build(scale(2)), "absent", arguments=2)
    (tmp_path / "no.so").write_text("no library")
    with pytest.raises(BuildError, match=r"cannot be loaded.*no\.so"):
        load(tmp_path / "no.so", "run", arguments=2)


def script(source: Source, body: str) -> list[str]:
    """A command that runs `body`, which builds `source`, in a process of its own."""
    start = f"""\
        import subprocess, sys, time
        from fusepass.codegen.build import build
        from fusepass.codegen.source import Source, Target
        source = Source({source.name!r}, "run", Target.CPU, {source.text!r}, (), "native")
        """
    return [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(body)]


@pytest.mark.usefixtures("directory")
@pytest.mark.invariant(20)
def test_two_processes_build_a_source_once(compiler_log: Path, tmp_path: Path) -> None:
    body = f"""\
        import pathlib
        here = pathlib.Path({str(tmp_path)!r})
        (here / f"ready-{{sys.argv[1]}}").touch()
        while not all((here / f"ready-{{i}}").exists() for i in "01"):
            time.sleep(0.01)
        print(build(source))
        """
    processes = [
        subprocess.Popen([*script(scale(11), body), number], stdout=subprocess.PIPE, text=True) for number in "01"
    ]
    libraries = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert libraries[0] == libraries[1]
    assert run(Path(libraries[0]))[1] == 11
    assert compiler_log.read_text().splitlines() == ["compiled"]


@pytest.mark.usefixtures("directory")
def test_a_warm_start_runs_no_program_and_imports_no_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "CPU_FLAGS", precompiled.PLAIN)
    library = build(scale(2))
    body = """\
        def started(*_, **__):
            raise SystemExit("a program was started")
        subprocess.Popen = started
        print(build(source))
        print("torch.utils.cpp_extension" in sys.modules)
        """
    done = subprocess.run(script(scale(2), body), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(library), "False"]


@pytest.mark.usefixtures("directory")
def test_what_is_built_as_the_interpreter_ends_is_built_in_silence() -> None:
    body = """\
        import threading
        ended = threading.Event()
        threading._register_atexit(ended.set)  # what a pool does, after which it takes nothing
        thread = threading.Thread(target=lambda: (ended.wait(), time.sleep(0.1), print(build(source))), daemon=True)
        thread.start()
        import atexit
        atexit.register(thread.join)
        """
    done = subprocess.run(script(scale(5), body), capture_output=True, text=True, check=True)
    told = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]  # which PyTorch logs
    assert told == []
    assert run(Path(done.stdout.strip()))[1] == 5


@pytest.mark.usefixtures("directory")
@pytest.mark.invariant(20)
def test_a_damaged_library_is_built_anew() -> None:
    library = build(scale(2))
    damaged = library.with_suffix(".damaged")
    damaged.write_bytes(library.read_bytes()[:-1] + b"?")
    damaged.rename(library)  # the file itself is mapped into this process, which would crash as it ends
    with pytest.warns(match="damaged; it is built anew"):
        assert run(build(scale(2)))[1] == 2
    assert cache.verify() == []


ODD = "a b$HOME:'c\"\n#%41{d}|\\*é~;&"


@pytest.mark.parametrize("temporary", ["plain", ODD])
def test_a_cache_may_be_called_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str) -> None:
    directory = tmp_path / ODD / ODD
    (tmp_path / temporary).mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / temporary))
    monkeypatch.setenv("TMPDIR", str(tmp_path / temporary))
    with override(cache_dir=directory), warnings.catch_warnings(action="error"):
        library = build(scale(2))
        assert directory in library.parents
        assert torch.equal(run(library), 2 * torch.arange(1000, dtype=torch.float32))
        assert cache.lookup(library.parent.name) == library
        broken = build_all([dataclasses.replace(scale(2), text="no C++")])[0]
    assert isinstance(broken, BuildError)
    assert "does not compile" in str(broken)
    assert broken.path is not None
    assert broken.path.parent == directory / "v1" / "failed"
    assert [path.name for path in (tmp_path / temporary).iterdir() if path.name.startswith("fusepass-")] == []


@pytest.mark.usefixtures("directory")
def test_a_loaded_library_stays_whatever_becomes_of_its_file() -> None:
    library = build(scale(7))
    assert run(library)[1] == 7
    cache.clear()
    assert run(library)[1] == 7


@pytest.mark.usefixtures("directory")
def test_the_doctor_builds_and_runs_a_kernel() -> None:
    diagnosis = diagnose()
    assert diagnosis.ok, str(diagnosis)
    assert [check.name for check in diagnosis.checks[:7]] == [
        "python",
        "torch",
        "C++ compiler",
        "ninja",
        "CUDA compiler",
        "cache",
        "CPU kernel",
    ]
    assert "ok  CPU kernel     built in" in str(diagnosis)
    assert cache.entries() == [], "the doctor's kernel does not stay"


@pytest.mark.parametrize(("release", "ok"), [("13.2", True), ("12.8", False)])
def test_the_doctor_compares_nvcc_with_torch(release: str, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check = doctor._of_torch(
        doctor.Check("nvcc", True, f"/bin/nvcc: Cuda compilation tools, release {release}, V{release}.1")
    )
    assert check.ok == ok
    assert check.remedy == ("" if ok else "pip install 'fusepass[cuda13]'")


@pytest.mark.usefixtures("directory")
def test_the_doctor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "missing")
    diagnosis = diagnose()
    assert not diagnosis.ok
    failed = {check.name: check for check in diagnosis.checks if not check.ok and check.name != "CUDA kernel"}
    assert list(failed) == ["C++ compiler", "CPU kernel"]
    assert failed["C++ compiler"].remedy.startswith("install one (for example `apt install g++`)")
    assert "FAIL  C++ compiler" in str(diagnosis)
    assert "-> install one" in str(diagnosis)
