"""Small JSON records on disk, beside the libraries: a file for each, atomic, with a checksum that binds it to its key.

Layout, below the directory of `fusepass.codegen.cache`::

    v1/<folder>/<key>.json  the record and its hash
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from fusepass.codegen import cache_folders as folders
from fusepass.codegen import cache_uses, trust


def now() -> str:
    """The local time as ISO 8601, as what is kept says when it was made."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def key_of(made_of: Mapping[str, Any]) -> str:
    """The key of a record that depends on these plain values."""
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def lookup(folder: str, key: str) -> dict[str, Any] | None:
    """The record kept under `key` in `folder`, if it is there and intact. Nothing is written but the time of its use, where that can be."""
    for top in folders.directories():
        record = read(top, folder, key)
        if record is not None:
            _used(top, folder, key)
            cache_uses.tell(folder, key)
            return record
    return None


def read(top: Path, folder: str, key: str) -> dict[str, Any] | None:
    """The record of `key` that the cache directory `top` has, if it is intact."""
    try:
        with trust.folder(top, folders.FORMAT, folder) as inside:
            return intact(key, trust.read_object(inside, f"{key}.json"))
    except (OSError, ValueError):
        return None


def write(folder: str, key: str, record: Mapping[str, Any]) -> None:
    """Keep `record` under `key`, in place of what is there.

    Raises:
        OSError: the disk cannot be written.
    """
    path = path_of(folder, key)
    handle, name = tempfile.mkstemp(prefix="tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps({"sha256": _hash(key, record), "record": record}))
        if path.is_dir():
            folders.remove(path)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    cache_uses.tell(folder, key)


def put(folder: str, key: str, content: bytes) -> bool:
    """Keep the record that another cache's file under `key` has, unless there is one; whether there was none.

    Raises:
        ValueError: it is damaged.
        OSError: the disk cannot be written.
    """
    record = intact(key, json.loads(content))
    if record is None:
        raise ValueError(f"the record {key[:12]} of {folder} is damaged")
    if lookup(folder, key) is not None:
        return False
    write(folder, key, record)
    return True


def path_of(folder: str, key: str) -> Path:
    """Where the record of `key` is written; the folder exists then."""
    return folders.level(folders.writable(), folder) / f"{key}.json"


def paths(folder: str) -> list[tuple[Path, Path]]:
    """All files of `folder` that may be records: the cache directory that each is in, and its path, in the order of the keys."""
    return [
        (top, path) for top in folders.directories() for path in sorted((folders.root(top) / folder).glob("*.json"))
    ]


def any_in(folder: str) -> bool:
    """Whether `folder` has a file that may be a record."""
    return any(True for top in folders.directories() for _ in (folders.root(top) / folder).glob("*.json"))


def intact(key: str, data: Any) -> dict[str, Any] | None:
    """The record of `key` in what its file holds, however odd that is."""
    try:
        record: dict[str, Any] = data["record"]
        return record if isinstance(record, dict) and data["sha256"] == _hash(key, record) else None
    except (TypeError, KeyError, ValueError, RecursionError):
        return None


def _used(top: Path, folder: str, key: str) -> None:
    """Note that the record was used just now, where that can be noted."""
    with (
        contextlib.suppress(OSError),
        trust.folder(top, folders.FORMAT, folder) as inside,
        trust.file(inside, f"{key}.json") as descriptor,
    ):
        folders.touch(descriptor)


def _hash(key: str, record: Mapping[str, Any]) -> str:
    """Of the record and the key that it is kept under: one of another key is no more this one's than a damaged one."""
    return hashlib.sha256(json.dumps([key, record], sort_keys=True).encode()).hexdigest()
