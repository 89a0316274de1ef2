"""The cache: its key, atomic publication, locks, damage, and directories that cannot serve."""

from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fusepass.codegen import cache, toolchain
from fusepass.codegen.key import cache_key, source_key
from fusepass.codegen.source import Target
from fusepass.errors import BuildError, FusepassWarning
from tests.support.cached import KEY, SOURCE, STRANGER, Compiler


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, not yet made; what other processes leave in the system's temporary directory is not seen."""
    path = tmp_path / "cache"
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return path


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of headers: outer.h includes inner.h, other.h stands alone."""
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "outer.h").write_text('#include "inner.h"\n#include <vector>\n')
    (folder / "inner.h").write_text("// inner\n")
    (folder / "other.h").write_text("// other\n")
    monkeypatch.setattr(toolchain, "include_directory", lambda: folder)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"entry": "other"},
        {"text": "int two();\n"},
        {"target": Target.CUDA, "arch": "sm_90"},
        {"headers": ("other.h",)},
    ],
)
@pytest.mark.usefixtures("headers")
@pytest.mark.invariant(19)
def test_the_key_changes_with_the_source(change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "nvcc", toolchain.cxx)
    assert cache_key(dataclasses.replace(SOURCE, **change)) != cache_key(SOURCE)


def test_the_key_changes_with_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "nvcc", toolchain.cxx)
    keys = {cache_key(dataclasses.replace(SOURCE, target=Target.CUDA, arch=arch)) for arch in ("sm_80", "sm_90")}
    assert len(keys) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda output_tile: output_tile.setattr(torch, "__version__", "9.9"),
        lambda output_tile: output_tile.setattr(toolchain, "CPU_FLAGS", ("-O0",)),
        lambda output_tile: output_tile.setattr(toolchain, "link_flags", lambda target: ()),
        lambda output_tile: output_tile.setattr(toolchain, "cpu_identity", lambda: "another CPU"),
        lambda output_tile: output_tile.setattr(toolchain, "cxx", lambda: toolchain.Compiler(Path("c++"), "another")),
        lambda output_tile: output_tile.setenv("CPATH", "/another/include"),
    ],
    ids=["torch", "flags", "link flags", "CPU", "compiler", "environment"],
)
@pytest.mark.invariant(19)
def test_the_key_changes_with_the_surroundings(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cache_key(SOURCE)
    change(monkeypatch)
    assert cache_key(SOURCE) != before


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.invariant(19)
def test_the_key_changes_with_headers_and_those_they_include(headers: Path, declared: bool) -> None:
    text = '#include "outer.h"\n'
    source = dataclasses.replace(SOURCE, text=text, headers=("outer.h",) if declared else ())
    keys = [cache_key(source)]
    for name in ("outer.h", "inner.h", "other.h"):
        (headers / name).write_text((headers / name).read_text() + "// changed\n")
        keys.append(cache_key(source))
    assert len(set(keys[:3])) == 3
    assert keys[3] == keys[2], "other.h is not included"


def test_the_key_does_not_depend_on_the_name() -> None:
    assert cache_key(dataclasses.replace(SOURCE, name="another")) == cache_key(SOURCE)


def test_the_cpu_counts_for_code_of_the_cpu_at_hand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    level = dataclasses.replace(SOURCE, arch="x86-64-v3")
    cuda = dataclasses.replace(SOURCE, target=Target.CUDA, arch="sm_90")
    before = [source_key(source) for source in (SOURCE, level, cuda)]
    monkeypatch.setattr(toolchain, "cpu_identity", lambda: "another CPU")
    after = [source_key(source) for source in (SOURCE, level, cuda)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, True]


def test_a_header_that_does_not_exist_is_named() -> None:
    with pytest.raises(BuildError, match=r"region includes a header that cannot be read.*missing\.h"):
        cache_key(dataclasses.replace(SOURCE, headers=("missing.h",)))


def test_what_is_stored_is_found(directory: Path) -> None:
    assert cache.lookup(KEY) is None
    library = cache.store(KEY, SOURCE, Compiler())
    assert cache.lookup(KEY) == library == directory / "v1" / "ab" / KEY / "lib.so"
    assert library.read_bytes() == b"a library"
    assert sorted(path.name for path in library.parent.iterdir()) == ["lib.so", "meta.json", "source.cpp"]
    assert (library.parent / "source.cpp").read_text() == SOURCE.text


def test_directories_are_private(directory: Path) -> None:
    library = cache.store(KEY, SOURCE, Compiler())
    for path in (directory, directory / "v1", directory / "v1" / "ab", library.parent):
        assert path.stat().st_mode & 0o777 == 0o700


def test_a_library_is_moved_not_copied() -> None:
    """A process that has loaded the library where it was linked must not load it a second time."""
    inodes = []

    def compile(directory: Path) -> Path:
        library = Compiler()(directory)
        inodes.append(library.stat().st_ino)
        return library

    assert cache.store(KEY, SOURCE, compile).stat().st_ino == inodes[0]


def test_what_is_stored_is_not_built_again() -> None:
    compile = Compiler()
    first = cache.store(KEY, SOURCE, compile)
    assert cache.store(KEY, SOURCE, compile) == first
    assert compile.runs == 1


def test_of_two_builders_one_builds_and_the_other_waits() -> None:
    entered = threading.Event()
    runs = []

    def compile(directory: Path) -> Path:
        runs.append(directory)
        entered.set()
        time.sleep(0.3)
        assert cache.lookup(KEY) is None, "published before it was complete"
        return Compiler()(directory)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.store, KEY, SOURCE, compile)
        assert entered.wait(10)
        second = pool.submit(cache.store, KEY, SOURCE, compile)
        assert first.result(10) == second.result(10)
    assert len(runs) == 1


def test_a_failed_build_leaves_only_its_source(directory: Path) -> None:
    def compile(_: Path) -> Path:
        raise BuildError("it is broken")

    with pytest.raises(BuildError, match="it is broken") as error:
        cache.store(KEY, SOURCE, compile)
    assert error.value.path == directory / "v1" / "failed" / f"region-{KEY[:16]}.cpp"
    assert error.value.path.read_text() == SOURCE.text
    assert cache.lookup(KEY) is None
    assert list((directory / "v1").glob("tmp-*")) == []


@pytest.mark.parametrize("file", ["lib.so", "meta.json"])
@pytest.mark.parametrize("content", [b"", b"other bytes", None])
def test_a_damaged_entry_is_built_anew(file: str, content: bytes | None) -> None:
    compile = Compiler()
    damaged = cache.store(KEY, SOURCE, compile).parent / file
    if content is None:
        damaged.unlink()
    else:
        damaged.write_bytes(content)
    assert cache.lookup(KEY) is None
    assert [entry.key for entry in cache.verify()] == [KEY]
    with pytest.warns(FusepassWarning, match="damaged; it is built anew"):
        cache.store(KEY, SOURCE, compile)
    assert compile.runs == 2
    assert cache.lookup(KEY) is not None
    assert cache.verify() == []


def test_entries_say_what_they_are() -> None:
    library = cache.store(KEY, SOURCE, Compiler())
    (entry,) = cache.entries()
    assert (entry.key, entry.library, entry.intact) == (KEY, library, True)
    assert (entry.name, entry.entry, entry.target, entry.arch) == ("region", "run", Target.CPU, "native")
    assert entry.nbytes == sum(file.stat().st_size for file in library.parent.iterdir())
    assert abs(entry.created.timestamp() - time.time()) < 60
    assert 0 <= entry.build_seconds < 60


def test_an_entry_without_description_is_still_listed() -> None:
    cuda = dataclasses.replace(SOURCE, target=Target.CUDA, arch="sm_90")
    (cache.store(KEY, cuda, Compiler()).parent / "meta.json").write_text('{"unknown": 1}')
    (entry,) = cache.entries()
    assert (entry.name, entry.target, entry.intact) == (cache.UNREADABLE, Target.CUDA, False)


def test_clear_frees_all_but_builds_under_way(directory: Path) -> None:
    cache.store(KEY, SOURCE, Compiler())
    running, dead = directory / "v1" / "tmp-running", directory / "v1" / "tmp-dead"
    for path in (running, dead):
        path.mkdir()
        (path / "object.o").write_bytes(bytes(1000))
    os.utime(dead, (0, 0))
    size = cache.entries()[0].nbytes
    assert cache.clear() == size + 1000
    assert cache.entries() == []
    assert running.exists()
    assert not dead.exists()


def unwritable(directory: Path) -> None:
    directory.write_text("a file is in the way")


def open_to_all(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)


def of_another(directory: Path) -> None:
    directory.mkdir()
    os.chown(directory, STRANGER, STRANGER)


@pytest.mark.parametrize(
    ("prepare", "cause"),
    [
        (unwritable, "File exists"),
        (open_to_all, r"others may write to it \(mode 777"),
        pytest.param(
            of_another,
            "it belongs to user",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_a_directory_that_cannot_serve_is_replaced_with_one_warning(
    directory: Path, prepare: Callable[[Path], None], cause: str
) -> None:
    prepare(directory)
    with pytest.warns(FusepassWarning, match=f"{directory} cannot be used: .*{cause}") as seen:
        library = cache.store(KEY, SOURCE, Compiler())
    assert len(seen) == 1
    assert "python -m fusepass doctor" in str(seen[0].message)
    assert directory not in library.parents
    with warnings.catch_warnings(action="error"):
        assert cache.lookup(KEY) == library
        cache.store("cd" + KEY[2:], SOURCE, Compiler())
    assert len(cache.entries()) == 2


@pytest.mark.parametrize("full", [1, 2])
def test_a_full_disk_is_left_for_a_private_directory_once(full: int) -> None:
    attempts = []

    def compile(directory: Path) -> Path:
        attempts.append(directory)
        if len(attempts) <= full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return Compiler()(directory)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if full == 1:
            assert cache.lookup(KEY) != cache.store(KEY, SOURCE, compile)
        else:
            with pytest.raises(BuildError, match=r"a build cannot be written: .*No space left"):
                cache.store(KEY, SOURCE, compile)
    assert ["No space left on device" in str(warning.message) for warning in seen] == [True]
    assert attempts[0].parent.parent != attempts[1].parent.parent
