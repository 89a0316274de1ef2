"""Who stopped or died with a lock or a build holds nobody up, and `clear` removes what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusepass.codegen import cache, choices, locks
from fusepass.errors import FusepassWarning
from tests.support.cached import GOOD, KEY, OTHER, SOURCE, Compiler, stored

START = """\
import sys, time
from pathlib import Path
sys.modules["torch"] = None  # it is not needed, and takes long
from types import ModuleType
package = sys.modules["fusepass"] = ModuleType("fusepass")
package.__path__ = [sys.argv[1]]
from fusepass.codegen import cache, cache_folders
from tests.support.cached import KEY, OTHER, SOURCE
def compile(directory):
    (directory / "object.o").write_bytes(bytes(1000))
    print("builds", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, not yet made."""
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_in_vain", float("-inf"))
    return tmp_path / "cache"


@pytest.fixture
def builder() -> Iterator[subprocess.Popen[str]]:
    """A process that is in the midst of building `KEY`."""
    yield from process("cache.store(KEY, SOURCE, compile)")


def process(body: str) -> Iterator[subprocess.Popen[str]]:
    package = str(Path(sys.modules["fusepass"].__path__[0]))
    command = [sys.executable, "-c", START + textwrap.dedent(body), package]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "builds\n"
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.invariant(50)
def test_a_stopped_builder_is_not_waited_for(
    builder: subprocess.Popen[str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(cache, "PATIENCE", 0.3)
    start = time.monotonic()
    with pytest.warns(
        FusepassWarning, match=r"region is built without its lock, .*\.lock, which another process"
    ) as seen:
        library = cache.store(KEY, SOURCE, Compiler())
    assert 0.3 <= time.monotonic() - start < 30
    assert len(seen) == 1
    assert library == directory / "v1" / "ab" / KEY / "lib.so"
    assert cache.lookup(KEY) == library
    with warnings.catch_warnings(action="error"):
        assert cache.store(KEY, SOURCE, Compiler()) == library, "it is there, lock or not"


def test_after_one_wait_in_vain_the_next_is_short(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_in_vain", time.monotonic())
    monkeypatch.setattr(cache, "_SHORT_PATIENCE", 0.1)
    stored(OTHER)
    start = time.monotonic()
    with (
        locks.held(directory / "v1" / "ab" / f"{KEY}.lock", 1),
        pytest.warns(FusepassWarning, match="without its lock"),
    ):
        stored(KEY)
    assert time.monotonic() - start < cache.PATIENCE / 2


def test_two_that_build_the_same_without_the_lock_are_served_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second finds the library of the first in its place."""
    monkeypatch.setattr(cache, "PATIENCE", 0.05)
    entered, finish = threading.Event(), threading.Event()

    def slow(directory: Path) -> Path:
        entered.set()
        assert finish.wait(30)
        return Compiler(b"the second")(directory)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cache.store, KEY, SOURCE, slow)
        assert entered.wait(30)
        with pytest.warns(FusepassWarning, match="without its lock"):
            library = cache.store(KEY, SOURCE, Compiler())
        finish.set()
        with warnings.catch_warnings(action="error"):
            assert first.result(30) == library
    assert library.read_bytes() == GOOD
    assert cache.verify() == []


def test_who_cannot_have_the_lock_measures_without(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_LOCK_SECONDS", 0.05)
    record = choices.Record("region", "CPU", "fast", "", {})
    choices.store("key", record)
    with locks.held(directory / "v1" / "choices" / "key.json.lock", 1) as held, choices.locked("key"):
        assert held
        choices.store("key", record)
    assert choices.lookup("key") is not None


def test_clear_leaves_nothing(builder: subprocess.Popen[str], directory: Path) -> None:
    builder.kill()
    builder.wait()
    assert len(list(directory.glob("v1/tmp-*/work/object.o"))) == 1
    stored(OTHER)
    with choices.locked("key"):
        choices.store("key", choices.Record("region", "CPU", "fast", "", {}))
    (directory / "v1" / "failed").mkdir()
    (directory / "v1" / "failed" / "region.cpp").write_text("int")
    (directory / "v1" / "cd").symlink_to("nowhere")
    (directory / "v1" / "ef").write_text("a file")
    (directory / "v1" / "ab" / ("ab" + 62 * "2")).symlink_to(directory)
    (directory / "v1" / "ab" / ("ab" + 62 * "3" + ".lock")).symlink_to(directory)
    (directory / "v1" / "ab" / ("ab" + 62 * "4")).write_text("a file")
    assert cache.clear() > 1000
    assert list(directory.iterdir()) == []
    assert stored().exists()


def test_clear_does_not_disturb_a_build_under_way(builder: subprocess.Popen[str], directory: Path) -> None:
    os.utime(next(directory.glob("v1/tmp-*")))
    cache.clear()
    assert len(list(directory.glob("v1/tmp-*/work/object.o"))) == 1
    assert (directory / "v1" / "ab" / f"{KEY}.lock").exists()
    builder.kill()
    builder.wait()
    cache.clear()
    assert list(directory.iterdir()) == []


def test_a_build_under_way_is_kept_by_what_cleared_meanwhile() -> None:
    def compile(directory: Path) -> Path:
        cache.clear()
        return Compiler()(directory)

    with warnings.catch_warnings(action="error"):
        library = cache.store(KEY, SOURCE, compile)
    assert cache.lookup(KEY) == library


def test_clear_does_not_follow_links(directory: Path, tmp_path: Path) -> None:
    precious = tmp_path / "elsewhere" / "ab" / "precious"
    precious.mkdir(parents=True)
    (precious / "text").write_text("keep me")
    directory.mkdir(mode=0o700)
    (directory / "v1").symlink_to(tmp_path / "elsewhere")
    cache.clear()
    assert (precious / "text").read_text() == "keep me"
    assert list(directory.iterdir()) == []


def test_clear_frees_the_directories_that_served_dead_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    body = """\
        import warnings
        warnings.simplefilter("ignore")
        cache_folders.fall_back("it is a test")
        cache.store(OTHER, SOURCE, compile)
        """
    unrelated = tmp_path / "fusepass-unrelated"
    unrelated.mkdir()
    running = process(body)
    started = next(running)
    cache.clear()
    (private,) = (path for path in tmp_path.glob("fusepass-*") if path != unrelated)
    assert list(private.glob("v1/tmp-*/work/object.o"))
    started.kill()
    started.wait()
    assert cache.clear() >= 1000
    assert list(tmp_path.glob("fusepass-*")) == [unrelated]
    running.close()
