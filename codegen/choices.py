"""Measured choices on disk, beside the libraries: one small file for each, atomic, locked, with a checksum.

Layout, below the directory of `fusepass.codegen.cache`::

    v1/choices/<key>.json       the record and its hash
    v1/choices/<key>.json.lock  held while somebody measures
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fusepass.codegen import cache_folders as folders
from fusepass.codegen import locks, trust
from fusepass.codegen.cache_entry import UNREADABLE as UNREADABLE

_LOCK_SECONDS = 10.0  # nobody measures longer than that; who waits in vain measures without keeping the result


@dataclass(frozen=True)
class Record:
    """One measured choice.

    Attributes:
        region: the region's name.
        device: what it was measured on, in words.
        effort: `Config.tune` at the time.
        created: when, in local time, as ISO 8601.
        choice: the outcome, as plain values.
        offered: names of the candidates that there could have been.
        sources: of those that were tried, hashes of what they were built from.
    """

    region: str
    device: str
    effort: str
    created: str
    choice: Mapping[str, Any]
    offered: Sequence[str] = ()
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChoiceEntry:
    """A record's file: its path, whose stem is the key, its size, and the record; None where it is damaged."""

    path: Path
    nbytes: int
    record: Record | None

    @property
    def key(self) -> str:
        """Hash of all that the measurement depends on."""
        return self.path.stem


def key_of(made_of: Mapping[str, Any]) -> str:
    """The key of a choice that depends on these plain values."""
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def lookup(key: str) -> Record | None:
    """The record kept under `key`, if it is there and intact. Nothing is written but the time of its use, where that can be."""
    for top in folders.directories():
        record = _read(top, key)
        if record is not None:
            _used(top, key)
            return record
    return None


def store(key: str, record: Record) -> None:
    """Keep `record` under `key`, in place of what is there; nothing happens where the disk cannot be written."""
    with contextlib.suppress(OSError):
        _write(key, record)


def put(key: str, content: bytes) -> bool:
    """Keep the record that another cache's file under `key` has, unless there is one; whether there was none.

    Raises:
        ValueError: it is damaged.
        OSError: the disk cannot be written.
    """
    record = _intact(key, json.loads(content))
    if record is None:
        raise ValueError(f"the measured choice {key[:12]} is damaged")
    if lookup(key) is not None:
        return False
    _write(key, record)
    return True


def clear() -> int:
    """Forget all records; says how many bytes that frees. Locks and records being written stay."""
    freed = 0
    for entry in entries():
        with contextlib.suppress(OSError):
            nbytes = folders.nbytes(entry.path)
            folders.remove(entry.path)
            freed += nbytes
    return freed


@contextlib.contextmanager
def locked(key: str) -> Iterator[None]:
    """Hold the lock of `key`, so that processes do not disturb each other's measurements; go on without where it cannot be had."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):
            stack.enter_context(locks.held(_path(key).with_suffix(".json.lock"), _LOCK_SECONDS))
        yield


def entries() -> list[ChoiceEntry]:
    """All records, in the order of their keys."""
    found = [(top, path) for top in folders.directories() for path in sorted(_folder(top).glob("*.json"))]
    return [ChoiceEntry(path, path.lstat().st_size, _read(top, path.stem)) for top, path in found]


def verify() -> list[ChoiceEntry]:
    """The damaged records. Each is measured anew when it is next asked for."""
    return [entry for entry in entries() if entry.record is None]


def _write(key: str, record: Record) -> None:
    path = _path(key)
    handle, name = tempfile.mkstemp(prefix="tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"sha256": _hash(key, record), "record": asdict(record)}, file, indent=1)
        if path.is_dir():
            folders.remove(path)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _path(key: str) -> Path:
    return folders.level(folders.writable(), folders.CHOICES) / f"{key}.json"


def _folder(top: Path) -> Path:
    return folders.root(top) / folders.CHOICES


def _read(top: Path, key: str) -> Record | None:
    try:
        with trust.folder(top, folders.FORMAT, folders.CHOICES) as inside:
            return _intact(key, trust.read_object(inside, f"{key}.json"))
    except (OSError, ValueError):
        return None


def _intact(key: str, data: Any) -> Record | None:
    """The record of `key` in what its file holds, however odd that is."""
    try:
        record = Record(**data["record"])
        return record if _is_whole(record) and data["sha256"] == _hash(key, record) else None
    except (TypeError, KeyError, ValueError, RecursionError):
        return None


def _used(top: Path, key: str) -> None:
    """Note that the record was used just now, where that can be noted."""
    with (
        contextlib.suppress(OSError),
        trust.folder(top, folders.FORMAT, folders.CHOICES) as inside,
        trust.file(inside, f"{key}.json") as descriptor,
    ):
        folders.touch(descriptor)


def _is_whole(record: Record) -> bool:
    words = (record.region, record.device, record.effort, record.created)
    mappings = (record.choice, record.sources)
    return (
        all(isinstance(word, str) for word in words)
        and all(isinstance(mapping, dict) for mapping in mappings)
        and isinstance(record.offered, list)
    )


def _hash(key: str, record: Record) -> str:
    """Of the record and the key that it is kept under: one of another key is no more this one's than a damaged one."""
    return hashlib.sha256(json.dumps([key, asdict(record)], sort_keys=True).encode()).hexdigest()
