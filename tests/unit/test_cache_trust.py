"""Libraries of the cache run, so that only what nobody else can have put there is loaded."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock  # noqa: F401, before a process is another user's, who may not read it
import pytest

from fusepass.codegen import cache, cache_entry, toolchain
from fusepass.errors import FusepassWarning
from tests.support.cached import GOOD, KEY, OTHER, PLANTED, SOURCE, STRANGER, Compiler, as_user, plant, stored

ENTRY = f"v1/ab/{KEY}"
LEVELS = ["v1", "v1/ab", ENTRY, f"{ENTRY}/lib.so", f"{ENTRY}/meta.json"]
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder of this user that everybody can look into, as pytest's are not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    subprocess.run(["chmod", "-R", "u+w", path], check=True)
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def directory(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, not yet made."""
    path = open_folder / "cache"
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(path))
    return path


def assert_built_anew(elsewhere: bool) -> None:
    """Nothing is found, and what is stored then is found, with a warning, in the configured directory or elsewhere."""
    assert cache.lookup(KEY) is None
    compile = Compiler()
    with pytest.warns(FusepassWarning) as seen:
        library = cache.store(KEY, SOURCE, compile)
    assert (compile.runs, library.read_bytes()) == (1, GOOD)
    assert cache.lookup(KEY) == library
    with warnings.catch_warnings(action="error"):
        assert cache.store(KEY, SOURCE, compile) == library
    assert any("cannot be used" in str(warning.message) for warning in seen) == elsewhere


@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["group", "others"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.invariant(48)
def test_what_others_may_write_to_is_not_loaded(directory: Path, level: str, mode: int) -> None:
    plant(stored())
    path = directory / level
    path.chmod(path.stat().st_mode | mode)
    assert_built_anew(elsewhere=level == "v1")


@needs_root
@pytest.mark.parametrize("level", LEVELS)
def test_what_belongs_to_somebody_else_is_not_loaded(directory: Path, level: str) -> None:
    plant(stored())
    os.chown(directory / level, STRANGER, STRANGER)
    assert_built_anew(elsewhere=level == "v1")


@pytest.mark.parametrize("level", [".", *LEVELS])
@pytest.mark.invariant(48)
def test_a_link_is_not_followed(directory: Path, open_folder: Path, level: str) -> None:
    plant(stored())
    path, moved = directory / level, open_folder / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    assert_built_anew(elsewhere=level in (".", "v1"))
    assert PLANTED in {file.read_bytes() for file in (moved, *moved.rglob("*")) if file.is_file()} or "meta" in level


def test_an_entry_that_was_intact_and_is_opened_to_others_is_listed_as_damaged(directory: Path) -> None:
    stored()
    (directory / ENTRY).chmod(0o777)
    assert [entry.key for entry in cache.verify()] == [KEY]
    with pytest.raises(OSError, match=r"others may write to v1/ab/.* \(mode 777; `chmod go-w` helps\)"):
        open_library(directory / ENTRY / "lib.so")


def open_library(library: Path) -> None:
    with cache_entry.opened(library):
        pass


def open_above(folder: Path) -> None:
    folder.chmod(0o777)


def link_above(folder: Path) -> None:
    """In a folder such as /tmp, somebody puts a link where the cache is to be made."""
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    (folder / "tmp" / "link").symlink_to(folder)
    os.chown(folder / "tmp" / "link", STRANGER, STRANGER, follow_symlinks=False)


@pytest.mark.parametrize(
    ("prepare", "below", "cause"),
    [
        (open_above, "cache", r"others may write to .* above it \(mode 777\)"),
        (open_above, "deep/er/cache", r"others may write to .* above it \(mode 777\)"),
        pytest.param(link_above, "tmp/link/cache", rf"the link .* belongs to user {STRANGER}", marks=needs_root),
    ],
)
def test_where_others_may_replace_the_cache_none_is_made(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], None], below: str, cause: str
) -> None:
    prepare(open_folder)
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(open_folder / below))
    before = sorted(open_folder.rglob("*"))
    with pytest.warns(FusepassWarning, match=f"cannot be used: {cause}"):
        library = cache.store(KEY, SOURCE, Compiler())
    assert open_folder not in library.parents
    assert sorted(open_folder.rglob("*")) == before
    assert cache.lookup(KEY) == library


def test_a_planted_library_is_not_loaded_where_others_may_replace_the_cache(open_folder: Path) -> None:
    plant(stored())
    open_folder.chmod(0o777)
    assert_built_anew(elsewhere=True)


def test_a_folder_above_may_be_as_tmp_is_and_links_of_the_user_are_followed(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (open_folder / "real").mkdir()
    (open_folder / "link").symlink_to("real/../real")
    open_folder.chmod(0o1777)
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(open_folder / "link" / "cache"))
    with warnings.catch_warnings(action="error"):
        library = cache.store(KEY, SOURCE, Compiler())
    assert (open_folder / "real" / "cache" / "v1" / "ab" / KEY / "lib.so").samefile(library)
    assert cache.lookup(KEY) == library


def test_a_circle_of_links_is_no_place_for_a_cache(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (open_folder / "circle").symlink_to("circle")
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(open_folder / "circle" / "cache"))
    with pytest.warns(FusepassWarning, match="cannot be used: .*Too many levels of symbolic links"):
        assert cache.store(KEY, SOURCE, Compiler()).read_bytes() == GOOD


@needs_root
@pytest.mark.parametrize("below", [".", "cache", "deep/er/cache"])
def test_nothing_is_made_in_a_folder_of_somebody_else(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    foreign = open_folder / "foreign"
    foreign.mkdir()
    os.chown(foreign, STRANGER, STRANGER)
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(foreign / below))
    with pytest.warns(FusepassWarning, match=f"cannot be used: .*belongs to user {STRANGER}"):
        library = cache.store(KEY, SOURCE, Compiler())
    assert list(foreign.iterdir()) == []
    assert cache.lookup(KEY) == library


@pytest.mark.invariant(48)
def test_what_was_compared_is_what_is_loaded(directory: Path) -> None:
    entry = stored()
    with cache_entry.opened(entry / "lib.so") as path:
        entry.rename(directory / "aside")
        entry.mkdir()
        (entry / "lib.so").write_bytes(PLANTED)
        assert Path(path).read_bytes() == GOOD


def test_the_loader_does_not_take_one_library_for_another(tmp_path: Path) -> None:
    """It knows a library by the path that it was loaded by, and descriptors have the same few numbers again and again."""
    for key, number in ((KEY, 1), (OTHER, 2)):
        code, made = tmp_path / f"{number}.cpp", tmp_path / f"{number}.so"
        code.write_text(f'extern "C" int run() {{ return {number}; }}')
        subprocess.run([toolchain.cxx().path, "-shared", "-fPIC", code, "-o", made], check=True)
        with cache_entry.opened(stored(key, made.read_bytes()) / "lib.so") as path:
            assert ctypes.CDLL(path).run() == number


def test_nothing_is_loaded_but_what_was_compared() -> None:
    """Each line of the package that loads a library; the C library itself, NVRTC, and what `cache_entry.opened` opens."""
    root = Path(__file__).parents[2]
    loads = [
        (path.name, line.strip())
        for folder in ("codegen", "fusepass", "patterns", "templates")
        for path in sorted((root / folder).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"DLL\(|LoadLibrary\(|load_library\(|dlopen", line)
    ]
    assert loads == [
        ("build.py", "_loaded[library] = ctypes.CDLL(path)"),
        ("nvrtc_program.py", "ctypes.CDLL(str(builtins))"),  # PyTorch's packages, as PyTorch would load them
        ("nvrtc_program.py", "loaded = ctypes.CDLL(library)"),
        ("libraries.py", "return ctypes.CDLL(trust.path_of(descriptor))"),  # of bytes that were compared
        ("libraries.py", "return ctypes.CDLL(str(path))"),
        ("fast_path.py", "entry = getattr(ctypes.PyDLL(path), _ENTRY)"),
        ("pages.py", "function = ctypes.CDLL(None).madvise"),
    ]


def test_what_is_kept_is_for_its_user_alone_whatever_the_umask(directory: Path) -> None:
    before = os.umask(0)
    try:
        stored()
    finally:
        os.umask(before)
    assert all(
        path.lstat().st_mode & 0o077 == 0 for path in (directory, *directory.rglob("*")) if path.suffix != ".lock"
    )
    assert cache.lookup(KEY) is not None


def test_a_cache_that_can_only_be_read_is_used_without_a_word(directory: Path) -> None:
    library = stored() / "lib.so"
    subprocess.run(["chmod", "-R", "a-w,a+rX", directory], check=True)

    def found() -> bool:
        with warnings.catch_warnings(action="error"):
            return (
                cache.lookup(KEY) == library
                and cache.lookup(OTHER) is None
                and [e.key for e in cache.entries()] == [KEY]
            )

    def builds_the_rest() -> bool:
        with pytest.warns(FusepassWarning, match="cannot be used: it .*; kernels are built for this process alone"):
            fresh = cache.store(OTHER, SOURCE, Compiler())
        return directory not in fresh.parents and cache.lookup(OTHER) == fresh and cache.lookup(KEY) == library

    assert as_user(STRANGER, found)
    assert as_user(STRANGER, builds_the_rest)
