"""Without nvcc: NVRTC takes what the generator emits, and the C++ compiler what launches it. Nothing is launched: that needs a device."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from benchmarks.layers import Workload
from fusepass.cli import doctor
from fusepass.codegen import nvrtc, nvrtc_program, toolchain
from fusepass.codegen.build import build, loaded
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.key import cache_key
from fusepass.codegen.source import Source
from fusepass.config import override
from fusepass.errors import BuildError
from tests.golden_sources.digests import GROUPS, sources

pytestmark = pytest.mark.skipif(
    toolchain.nvrtc() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc cuda-bindings"
)

_EVERY = 40  # a usual run looks at the first of so many workloads of a group


def _cases() -> Iterator[ParameterSet]:
    for group in ("mission", "visible", "extra", "single", "chains", "networks"):
        for number, workload in enumerate(GROUPS[group][0]):
            marks = [pytest.mark.slow] if number % _EVERY else []
            yield pytest.param(group, workload, id=f"{group}-{workload.name}", marks=marks)


@pytest.fixture(autouse=True)
def _no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    def missing() -> toolchain.Compiler:
        raise BuildError("no nvcc was found; install it")

    monkeypatch.setattr(toolchain, "nvcc", missing)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with override(cache_dir=tmp_path / "cache"):
        yield


def _first(group: str, name: str, facts: DeviceFacts) -> Source:
    (workload,) = (each for each in GROUPS[group][0] if each.name == name)
    for _, made in sources(group, workload, facts):
        if isinstance(made, list):
            return made[0]
    pytest.skip("nothing is generated of it")


@pytest.mark.parametrize(("group", "workload"), list(_cases()))
def test_a_source_compiles(group: str, workload: Workload, tmp_path: Path) -> None:
    """The first candidate of the first region of a workload."""
    source = _first(group, workload.name, DeviceFacts.h200())
    host, image = nvrtc.compiled(source, tmp_path), (tmp_path / nvrtc.IMAGE).read_bytes()
    named = dict(re.findall(r'\{\(void\*\)(\w+), "(\w+)"\}', host))
    assert [*named] == re.findall(r"^__global__ .*? (\w+)\($", source.text, re.MULTILINE)
    assert all(name.encode() in image for name in named.values())
    assert image.startswith(b"\x7fELF")
    # Bytes of one character, which Python shares, are as they were: an empty log is one byte.
    assert [chr(number).encode("latin-1")[0] for number in range(256)] == [*range(256)]


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


def test_what_does_not_compile_is_told(tmp_path: Path) -> None:
    source = _first("single", "to_channels_first", DeviceFacts.h200())
    broken = dataclasses.replace(source, text=source.text.replace("{\n    ", "{\n    undeclared();\n    ", 1))
    with pytest.raises(BuildError, match="could not be compiled by NVRTC") as error:
        build(broken)
    assert 'identifier "undeclared" is undefined' in error.value.stderr


def test_a_process_of_its_own_compiles_beside_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _first("single", "to_channels_first", DeviceFacts.h200())
    broken = dataclasses.replace(source, text="broken;\n" + source.text)
    with nvrtc_program._here, monkeypatch.context() as patch:
        patch.setattr(nvrtc_program, "_compiled", None)
        host = nvrtc.compiled(source, _folder(tmp_path / "there"))
        with pytest.raises(BuildError, match="could not be compiled by NVRTC") as error:
            nvrtc.compiled(broken, _folder(tmp_path / "broken"))
    assert "broken" in error.value.stderr
    (name,) = re.findall(r'\{\(void\*\)\w+, "(\w+)"\}', host)
    assert name.encode() in (tmp_path / "there" / nvrtc.IMAGE).read_bytes()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_the_compiler_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    source = _first("single", "to_channels_first", DeviceFacts.h200())
    by_nvrtc = cache_key(source)
    monkeypatch.setattr(toolchain, "nvcc", toolchain.cxx)
    by_nvcc = cache_key(source)
    with override(cuda_compiler="nvrtc"):
        assert cache_key(source) == by_nvrtc != by_nvcc
        monkeypatch.setattr(toolchain, "LAUNCHER_FLAGS", ("-O0",))
        assert cache_key(source) != by_nvrtc


def test_the_doctor_says_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor._nvcc()
    assert check.ok
    assert re.fullmatch(r"no nvcc was found; NVRTC \d+\.\d+ serves: .*libnvrtc.*", check.found)
    monkeypatch.setattr(toolchain, "nvrtc", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor._nvcc().remedy == "install it"
