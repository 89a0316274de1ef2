"""The cache where no compiler is, moved to another machine in one file, and kept below its size."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import fusepass
from fusepass.cli import main
from fusepass.codegen import build, cache, cache_archive, cache_limit, choices, toolchain
from fusepass.codegen.key import cache_key
from fusepass.config import override
from fusepass.errors import BuildError
from tests.support.cached import GOOD, KEY, OTHER, SOURCE, STRANGER, Compiler, stored
from tests.support.layout import ROOT

RECORD = choices.Record("region", "a device", "fast", "2026-01-01T00:00:00", {"chosen": "first"}, [])


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, not yet made."""
    path = tmp_path / "cache"
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(path))
    return path


def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> toolchain.Compiler:
        raise BuildError("no C++ compiler was found; install one")

    monkeypatch.setattr(toolchain, "cxx", missing)


# ---- without compilers


def test_without_a_compiler_what_any_compiler_made_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cache.store(cache_key(SOURCE), SOURCE, Compiler())
    without_compilers(monkeypatch)
    assert cache.lookup(cache_key(SOURCE)) == build.build(SOURCE) == library
    library.write_bytes(b"another")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler was found"):
        build.build(SOURCE)


def test_of_another_compiler_nothing_serves_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(cache_key(SOURCE), SOURCE, Compiler())
    monkeypatch.setattr(toolchain, "cxx", lambda: toolchain.Compiler(Path("c++"), "another"))
    assert cache.lookup(cache_key(SOURCE)) is None
    assert cache.store(cache_key(SOURCE), SOURCE, Compiler(b"newer")).read_bytes() == b"newer"
    without_compilers(monkeypatch)
    assert cache.lookup(cache_key(SOURCE)) is not None
    assert len(cache.entries()) == 2


MODEL = """
import sys, warnings
import torch, fusepass
from torch import nn
from fusepass.runtime import fast_path
if sys.argv[1] == "found":
    warnings.simplefilter("error", fusepass.FusepassWarning)
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)  # no times are taken, which a busy machine disturbs: such choices are not kept
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1))
fused, x = fusepass.optimize(model, tune="fast"), torch.randn(6, 8)
with torch.no_grad():
    torch.testing.assert_close(fused(x), model(x))
(region,) = fused.report().regions
fast_path.wait()
print(region.state.name, fast_path.types() is not None, "torch.utils.cpp_extension" in sys.modules)
"""


def test_a_process_without_compilers_finds_all_it_needs(directory: Path, tmp_path: Path) -> None:
    """Kernels, the choice, and the library of calls without Python."""
    programs = tmp_path / "bin"
    programs.mkdir()
    bare = {
        "PATH": str(programs),
        "CUDA_HOME": str(tmp_path),
        "HOME": str(tmp_path),
        "FUSEPASS_CACHE_DIR": str(directory),
    }
    usual = {**os.environ, "FUSEPASS_CACHE_DIR": str(directory)}

    def said(environment: dict[str, str], way: str) -> str:
        command = [sys.executable, "-c", MODEL, way]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    state = said(usual, "built").split()[0]
    for path in sorted(directory.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)  # as in an image; root may write all the same
    before = sorted((path, path.stat().st_ino) for path in directory.rglob("*"))
    assert said(bare, "found") == f"{state} True False"
    assert sorted((path, path.stat().st_ino) for path in directory.rglob("*")) == before


# ---- one file


def test_what_is_exported_is_imported(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = stored()
    choices.store(OTHER, RECORD)
    (stored(OTHER) / "lib.so").write_bytes(b"damaged")
    os.utime(entry / "lib.so", (0, 0))  # as in images that are built alike each time
    archive = tmp_path / "kernels.zip"
    assert cache_archive.write(archive) == cache_archive.Moved(1, 1)
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "other"))
    assert cache_archive.read(archive) == cache_archive.Moved(1, 1)
    library = cache.lookup(KEY)
    assert library == tmp_path / "other" / "v1" / "ab" / KEY / "lib.so"
    assert {path.name: path.read_bytes() for path in library.parent.iterdir()} == {
        path.name: path.read_bytes() for path in entry.iterdir()
    }
    assert choices.lookup(OTHER) == RECORD
    assert cache.verify() == []
    for path in (library.parent, library):
        assert path.stat().st_mode & 0o777 == 0o700
    assert cache_archive.read(archive) == cache_archive.Moved(0, 0), "all is there"


def test_a_damaged_entry_gives_way_to_an_imported_one(directory: Path, tmp_path: Path) -> None:
    entry = stored()
    cache_archive.write(tmp_path / "kernels.zip")
    (entry / "lib.so").write_bytes(b"damaged")
    assert cache_archive.read(tmp_path / "kernels.zip").libraries == 1
    assert cache.lookup(KEY) is not None


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of one library and one choice, and an empty cache."""
    stored()
    choices.store(KEY, RECORD)
    cache_archive.write(tmp_path / "kernels.zip")
    cache.clear()
    return tmp_path / "kernels.zip"


def rewritten(archive: Path, change: Callable[[str, bytes], tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(archive) as old:
        files = [change(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(archive, "w") as new:
        for name, content in files:
            new.writestr(name, content)


def spoilt_library(name: str, content: bytes) -> tuple[str, bytes]:
    return name, b"planted" if name.endswith("lib.so") else content


def other_key(name: str, content: bytes) -> tuple[str, bytes]:
    return name.replace(KEY, OTHER), content


def outside(name: str, content: bytes) -> tuple[str, bytes]:
    return name.replace("libraries/", "libraries/../../"), content


def spoilt_choice(name: str, content: bytes) -> tuple[str, bytes]:
    return name, content.replace(b"first", b"other") if name.startswith("choices") else content


def no_choice(name: str, content: bytes) -> tuple[str, bytes]:
    return name, b"[1, " if name.startswith("choices") else content


@pytest.mark.invariant(48)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (spoilt_library, "is not what was built"),
        (other_key, "is not what was built"),
        (outside, "is nothing that the cache keeps"),
        (spoilt_choice, "measured choice .* is damaged"),
        (no_choice, "Expecting value"),
    ],
)
def test_what_is_not_as_it_was_written_is_not_imported(
    archive: Path, directory: Path, change: Callable[[str, bytes], tuple[str, bytes]], told: str
) -> None:
    rewritten(archive, change)
    with pytest.raises(BuildError, match=f"kernels.zip is damaged: .*{told}"):
        cache_archive.read(archive)
    assert [entry for entry in cache.entries() if entry.library.read_bytes() != GOOD] == []
    assert [path for path in directory.rglob("tmp-*") if path.is_dir()] == []
    assert choices.lookup(KEY) is None


def test_an_archive_that_is_cut_short_is_not_imported(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(BuildError, match="is damaged"):
        cache_archive.read(archive)


@pytest.mark.invariant(48)
def test_an_archive_of_others_is_not_imported(archive: Path) -> None:
    archive.chmod(0o666)
    with pytest.raises(BuildError, match=r"is not taken in: others may write to kernels.zip \(mode 666"):
        cache_archive.read(archive)
    archive.chmod(0o644)
    link = archive.with_name("link.zip")
    link.symlink_to(archive)
    with pytest.raises(OSError, match="symbolic links"):
        cache_archive.read(link)
    if os.getuid() == 0:
        os.chown(archive, STRANGER, STRANGER)
        with pytest.raises(BuildError, match="belongs to user"):
            cache_archive.read(archive)
    assert cache.entries() == []


# ---- its size


def aged(key: str, seconds: float, size: int) -> Path:
    """An entry of `size` bytes that was not used for so long."""
    path = stored(key, bytes(size))
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_what_was_not_used_for_longest_goes_first(directory: Path) -> None:
    keys = [f"{number:02x}" + 62 * "0" for number in range(4)]
    for key, age in zip(keys, (4000, 9000, 7000, 1), strict=True):
        aged(key, age, 100_000)
    assert cache.lookup(keys[1]) is not None, "which is a use"
    assert cache_limit.trim(directory, 500_000) == 0
    assert 100_000 < cache_limit.trim(directory, 390_000) < 110_000
    assert [entry.key for entry in cache.entries()] == [keys[0], keys[1], keys[3]]
    cache_limit.trim(directory, 1)
    assert [entry.key for entry in cache.entries()] == [keys[1], keys[3]], "what was used just now stays"
    assert cache.verify() == []
    assert list((directory / "v1").glob("tmp-*")) == []


def test_choices_are_kept_below_the_size_too(directory: Path) -> None:
    for key, age in ((KEY, 9000), (OTHER, 8000)):
        choices.store(key, RECORD)
        os.utime(directory / "v1" / "choices" / f"{key}.json", (time.time() - age,) * 2)
    assert choices.lookup(KEY) == RECORD
    assert cache_limit.trim(directory, 300) > 0
    assert choices.lookup(OTHER) is None
    assert choices.lookup(KEY) == RECORD


def test_a_build_looks_at_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_trimmed", float("-inf"))
    aged(KEY, 9000, 100_000)
    with override(cache_size=50_000):
        assert cache.trim() > 100_000
        aged(KEY, 9000, 100_000)
        assert cache.trim() == 0, "it was looked through a moment ago"


def test_the_size_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fusepass.current().cache_size == 2 << 30
    for text, size in (("500M", 500 << 20), ("3g", 3 << 30), ("12345", 12345)):
        monkeypatch.setenv("FUSEPASS_CACHE_SIZE", text)
        assert fusepass.current().cache_size == size
    monkeypatch.setenv("FUSEPASS_CACHE_SIZE", "much")
    with pytest.raises(
        ValueError, match="FUSEPASS_CACHE_SIZE is 'much'; allowed is: a whole number from 1 on, in bytes"
    ):
        fusepass.current()


# ---- the command line


def test_commands(archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["cache", "import", str(archive)]) == 0
    assert capsys.readouterr().out == "took in 1 library and 1 measured choice that were not there yet\n"
    assert main.main(["cache", "export", str(tmp_path / "again.zip")]) == 0
    assert capsys.readouterr().out == f"wrote 1 library and 1 measured choice to {tmp_path}/again.zip\n"
    assert main.main(["cache", "clear", "--choices"]) == 0
    assert capsys.readouterr().out.startswith("freed ")
    assert choices.lookup(KEY) is None
    assert cache.lookup(KEY) is not None
    assert main.main(["cache", "import", str(tmp_path / "none.zip")]) == 2
    assert "importing a cache: FileNotFoundError" in capsys.readouterr().err
