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

from fusepass.codegen import cache

UNREADABLE = cache.UNREADABLE
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
    """The record kept under `key`, if it is there and intact."""
    return _read(_path(key))


def store(key: str, record: Record) -> None:
    """Keep `record` under `key`, in place of what is there; nothing happens where the disk cannot be written."""
    path = _path(key)
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(prefix="tmp-", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"sha256": _hash(asdict(record)), "record": asdict(record)}, file, indent=1)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def locked(key: str) -> Iterator[None]:
    """Hold the lock of `key`, so that processes do not disturb each other's measurements; in vain, go on without."""
    import filelock  # here: a process that finds all it wants has no use for it

    lock = filelock.FileLock(f"{_path(key)}.lock", timeout=_LOCK_SECONDS)
    try:
        lock.acquire()
    except (OSError, NotImplementedError):  # filelock's Timeout is an OSError
        yield
        return
    try:
        yield
    finally:
        lock.release()


def entries() -> list[ChoiceEntry]:
    """All records, in the order of their keys."""
    return [ChoiceEntry(path, path.stat().st_size, _read(path)) for path in sorted(cache.choices().glob("*.json"))]


def verify() -> list[ChoiceEntry]:
    """The damaged records. Each is measured anew when it is next asked for."""
    return [entry for entry in entries() if entry.record is None]


def _path(key: str) -> Path:
    return cache.choices() / f"{key}.json"


def _read(path: Path) -> Record | None:
    try:
        data = json.loads(path.read_text())
        record = Record(**data["record"])
        return record if data["sha256"] == _hash(asdict(record)) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _hash(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
