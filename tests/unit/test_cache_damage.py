"""Whatever is in an entry's or a record's place is no error: it is not used, it is listed, and it is replaced."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusepass.codegen import cache, choices
from fusepass.errors import FusepassWarning
from tests.support.cached import GOOD, KEY, OTHER, SOURCE, Compiler, stored

DEEP = 100_000 * "[" + 100_000 * "]"
RECORD = choices.Record("region", "CPU", "fast", "2026-01-01", {"chosen": "generated"}, ["generated"], {"a": "b"})


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, not yet made."""
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def a_file(path: Path) -> None:
    path.write_text("no folder")


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def a_link_to_another(path: Path) -> None:
    path.symlink_to(stored(OTHER, b"another library"))


def a_copy_of_another(path: Path) -> None:
    shutil.copytree(stored(OTHER, b"another library"), path)


def a_copy_of_another_with_its_key_changed(path: Path) -> None:
    a_copy_of_another(path)
    described = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(described | {"key": KEY, "sha256": 64 * "0"}))


def an_empty_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


REPLACEMENTS = [a_file, a_dangling_link, a_link_to_another, a_copy_of_another, an_empty_folder, a_pipe]
REPLACEMENTS += [a_copy_of_another_with_its_key_changed]


def assert_repaired(message: str = "damaged; it is built anew") -> None:
    assert cache.lookup(KEY) is None
    with pytest.warns(FusepassWarning, match=message):
        library = cache.store(KEY, SOURCE, Compiler())
    assert cache.lookup(KEY) == library
    assert library.read_bytes() == GOOD
    assert cache.verify() == []


@pytest.mark.parametrize("put", REPLACEMENTS)
@pytest.mark.invariant(49)
def test_what_is_in_place_of_an_entry_is_listed_and_replaced(put: Callable[[Path], None]) -> None:
    entry = stored()
    shutil.rmtree(entry)
    put(entry)
    assert [each.key for each in cache.verify()] == [KEY]
    assert_repaired()


@pytest.mark.parametrize("put", [a_file, a_dangling_link, a_pipe])
def test_what_is_in_place_of_a_folder_of_entries_is_replaced(directory: Path, put: Callable[[Path], None]) -> None:
    stored()
    shutil.rmtree(directory / "v1" / "ab")
    put(directory / "v1" / "ab")
    assert_repaired("v1/ab is removed from the cache")


@pytest.mark.parametrize("put", [an_empty_folder, a_dangling_link, a_pipe])
def test_what_is_in_place_of_a_lock_is_replaced(directory: Path, put: Callable[[Path], None]) -> None:
    shutil.rmtree(stored())
    lock = directory / "v1" / "ab" / f"{KEY}.lock"
    lock.unlink(missing_ok=True)
    put(lock)
    assert cache.store(KEY, SOURCE, Compiler()) == directory / "v1" / "ab" / KEY / "lib.so"


@pytest.mark.parametrize("put", [a_dangling_link, an_empty_folder, a_pipe])
@pytest.mark.parametrize("name", ["meta.json", "lib.so"])
def test_what_is_in_place_of_a_file_of_an_entry_is_replaced(name: str, put: Callable[[Path], None]) -> None:
    file = stored() / name
    file.unlink()
    put(file)
    assert_repaired()


def meta_texts() -> list[str]:
    good: dict[str, Any] = dict.fromkeys(("key", "name", "entry", "arch", "sha256"), "1") | {"target": "cpu"}
    good |= {"key": KEY, "build_seconds": 1.0, "created": "2026-01-01T00:00:00+00:00"}
    odd = [{"target": "abacus"}, {"created": "yesterday"}, {"build_seconds": "long"}, {"sha256": None}, {"extra": 1}]
    odd += [{"key": OTHER}, {"name": ["region"]}, {"build_seconds": 10**400}, {}]
    texts = [DEEP, '{"name":' * 100_000, "[]", "1", "null", '"text"', "\x00", "{", '{"sha256": ' + 5000 * "1" + "}"]
    return [*texts, *(json.dumps(good | each) for each in odd)]


@pytest.mark.parametrize("text", meta_texts(), ids=lambda text: text[:12] if len(text) > 400 else text[-30:])
def test_a_description_may_say_anything(text: str) -> None:
    (stored() / "meta.json").write_text(text)
    (entry,) = cache.entries()
    assert not entry.intact
    assert_repaired()


def test_a_description_may_be_of_any_size() -> None:
    with (stored() / "meta.json").open("r+") as file:
        file.truncate(1 << 40)
    assert_repaired()


def test_a_record_is_found_under_its_own_key_alone(directory: Path) -> None:
    choices.store("one", RECORD)
    assert choices.lookup("one") == dataclasses.replace(RECORD, offered=["generated"])
    folder = directory / "v1" / "choices"
    shutil.copy(folder / "one.json", folder / "two.json")
    assert choices.lookup("two") is None
    assert [entry.key for entry in choices.verify()] == ["two"]


def rewritten(**changes: Any) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        choices.store("other", RECORD)
        data = json.loads(path.with_stem("other").read_text())
        path.write_text(json.dumps(data | changes))

    return put


def deep(path: Path) -> None:
    path.write_text(f'{{"record": {DEEP}, "sha256": ""}}')


def deep_inside(path: Path) -> None:
    path.write_text(json.dumps({"sha256": "", "record": dataclasses.asdict(RECORD)}).replace('"CPU"', DEEP))


def deep_enough_to_be_read(path: Path) -> None:
    """Python's own limit is reached by what is done with it."""
    nested = 900 * "[" + 900 * "]"
    path.write_text(json.dumps({"sha256": "", "record": dataclasses.asdict(RECORD)}).replace('["generated"]', nested))


def a_list(path: Path) -> None:
    path.write_text("[1]")


def open_to_others(path: Path) -> None:
    choices.store(path.stem, RECORD)
    path.chmod(0o666)


@pytest.mark.parametrize(
    "put",
    [
        *(deep, deep_inside, deep_enough_to_be_read, a_list, a_file, a_dangling_link, an_empty_folder, a_pipe, open_to_others),
        *(rewritten(record=record) for record in (None, [], "text", {}, {"region": 1}, dataclasses.asdict(RECORD) | {"x": 1})),
        *(rewritten(sha256=sha256) for sha256 in (None, 1, [], "")),
    ],
)  # fmt: skip
@pytest.mark.invariant(49)
def test_whatever_is_in_place_of_a_record_is_replaced(directory: Path, put: Callable[[Path], None]) -> None:
    choices.store("other", RECORD)
    path = directory / "v1" / "choices" / "key.json"
    put(path)
    assert choices.lookup("key") is None
    assert [entry.key for entry in choices.verify()] == ["key"]
    with choices.locked("key"):
        choices.store("key", RECORD)
    assert choices.lookup("key") == RECORD
    assert choices.verify() == []


@pytest.mark.parametrize("put", [a_file, a_dangling_link])
def test_what_is_in_place_of_the_folder_of_records_is_replaced(directory: Path, put: Callable[[Path], None]) -> None:
    stored()
    put(directory / "v1" / "choices")
    assert choices.lookup("key") is None
    with pytest.warns(FusepassWarning, match="choices is removed from the cache"):
        choices.store("key", RECORD)
    assert choices.lookup("key") == RECORD
