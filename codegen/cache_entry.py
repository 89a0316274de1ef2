"""One library of the cache: a folder that is named by the key and holds the library, its source and a description.

The description binds the three to the key: a folder under another key's name, or with another library, is damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fusepass.codegen import cache_folders as folders
from fusepass.codegen import records, trust
from fusepass.codegen.source import Source, Target

UNREADABLE = "(unreadable)"
COMPILERS = "-"
"""What stands in a key before the hash of the compilers."""

LIBRARY = "lib.so"
_META = "meta.json"
_WORDS = ("key", "name", "entry", "target", "arch", "sha256", "created")
_DESCRIPTION = {**dict.fromkeys(_WORDS, str), "build_seconds": float}
_SUFFIXES = {Target.CPU: ".cpp", Target.CUDA: ".cu"}


@dataclass(frozen=True)
class CacheEntry:
    """One library of the cache.

    Attributes:
        path: its directory; the name of it is the key.
        nbytes: size of all files in there.
        name: `Source.name`; `UNREADABLE` where the entry is so damaged that its description is lost.
        entry: `Source.entry`.
        target: `Source.target`.
        arch: `Source.arch`.
        sha256: hash of the library when it was built, in hexadecimal.
        build_seconds: how long compiling and linking took.
        created: when, in local time.
    """

    path: Path
    nbytes: int
    name: str
    entry: str
    target: Target
    arch: str
    sha256: str
    build_seconds: float
    created: datetime

    @property
    def key(self) -> str:
        """Hash of all that made the library."""
        return self.path.name

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.path / LIBRARY

    @property
    def intact(self) -> bool:
        """Whether the library is, byte for byte, the one that was built for this key, and nobody else can have put it there."""
        return intact(self.path)


def path_of(top: Path, key: str) -> Path:
    """Where the cache directory `top` keeps the entry of `key`."""
    return folders.root(top) / key[:2] / key


def whole(inside: Path, key: str) -> bool:
    """Whether the folder `key` of the folder `inside`, which need be no cache, is an intact entry of that key."""
    try:
        with trust.folder(inside, key) as folder, _compared(folder, inside / key):
            return True
    except OSError:
        return False


def serving(top: Path, key: str) -> Path | None:
    """The intact entry that serves `key`, if the cache directory `top` has one: of a key without compilers, that of any."""
    path = path_of(top, key)
    paths = [path] if COMPILERS in key else [path, *sorted(path.parent.glob(f"{key}{COMPILERS}*"))]
    return next((each for each in paths if intact(each)), None)


def used(path: Path) -> None:
    """Note that the entry at `path` was used just now, where that can be noted; so that what was not used for longest can be told."""
    with contextlib.suppress(OSError), _folder(path) as folder:
        folders.touch(folder)


@contextlib.contextmanager
def opened(library: Path) -> Iterator[str]:
    """A path to load `library` by: of the file that was compared with its hash, whatever happens to the folders meanwhile.

    A library of another name is in no entry and has no hash; its owner and mode are compared all the same.

    Raises:
        OSError: it is not there, damaged, or may be from somebody else.
    """
    path = library.parent
    if library.name != LIBRARY:
        with trust.folder(path) as folder, trust.file(folder, library.name) as descriptor:
            yield trust.path_of(descriptor)
        return
    with _folder(path) as folder, _compared(folder, path) as descriptor:
        yield trust.path_of(descriptor)


@contextlib.contextmanager
def _compared(folder: int, path: Path) -> Iterator[int]:
    """A descriptor of the library of the entry that is open as `folder`, compared with its hash; `path` is the entry's, for its key and errors."""
    try:
        expected = _description(folder, path.name)["sha256"]
    except ValueError as error:
        raise OSError(f"{path} is damaged: {error}") from error
    with trust.file(folder, LIBRARY) as descriptor:
        if hashlib.sha256(trust.content(descriptor)).hexdigest() != expected:
            raise OSError(f"{path} is damaged: the library is another one")
        yield descriptor


def intact(path: Path) -> bool:
    """Whether the entry at `path` is there, whole, and its user's own."""
    try:
        with opened(path / LIBRARY):
            return True
    except OSError:
        return False


def read(path: Path) -> CacheEntry:
    """What is known of the entry at `path`, which may be damaged in any way."""
    nbytes = folders.nbytes(path)
    try:
        with _folder(path) as folder:
            return CacheEntry(path, nbytes, **_description(folder, path.name))
    except (OSError, ValueError):
        target = Target.CUDA if (path / f"source{_SUFFIXES[Target.CUDA]}").exists() else Target.CPU
        created = datetime.fromtimestamp(path.lstat().st_mtime).astimezone()
        return CacheEntry(path, nbytes, UNREADABLE, "", target, "", "", 0.0, created)


def make(stage: Path, key: str, source: Source, compile: Callable[[Path], Path]) -> Path:
    """A complete entry in the folder `stage`. The library is moved, not copied: a loaded one stays the same file."""
    work, entry = stage / "work", stage / "entry"
    work.mkdir()
    entry.mkdir(mode=0o700)
    start = time.monotonic()
    compile(work).rename(entry / LIBRARY)
    seconds = time.monotonic() - start
    (entry / f"source{suffix(source)}").write_text(source.text)
    described = {
        "key": key,
        "name": source.name,
        "entry": source.entry,
        "target": source.target.value,
        "arch": source.arch,
        "sha256": hashlib.sha256((entry / LIBRARY).read_bytes()).hexdigest(),
        "build_seconds": round(seconds, 3),
        "created": records.now(),
    }
    (entry / _META).write_text(json.dumps(described, indent=1))
    for file in entry.iterdir():
        file.chmod(0o700 if file.name == LIBRARY else 0o600)  # whatever umask says
    return entry


def suffix(source: Source) -> str:
    """File name ending of the text of `source`."""
    return _SUFFIXES[source.target]


def _folder(path: Path) -> contextlib.AbstractContextManager[int]:
    """A descriptor of the entry at `path`, all levels from the cache directory on compared."""
    return trust.folder(path.parents[2], *path.parts[-3:])


def _description(folder: int, key: str) -> dict[str, Any]:
    """What the entry that is open as `folder` says of itself, if it is the one of `key`.

    Raises:
        OSError: it says nothing.
        ValueError: it says something else, or is the entry of another key.
    """
    described = trust.read_object(folder, _META)
    if {name: type(value) for name, value in described.items()} != _DESCRIPTION:
        raise ValueError(f"{_META} is no description")
    if described.pop("key") != key:
        raise ValueError("it is the entry of another key")
    described["created"] = datetime.fromisoformat(described["created"])
    described["target"] = Target(described["target"])
    return described
