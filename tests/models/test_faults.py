"""Faults of the surroundings: the model still runs, one warning says why, and the report counts it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.codegen import build, cache, cache_folders, toolchain
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import check
from fusepass.report.report import RegionState

pytestmark = pytest.mark.models

X = torch.randn(4, 12)


def make_model() -> nn.Module:
    """Two regions, each with its matrix product."""
    return nn.Sequential(
        nn.Linear(12, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 6), nn.Tanh(), nn.Softmax(-1)
    ).eval()


@pytest.fixture(autouse=True)
def _cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache of this test's own; what replaced it in this process is forgotten afterwards."""
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folders, "_private", {})
    yield
    for path in tmp_path.rglob("*"):
        if path.is_dir():
            path.chmod(0o700)


def run(model: nn.Module, calls: int = 3) -> tuple[OptimizedModule, list[str]]:
    """`model` optimised and called several times with right results, and the warnings of fusepass meanwhile."""
    optimised = fusepass.optimize(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(calls):
            outcome = check(model, optimised, (X,))
            assert outcome.ok, outcome.explain()
        other = torch.randn(3, 12)  # another signature fails in the same way
        outcome = check(model, optimised, (other,))
        assert outcome.ok, outcome.explain()
    return optimised, [str(entry.message) for entry in seen if issubclass(entry.category, FusepassWarning)]


def assert_fell_back(optimised: OptimizedModule, warned: list[str], cause: str) -> None:
    """Nothing is fused; one warning and the report say that it is because of `cause`."""
    assert len(warned) == 1, warned
    assert cause in warned[0]
    assert "python -m fusepass doctor" in warned[0]
    report = optimised.report()
    assert len(report.regions) == 4  # two of each signature
    assert {region.state for region in report.regions} == {RegionState.FALLBACK}
    assert all(cause in str(region.reason) for region in report.regions)
    assert {entry.where for entry in report.fallbacks} == {region.name for region in report.regions}
    assert all(cause in entry.reason for entry in report.fallbacks)
    assert report.ops_fused == 0
    assert report.bytes_saved == 0
    assert cause in report.to_json()
    assert "fallback" in str(report).lower()


def assert_fused(optimised: OptimizedModule) -> None:
    report = optimised.report()
    assert report.fallbacks == ()
    assert {region.state for region in report.regions} == {RegionState.FUSED}


# ---- no compiler


def test_no_compiler_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert_fell_back(*run(make_model()), "no C++ compiler was found")


def test_a_compiler_that_is_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_fell_back(*run(make_model()), "CXX is 'no-such-compiler', which is no program")


def test_no_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(
        toolchain.shutil, "which", lambda name, path=None: None if name == "ninja" else which(name, path=path)
    )
    assert_fell_back(*run(make_model()), "no ninja was found")


# ---- a build that fails


def compiler(tmp_path: Path, body: str) -> str:
    path = tmp_path / "broken-c++"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return str(path)


def test_a_compiler_that_rejects_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("c++")
    script = f'case "$*" in *-march=native*) echo "error: not today" >&2; exit 1;; *) exec {real} "$@";; esac'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    optimised, warned = run(make_model())
    assert_fell_back(optimised, warned, "does not compile for")
    failed = list((tmp_path / "cache" / "v1" / "failed").iterdir())
    assert {path.read_text() for path in failed} == {
        source.text for region in optimised.report().regions for source in region.sources
    }


def test_a_compiler_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 127"))
    assert_fell_back(*run(make_model()), "returned non-zero exit status 127")


def test_one_source_that_does_not_compile_leaves_the_others_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    load_inline = build._load_inline

    def broken(sources: Any, key: str, directory: Path) -> Path:
        if any("tanh(" in source.text for source in sources):
            raise fusepass.errors.BuildError(f"{sources[0].name} does not compile for {sources[0].arch}")
        return load_inline(sources, key, directory)

    monkeypatch.setattr(build, "_load_inline", broken)
    optimised = fusepass.optimize(make_model())
    with pytest.warns(FusepassWarning, match=r"does not compile.*python -m fusepass doctor") as seen:
        outcome = check(optimised.original, optimised, (X,))
    assert outcome.ok, outcome.explain()
    assert len(seen) == 1
    states = [region.state for region in optimised.report().regions]
    assert sorted(states) == [RegionState.FALLBACK, RegionState.FUSED]
    assert len(optimised.report().fallbacks) == 1


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(path: str) -> Any:
        raise OSError(f"{path}: failed to map segment from shared object")

    model = make_model()
    run(model)  # load_inline, too, loads what it builds
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build.ctypes, "CDLL", nothing)
    assert_fell_back(*run(model), "a built library cannot be loaded")


def test_a_later_call_is_fused_once_the_compiler_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with monkeypatch.context() as broken:
        broken.setenv("CXX", "no-such-compiler")
        optimised, _ = run(model)
    monkeypatch.delenv("CXX", raising=False)
    again, warned = run(model)
    assert warned == []
    assert_fused(again)
    assert optimised.report().ops_fused == 0


def test_no_kernel_for_misaligned_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kernel, for inputs that are not aligned, is built at the first such call; its failure shows too."""
    model = nn.Sequential(nn.GELU(), nn.LayerNorm(12))
    optimised = fusepass.optimize(model)
    flat = torch.randn(49)
    with torch.no_grad():
        optimised(X)
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path))  # which has none either
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                torch.testing.assert_close(optimised(flat[1:].view(4, 12)), model(flat[1:].view(4, 12)))
    (warned,) = [str(entry.message) for entry in seen]
    assert "no-such-compiler" in warned
    assert "python -m fusepass doctor" in warned
    (fallback,) = optimised.report().fallbacks
    assert "unaligned" in fallback.reason
    assert fallback.count == 3


# ---- cache directory


@pytest.mark.skipif(os.getuid() == 0, reason="nothing is unwritable for root")
def test_a_cache_directory_without_write_permission(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    assert_served_elsewhere(tmp_path, "Permission denied")


def test_a_cache_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert_served_elsewhere(tmp_path, "File exists")


def test_a_cache_directory_below_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert_served_elsewhere(tmp_path, "Not a directory")


def test_a_cache_directory_open_to_all(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert_served_elsewhere(tmp_path, "others may write to it")


def assert_served_elsewhere(tmp_path: Path, cause: str) -> None:
    """The model is fused all the same, from a private directory; one warning says why."""
    optimised, warned = run(make_model())
    assert len(warned) == 1, warned
    assert cause in warned[0]
    assert "python -m fusepass doctor" in warned[0]
    assert_fused(optimised)
    sources = [source.path for region in optimised.report().regions for source in region.sources]
    assert sources
    for path in sources:
        assert path is not None
        assert path.is_file()
        assert tmp_path / "cache" not in path.parents


def test_the_cache_is_the_user_s_alone(tmp_path: Path) -> None:
    optimised, warned = run(make_model())
    assert warned == []
    assert_fused(optimised)
    for path in [tmp_path / "cache", *(p for p in (tmp_path / "cache").rglob("*") if p.is_dir())]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


# ---- full disk


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_when_the_compiler_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", full)
    optimised, warned = run(make_model())
    report = optimised.report()
    assert {region.state for region in report.regions} == {RegionState.FALLBACK}
    assert all("No space left on device" in str(region.reason) for region in report.regions)
    assert len(warned) == 2, warned  # that another directory is tried, and that it is full too
    assert all("No space left on device" in text and "python -m fusepass doctor" in text for text in warned)


def test_a_disk_that_is_full_in_the_cache_directory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdtemp = cache.tempfile.mkdtemp

    def full_there(*args: Any, **kwargs: Any) -> str:
        if str(kwargs.get("dir", "")).startswith(str(tmp_path / "cache")):
            full()
        return mkdtemp(*args, **kwargs)

    monkeypatch.setattr(cache.tempfile, "mkdtemp", full_there)
    assert_served_elsewhere(tmp_path, "No space left on device")


def test_no_directory_at_all_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a temporary one: a read-only container."""
    monkeypatch.setattr(cache.tempfile, "mkdtemp", full)
    optimised, warned = run(make_model())
    assert_fell_back(optimised, warned, "No space left on device")


# ---- a damaged cache


def test_a_damaged_library_is_built_anew(tmp_path: Path) -> None:
    model = make_model()
    run(model)
    for library in (tmp_path / "cache").rglob("*.so"):
        damaged = library.with_suffix(".new")  # the one in place is in use by this process
        damaged.write_bytes(library.read_bytes()[:-1] + b"?")
        damaged.replace(library)
    optimised, warned = run(model)
    assert_fused(optimised)
    assert warned
    assert all("is damaged; it is built anew" in text for text in warned)
    assert cache.verify() == []
