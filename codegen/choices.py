"""Measured choices on disk, beside the libraries: one small file for each, atomic, locked, with a checksum.

Layout, below the directory of `fusepass.codegen.cache`::

    v1/choices/<key>.json       the record and its hash
    v1/choices/<key>.json.lock  held while somebody measures
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fusepass.codegen import cache_folders as folders
from fusepass.codegen import locks, records
from fusepass.codegen.cache_entry import UNREADABLE as UNREADABLE
from fusepass.codegen.records import key_of as key_of

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


@dataclass
class Asked:
    """What something is decided by.

    Attributes:
        keys: of the records that were found or stored.
        momentary: whether something else decided, too, that may be another the next time: how much memory was free, a trial that was disturbed.
    """

    keys: set[str] = field(default_factory=set)
    momentary: bool = False


_asked: ContextVar[Asked | None] = ContextVar("fusepass_choices", default=None)


@contextlib.contextmanager
def asked() -> Iterator[Asked]:
    """Note what is decided by until the block ends."""
    noted = Asked()
    token = _asked.set(noted)
    try:
        yield noted
    finally:
        _asked.reset(token)


def momentary() -> None:
    """To be called where something is decided by what is kept in no record and may be another the next time."""
    if (noted := _asked.get()) is not None:
        noted.momentary = True


def state(key: str) -> str | None:
    """A hash of the record kept under `key`; None where there is none."""
    record = records.lookup(folders.CHOICES, key)
    return None if record is None else key_of(record)


def lookup(key: str) -> Record | None:
    """The record kept under `key`, if it is there and intact. Nothing is written but the time of its use, where that can be."""
    record = _record(records.lookup(folders.CHOICES, key))
    if record is not None:
        _note(key)
    return record


def store(key: str, record: Record) -> None:
    """Keep `record` under `key`, in place of what is there; nothing happens where the disk cannot be written."""
    _note(key)
    with contextlib.suppress(OSError):
        records.write(folders.CHOICES, key, asdict(record))


def _note(key: str) -> None:
    if (noted := _asked.get()) is not None:
        noted.keys.add(key)


def put(key: str, content: bytes) -> bool:
    """Keep the record that another cache's file under `key` has, unless there is one; whether there was none.

    Raises:
        ValueError: it is damaged.
        OSError: the disk cannot be written.
    """
    record = _record(records.intact(key, json.loads(content)))
    if record is None:
        raise ValueError(f"the measured choice {key[:12]} is damaged")
    if lookup(key) is not None:
        return False
    records.write(folders.CHOICES, key, asdict(record))
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
            lock = records.path_of(folders.CHOICES, key).with_suffix(".json.lock")
            stack.enter_context(locks.held(lock, _LOCK_SECONDS))
        yield


def entries() -> list[ChoiceEntry]:
    """All records, in the order of their keys."""
    return [
        ChoiceEntry(path, path.lstat().st_size, _record(records.read(top, folders.CHOICES, path.stem)))
        for top, path in records.paths(folders.CHOICES)
    ]


def verify() -> list[ChoiceEntry]:
    """The damaged records. Each is measured anew when it is next asked for."""
    return [entry for entry in entries() if entry.record is None]


def _record(data: Mapping[str, Any] | None) -> Record | None:
    """The record that was written as `data`; None where something else was."""
    try:
        record = None if data is None else Record(**data)
    except TypeError:
        return None
    return record if record is not None and _is_whole(record) else None


def _is_whole(record: Record) -> bool:
    words = (record.region, record.device, record.effort, record.created)
    mappings = (record.choice, record.sources)
    return (
        all(isinstance(word, str) for word in words)
        and all(isinstance(mapping, dict) for mapping in mappings)
        and isinstance(record.offered, list)
    )
