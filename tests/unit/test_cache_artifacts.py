"""What a process used of the cache goes along with `torch.compiler.save_cache_artifacts`, if it was asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.compiler import _cache

import fusepass
from fusepass.api.cache_artifacts import FusepassCacheArtifact, register
from fusepass.codegen import build, cache, cache_archive, cache_uses, choices, records
from fusepass.codegen import cache_folders as folders
from fusepass.errors import BuildError
from tests.support.cached import KEY, OTHER, stored

RECORD = choices.Record("region", "a device", "fast", "2026-01-01T00:00:00", {"chosen": "first"}, [])


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, and nothing of PyTorch's list of artifacts or of the listeners stays."""
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_uses, "_listeners", [])
    monkeypatch.setattr(_cache.CacheArtifactFactory, "_artifact_types", {**_cache.CacheArtifactFactory._artifact_types})
    register.cache_clear()
    with _cache.CacheArtifactManager.with_fresh_cache():
        yield


@pytest.mark.usefixtures("records")
def test_what_was_saved_serves_from_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's own two functions; the second time, every build fails."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Softmax(-1)), torch.rand(3, 6)

    def run() -> list[str]:
        fused = fusepass.optimize(copy.deepcopy(model), tune="off")
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x))
        assert fused.report().fallbacks == ()
        return [entry.key for entry in cache.entries()]

    fusepass.register_cache_artifacts()
    fusepass.register_cache_artifacts()
    keys = run()
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    names = saved[1].artifacts["fusepass"]
    assert {name.split("/")[0] for name in names} == {folders.LIBRARIES, folders.REGIONS}

    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(build, "_build_one", lambda key, source: BuildError(f"{source.name} is not to be built"))
    assert cache.entries() == []
    loaded = torch.compiler.load_cache_artifacts(saved[0])
    assert loaded is not None
    assert loaded.artifacts["fusepass"] == names
    assert run() == keys != []


def test_what_is_used_is_told_once_it_is_there() -> None:
    told: list[tuple[str, str]] = []
    cache_uses.listen(lambda folder, key: told.append((folder, key)))
    assert cache.lookup(KEY) is None
    assert choices.lookup(KEY) is None
    assert told == []
    stored()
    choices.store(OTHER, RECORD)
    assert told == [(folders.LIBRARIES, KEY), (folders.CHOICES, OTHER)]
    cache.lookup(KEY)
    choices.lookup(OTHER)
    assert told == 2 * [(folders.LIBRARIES, KEY), (folders.CHOICES, OTHER)]


def test_one_entry_is_packed_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored()
    stored(OTHER)
    choices.store(KEY, RECORD)
    records.write(folders.REGIONS, OTHER, {"some": "thing"})
    contents = [
        cache_archive.packed(*each)
        for each in ((folders.LIBRARIES, KEY), (folders.CHOICES, KEY), (folders.REGIONS, OTHER))
    ]
    assert cache_archive.packed(folders.CHOICES, OTHER) is None
    (tmp_path / "cache" / "v1" / "ab" / OTHER / "lib.so").write_bytes(b"damaged")
    assert cache_archive.packed(folders.LIBRARIES, OTHER) is None
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "other"))
    for content in contents:
        assert content is not None
        cache_archive.unpack(content)
    assert [entry.key for entry in cache.entries()] == [KEY]
    assert choices.lookup(KEY) == RECORD
    assert records.lookup(folders.REGIONS, OTHER) == {"some": "thing"}
    assert cache.verify() == []


def test_what_is_damaged_warns_and_the_rest_is_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored()
    content = cache_archive.packed(folders.LIBRARIES, KEY)
    assert content is not None
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "other"))
    with pytest.warns(
        fusepass.FusepassWarning, match="libraries/key of the saved caches is not taken in: .* is damaged"
    ):
        FusepassCacheArtifact("libraries/key", content[:-40]).populate_cache()
    assert cache.entries() == []
    FusepassCacheArtifact("libraries/key", content).populate_cache()
    assert [entry.key for entry in cache.entries()] == [KEY]


def test_nothing_is_recorded_where_nobody_asked() -> None:
    stored()
    cache.lookup(KEY)
    assert torch.compiler.save_cache_artifacts() is None
