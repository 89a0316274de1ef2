"""Several sources as one translation unit: which are, what becomes of them, and how the cache keeps what they share."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fusepass.codegen import build as builds
from fusepass.codegen import cache, cache_archive, cache_entry, cache_limit, cache_uses, locks, toolchain
from fusepass.codegen import cache_folders as folders
from fusepass.codegen.build import build_all, load, loaded
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.key import cache_key
from fusepass.codegen.render import render
from fusepass.codegen.source import Source, Target
from fusepass.codegen.units import Queue, joined, seconds
from fusepass.config import override
from fusepass.errors import BuildError
from tests.support import kernels as k
from tests.support.cached import KEY, OTHER, Compiler

TEXT = """\
#include <cstddef>
namespace {{
float scaled(float x) {{ return {factor} * x; }}
}}  // namespace
extern "C" int run_{name}(const float* in, float* out, void*) {{
    for (std::size_t i = 0; i < 10; ++i) out[i] = scaled(in[i]);
    return 0;
}}
"""
BROKEN = Source("broken", "run_broken", Target.CPU, "int f() { return missing_name; }\n", (), "native")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEPASS_JOBS", "1")
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what compilers get."""
    names: list[str] = []
    real = builds._load_inline

    def noted(sources: Sequence[Source], key: str, where: Path) -> Path:
        names.append(joined(sources).name)
        return real(sources, key, where)

    monkeypatch.setattr(builds, "_load_inline", noted)
    return names


def scale(factor: int) -> Source:
    """Multiplies ten numbers."""
    name = f"scale_{factor}"
    return Source(name, f"run_{name}", Target.CPU, TEXT.format(factor=factor, name=name), (), "native")


def factor_of(library: Path | BuildError, source: Source) -> float:
    assert isinstance(library, Path)
    given, out = torch.ones(10), torch.zeros(10)
    assert load(library, source.entry, 2)(given.data_ptr(), out.data_ptr(), 0) == 0
    return out[9].item()


# ---- what is built together


def test_sources_become_one_library_and_an_entry_each(directory: Path, compiled: list[str]) -> None:
    given = [scale(factor) for factor in (2, 3, 5)]
    made = build_all(given)
    assert [factor_of(library, source) for library, source in zip(made, given, strict=True)] == [2, 3, 5]
    assert len(compiled) == 1
    entries = cache.entries()
    assert {*made} == {entry.path / "lib.so" for entry in entries}
    (library,) = {entry.library for entry in entries}
    assert library.parent == directory / "v1" / "shared"
    assert sorted(entry.name for entry in entries) == sorted(source.name for source in given)
    assert sorted((entry.path / "source.cpp").read_text() for entry in entries) == sorted(each.text for each in given)
    assert all(entry.intact for entry in entries)
    assert build_all(given) == made
    assert [factor_of(each, given[1]) for each in build_all([given[1], scale(7)])[:1]] == [3]
    assert compiled[1:] == ["scale_7"], "alone it is built as ever"


def test_one_that_does_not_compile_takes_no_other_with_it(directory: Path) -> None:
    given = [scale(2), scale(3), BROKEN, scale(5)]
    made = build_all(given)
    broken, others = made[2], [made[0], made[1], made[3]]
    assert [
        factor_of(library, source) for library, source in zip(others, (given[0], given[1], given[3]), strict=True)
    ] == [2, 3, 5]
    assert isinstance(broken, BuildError)
    assert "missing_name" in broken.stderr
    assert broken.path is not None
    assert broken.path.read_text() == BROKEN.text
    assert [path.name for path in (directory / "v1" / "failed").iterdir()] == [broken.path.name]


def test_what_is_begun_waits_and_is_built_together(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, all_there, compiled = threading.Event(), threading.Event(), []

    def noted(sources: Sequence[Source], _: str, where: Path) -> Path:
        compiled.append(joined(sources).name)
        begun.set()
        assert all_there.wait(60)
        (where / "made.so").write_bytes(joined(sources).text.encode())
        return where / "made.so"

    monkeypatch.setattr(builds, "_load_inline", noted)
    given = [scale(factor) for factor in (2, 3, 5, 7)]
    with override(jobs=2):
        builds.begin(given[0])
        assert begun.wait(60)
        for source in given[1:]:
            builds.begin(source)
        all_there.set()
        (first,) = build_all(given[:1])
        until = time.monotonic() + 60
        while cache.lookup(cache_key(given[3])) is None and time.monotonic() < until:
            time.sleep(0.01)
        made = build_all(given)
    assert made[0] == first
    assert compiled == ["scale_2", "scale_3_and_2_more"]
    assert {*made} == {entry.path / "lib.so" for entry in cache.entries()}


def test_a_forked_process_waits_for_no_build_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(builds._under_way, cache_key(scale(2)), threading.Event())
    child = os.fork()
    if not child:
        os._exit(len(builds._under_way))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_entries_of_one_name_are_in_different_units(compiled: list[str]) -> None:
    """As those of a region's candidates are."""
    other = dataclasses.replace(scale(2), text=scale(2).text.replace("2 *", "4 *"))
    made = build_all([scale(2), other, scale(3)])
    assert (factor_of(made[0], other), factor_of(made[1], other)) == (2, 4)
    assert len(compiled) == 2


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_generated_cuda_compiles_together(tmp_path: Path) -> None:
    """Kernels with different headers, one of them with a function for replays."""
    facts = DeviceFacts.h200()
    found = [
        render(each, facts) for each in (k.layer_norm(8, 64), k.softmax_channels(3, 8, 36), k.batch_norm_2d(3, 6, 64))
    ]
    assert found[2].replay is not None
    unit, made = tmp_path / "unit.cu", tmp_path / "unit.o"
    unit.write_text(joined(found).text)
    flags = toolchain.flags(Target.CUDA, "sm_90")
    subprocess.run(["nvcc", *flags, f"-I{toolchain.include_directory()}", "-c", unit, "-o", made], check=True)
    symbols = subprocess.run(["nm", made], capture_output=True, text=True, check=True).stdout
    assert all(f" T {name}\n" in symbols for each in found for name in (each.entry, each.replay) if name)


# ---- how what waits is shared among compilers


def waiting(count: int, length: int = 5000) -> dict[str, Source]:
    return {
        str(number): Source(f"s{number}", f"run_s{number}", Target.CPU, " " * length, (), "native")
        for number in range(count)
    }


def shares(queue: Queue, compilers: int) -> list[int]:
    """How many each of so many compilers gets that begin at the same time."""
    units = [queue.units() for _ in range(compilers) if queue.begin()]
    return [len(next(each, {})) for each in units]


def test_free_compilers_share_alike() -> None:
    assert shares(Queue(16, waiting(8)), 16) == [1] * 8 + [0] * 8
    assert shares(Queue(4, waiting(40)), 3) == [10, 10, 10]
    assert shares(Queue(1, waiting(30)), 2) == [30], "no more begin than there are"


def test_a_unit_takes_a_few_seconds_at_most() -> None:
    queue = Queue(1, waiting(100, 20_000))
    assert queue.begin()
    taken = list(queue.units())
    assert sum(map(len, taken)) == 100
    assert max(sum(map(seconds, unit.values())) for unit in taken) < 5
    assert 5 < len(taken) < 100


def test_nothing_is_lost_where_one_comes_back_for_more() -> None:
    queue = Queue(4, waiting(100))
    units = [queue.units() for _ in range(4) if queue.begin()]
    taken = [next(each) for each in units]
    for each in units:
        taken += list(each)
    assert sorted(key for unit in taken for key in unit) == sorted(waiting(100))
    assert queue.begin(), "all of them have ended"


def test_what_cannot_share_a_unit_does_not() -> None:
    mixed = waiting(4)
    mixed["1"] = dataclasses.replace(mixed["1"], arch="x86-64-v3")
    mixed["2"] = dataclasses.replace(mixed["2"], entry="run_s0")
    queue = Queue(1, mixed)
    assert queue.begin()
    assert [sorted(unit) for unit in queue.units()] == [["0", "3"], ["1"], ["2"]]


# ---- what the cache keeps


def together(*keys: str, content: bytes = b"a library") -> dict[str, Path]:
    given = {key: dataclasses.replace(scale(2), name=f"s{number}") for number, key in enumerate(keys)}
    compiler = Compiler(content)
    return cache.store_together(given, lambda _, where: compiler(where))


def test_what_is_there_or_being_built_is_left_out() -> None:
    third = "cd" + 62 * "0"
    library = cache.store(KEY, scale(2), Compiler(b"alone"))
    with locks.held(cache._lock(library.parents[3], OTHER), 1):
        assert {*together(KEY, OTHER, third)} == {third}
    assert cache.lookup(KEY) == library
    assert cache.lookup(OTHER) is None


def shared(directory: Path) -> Path:
    """The file of what is built together."""
    (file,) = (directory / "v1" / "shared").iterdir()
    return file


def test_damage_of_what_is_shared_is_damage_of_each(directory: Path) -> None:
    path = together(KEY, OTHER)[KEY]
    library = shared(directory)
    damaged = library.with_suffix(".damaged")
    damaged.write_bytes(b"a libraro")
    damaged.chmod(0o700)
    damaged.rename(library)
    with pytest.raises(OSError, match="damaged"), cache_entry.opened(path):
        pass
    assert [entry.key for entry in cache.verify()] == [KEY, OTHER]
    assert cache.lookup(KEY) is None
    with pytest.warns(match="damaged; it is built anew"):
        assert together(KEY)[KEY] == path
    assert shared(directory) == library, "its name is its hash"
    assert cache.verify() == []
    os.unlink(library)
    assert cache.lookup(OTHER) is None


def test_what_is_shared_goes_behind_those_that_share_it(directory: Path) -> None:
    made = together(KEY, OTHER, content=b"." * 100_000)
    entries, library = [entry.path for entry in cache.entries()], shared(directory)
    for path in (*entries, library):
        os.utime(path, (time.time() - 9000,) * 2)
    assert cache.lookup(OTHER) == made[OTHER]
    assert library.stat().st_mtime >= entries[1].stat().st_mtime > time.time() - 1000
    assert cache_limit.trim(directory, 50_000) > 0
    assert (cache.lookup(KEY), cache.lookup(OTHER)) == (None, made[OTHER])
    for path in (entries[1], library):
        os.utime(path, (time.time() - 9000,) * 2)
    assert cache_limit.trim(directory, 50_000) > 100_000
    assert cache.entries() == []
    assert not library.exists()


def test_what_is_shared_is_written_once_and_taken_in(directory: Path, tmp_path: Path) -> None:
    together(KEY, OTHER)
    archive = tmp_path / "cache.zip"
    assert cache_archive.write(archive).libraries == 2
    with override(cache_dir=tmp_path / "other"):
        assert cache_archive.read(archive).libraries == 2
        assert None not in (cache.lookup(KEY), cache.lookup(OTHER))
        assert {entry.library for entry in cache.entries()} == {shared(tmp_path / "other")}
        assert shared(tmp_path / "other").name == shared(directory).name
        assert cache.verify() == []
        assert cache.clear() > 0
        assert list((tmp_path / "other").rglob("*.so")) == []


def test_what_is_shared_is_told_of_before_those_that_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(cache_uses, "_listeners", [lambda *used: told.append(used)])
    together(KEY, OTHER)
    (entry, _) = cache.entries()
    assert told == [each for key in (KEY, OTHER) for each in ((folders.SHARED, entry.sha256), (folders.LIBRARIES, key))]
    contents = {used: cache_archive.packed(*used) for used in told}
    del told[:]
    assert cache.lookup(KEY) is not None
    assert told == [(folders.SHARED, entry.sha256), (folders.LIBRARIES, KEY)]
    with override(cache_dir=tmp_path / "other"):
        for content in contents.values():
            assert content is not None
            cache_archive.unpack(content)
        assert [entry.key for entry in cache.entries()] == [KEY, OTHER]
        assert cache.verify() == []


def test_a_file_in_the_place_of_what_is_shared_is_not_loaded(directory: Path) -> None:
    library = together(KEY)[KEY]
    shared(directory).chmod(0o722)
    assert cache.lookup(KEY) is None
    with pytest.raises(OSError, match="write"):
        loaded(library)
