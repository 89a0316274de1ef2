"""Finding compilers, their flags and identity, and the facts of devices."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusepass.codegen import toolchain
from fusepass.codegen.detect import device_facts
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.source import Target
from fusepass.errors import BuildError


def program(path: Path, text: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is searched for programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "_pip_nvcc", lambda: None)
    monkeypatch.setattr(toolchain, "nvrtc", lambda: None)
    return folder


def test_the_first_of_the_usual_compilers_is_taken(path: Path) -> None:
    clang = program(path / "clang++")
    assert toolchain.cxx().path == clang
    gcc = program(path / "g++")
    assert toolchain.cxx().path == gcc
    usual = program(path / "c++")
    assert toolchain.cxx().path == usual


def test_cxx_names_the_compiler(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path / "c++")
    mine = program(path / "mine")
    monkeypatch.setenv("CXX", "mine")
    assert toolchain.cxx().path == mine
    monkeypatch.setenv("CXX", "missing")
    with pytest.raises(BuildError, match="CXX is 'missing', which is no program"):
        toolchain.cxx()


def test_without_a_compiler_the_error_says_what_to_install(path: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found; install one .*g\+\+.*CXX"):
        toolchain.cxx()


def test_cuda_home_goes_before_the_path(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = program(path / "nvcc")
    assert toolchain.nvcc().path == on_path
    of_home = program(tmp_path / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert toolchain.nvcc().path == of_home
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    with pytest.raises(BuildError, match=r"no nvcc in .*empty/bin; .*fusepass\[cuda13\].*CUDA_HOME"):
        toolchain.nvcc()


def test_pip_s_nvcc_goes_before_the_path(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path / "nvcc")
    of_pip = program(tmp_path / "cu13" / "bin" / "nvcc")
    of_home = program(tmp_path / "cuda" / "bin" / "nvcc")
    monkeypatch.setattr(toolchain, "_pip_nvcc", lambda: str(of_pip))
    assert toolchain.nvcc().path == of_pip
    assert toolchain.cuda_home() == tmp_path / "cu13"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert toolchain.nvcc().path == of_home


def test_pip_s_nvcc_is_asked_for_where_its_package_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder = SimpleNamespace(find_nvidia_binary_utility=lambda name: f"/somewhere/{name}")
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", finder)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    find = toolchain._pip_nvcc.__wrapped__
    assert find() is None
    (tmp_path / "nvidia_cuda_nvcc-13.0.dist-info").mkdir()
    (tmp_path / "nvidia_cuda_nvcc-13.0.dist-info" / "METADATA").write_text("Name: nvidia-cuda-nvcc\nVersion: 13.0\n")
    assert find() == "/somewhere/nvcc"


def test_the_toolkit_is_that_of_the_nvcc_that_runs(path: Path, tmp_path: Path) -> None:
    real = program(tmp_path / "cuda" / "bin" / "nvcc")
    (real.parent / "nvcc.profile").touch()
    linked = path / "nvcc"
    linked.symlink_to(real)
    assert toolchain.cuda_home() == tmp_path / "cuda"
    linked.unlink()
    toolchain._home_of.cache_clear()
    program(path / "nvcc", f"echo '#$ TOP={real.parent}/..' >&2")
    assert toolchain.cuda_home() == tmp_path / "cuda"
    toolchain._home_of.cache_clear()
    program(path / "nvcc")
    assert toolchain.cuda_home() == tmp_path


def test_the_runtime_library_is_named_where_the_linker_would_not_find_it(tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    assert toolchain.versioned_cudart(tmp_path) is None
    (folder / "libcudart.so.13").touch()
    assert toolchain.versioned_cudart(tmp_path) == folder / "libcudart.so.13"
    (folder / "libcudart.so").touch()
    assert toolchain.versioned_cudart(tmp_path) is None


def test_ninja_beside_this_python_is_found(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path / "c++")
    scripts = tmp_path / "scripts"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(scripts))
    with pytest.raises(BuildError, match="no ninja was found; install it with `pip install ninja`"):
        toolchain.environment()
    program(scripts / "ninja")
    assert toolchain.environment() == {"PATH": f"{scripts}{os.pathsep}{path}"}


def test_load_inline_is_told_of_a_compiler_it_would_not_try(path: Path) -> None:
    program(path / "ninja")
    gcc = program(path / "g++")
    assert toolchain.environment() == {"CXX": str(gcc)}
    program(path / "c++")
    assert toolchain.environment() == {}


@pytest.mark.parametrize(("target", "arch"), [(Target.CPU, "native"), (Target.CUDA, "sm_90"), (Target.CUDA, "sm_80")])
@pytest.mark.invariant(16)
def test_no_flag_gives_up_ieee_arithmetic(target: Target, arch: str) -> None:
    given = " ".join(toolchain.flags(target, arch))
    for flag in ("fast-math", "fast_math", "Ofast", "finite-math", "associative", "reciprocal", "ftz=true"):
        assert flag not in given


@pytest.mark.parametrize(("arch", "number"), [("sm_90", "90a"), ("sm_80", "80"), ("sm_100", "100")])
def test_cuda_code_is_for_one_architecture(arch: str, number: str) -> None:
    code = [flag for flag in toolchain.flags(Target.CUDA, arch) if "arch" in flag]
    assert code == [f"-gencode=arch=compute_{number},code=sm_{number}"]


def test_a_compiler_is_known_by_its_file(path: Path) -> None:
    gcc = program(path / "g++")
    before = toolchain.identity(Target.CPU)
    assert toolchain.identity(Target.CPU) == before
    os.utime(gcc, ns=(1, 1))
    assert toolchain.identity(Target.CPU) == before, "as where the same package was installed at another time"
    program(gcc, "exit 1")
    assert toolchain.identity(Target.CPU) != before


def test_a_large_program_is_known_by_pieces_of_it(path: Path) -> None:
    gcc = path / "g++"
    content = bytearray(os.urandom(9_000_000))
    identities = set()
    for number, place in enumerate((0, 9_000_000 // 32)):
        content[place] ^= 1
        gcc.write_bytes(content)
        gcc.chmod(0o755)
        os.utime(gcc, ns=(number, number))
        identities.add(toolchain.cxx().identity)
    assert len(identities) == 2


def test_both_compilers_count_for_cuda(path: Path) -> None:
    program(path / "g++")
    program(path / "nvcc")
    assert toolchain.cxx().identity in toolchain.identity(Target.CUDA)
    assert toolchain.nvcc().identity in toolchain.identity(Target.CUDA)


def test_variables_that_reach_nvcc_unseen_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path / "g++")
    program(path / "nvcc")
    before = toolchain.identity(Target.CUDA), toolchain.identity(Target.CPU)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    assert toolchain.identity(Target.CUDA) != before[0]
    assert toolchain.identity(Target.CPU) == before[1]


def test_identities_run_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        pytest.fail("a program was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    toolchain.cpu_identity.cache_clear()
    toolchain.identity(Target.CPU)


def test_the_version_is_the_line_with_the_number(path: Path) -> None:
    program(path / "nvcc", 'echo "a vendor"\necho "release 13.0"\n')
    assert toolchain.nvcc().version() == "release 13.0"
    program(path / "nvcc", "echo broken >&2\nexit 3")
    with pytest.raises(BuildError, match="does not run") as error:
        toolchain.nvcc().version()
    assert error.value.stderr == "broken\n"


def test_the_described_h200() -> None:
    facts = DeviceFacts.h200()
    assert (facts.target, facts.arch, facts.multiprocessors) == (Target.CUDA, "sm_90", 132)
    assert (facts.l2_bytes, facts.shared_bytes_per_block) == (62914560, 232448)
    assert (facts.registers, facts.max_threads, facts.bandwidth) == (65536, 2048, 4.27e12)


def test_facts_of_a_driver_are_those_of_the_described_h200() -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        L2_cache_size=62914560,
        memory_clock_rate=3201000,
        memory_bus_width=6144,
    )
    facts = DeviceFacts.cuda(properties)
    assert facts.bandwidth == pytest.approx(4.27e12, rel=0.01)
    assert dataclasses.replace(facts, bandwidth=4.27e12) == DeviceFacts.h200()


def test_facts_of_the_cpu() -> None:
    facts = device_facts(torch.device("cpu"))
    assert facts == DeviceFacts.cpu()
    assert facts.cores == facts.multiprocessors == len(os.sched_getaffinity(0))
    assert DeviceFacts.cpu(cores=4).bandwidth == 4 * DeviceFacts.cpu(cores=1).bandwidth


def test_other_devices_have_no_facts() -> None:
    with pytest.raises(ValueError, match="device meta; allowed are cpu and cuda"):
        device_facts(torch.device("meta"))


def test_the_header_folder_is_in_the_package() -> None:
    assert toolchain.include_directory().is_dir()
    assert toolchain.include_directory().parent == Path(sys.modules["fusepass.templates"].__path__[0])
