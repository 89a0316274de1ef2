"""One library of the cache: a folder that is named by the key and holds the library, its source and a description.

The description binds the three to the key: a folder under another key's name, or with another library, is damaged. Sources that were
built as one library share it: it is a file of its own that is named by its hash, and their folders have none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
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
SHARED = ".so"
"""How the names of libraries that several entries share end."""

_META = "meta.json"
_SETTLED = 0.1  # seconds after which a change of a file changes its times
_WORDS = ("key", "name", "entry", "target", "arch", "sha256", "created")
_DESCRIPTION = {**dict.fromkeys(_WORDS, str), "build_seconds": float}
_hashes: dict[tuple[int, ...], str] = {}  # of files, by what tells one from another and from itself before a change
_SUFFIXES = {Target.CPU: ".cpp", Target.CUDA: ".cu"}


@dataclass(frozen=True)
class CacheEntry:
    """One library of the cache.

    Attributes:
        path: its directory; the name of it is the key.
        nbytes: size of all files in there; a library that it shares is not among them.
        name: `Source.name`; `UNREADABLE` where the entry is so damaged that its description is lost.
        entry: `Source.entry`.
        target: `Source.target`.
        arch: `Source.arch`.
        sha256: hash of the library when it was built, in hexadecimal.
        build_seconds: how long compiling and linking took; its part of that where several were built as one library.
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
        own = self.path / LIBRARY
        return own if own.exists() else shared(self.path.parents[2], self.sha256)

    @property
    def intact(self) -> bool:
        """Whether the library is, byte for byte, the one that was built for this key, and nobody else can have put it there."""
        return intact(self.path)


def path_of(top: Path, key: str) -> Path:
    """Where the cache directory `top` keeps the entry of `key`."""
    return folders.root(top) / key[:2] / key


def shared(top: Path, sha256: str) -> Path:
    """Where the cache directory `top` keeps the library with this hash if several entries share it."""
    return folders.root(top) / folders.SHARED / f"{sha256}{SHARED}"


def whole(inside: Path, key: str, top: Path) -> bool:
    """Whether the folder `key` of the folder `inside` would be an intact entry of that key in the cache directory `top`."""
    try:
        with trust.folder(inside, key) as folder, _compared(folder, path_of(top, key)):
            return True
    except OSError:
        return False


def serving(top: Path, key: str) -> tuple[Path, Path] | None:
    """The intact entry that serves `key`, and its library, if the cache directory `top` has one: of a key without compilers, that of any."""
    path = path_of(top, key)
    paths = [path] if COMPILERS in key else [path, *sorted(path.parent.glob(f"{key}{COMPILERS}*"))]
    found = ((each, library_of(each)) for each in paths)
    return next(((each, library) for each, library in found if library is not None), None)


def used(path: Path, library: Path) -> None:
    """Note that the entry at `path` was used just now, where that can be noted; so that what was not used for longest can be told.

    A `library` that it shares counts as used later than all that share it: it is removed behind them.
    """
    with contextlib.suppress(OSError), _folder(path) as folder:
        if folders.touch(folder) and library.parent != path:
            os.utime(library)


@contextlib.contextmanager
def opened(library: Path) -> Iterator[str]:
    """A path to load `library` by: of the file that was compared with its hash, whatever happens to the folders meanwhile.

    A library of another name is in no entry and has no hash; its owner and mode are compared all the same.

    Raises:
        OSError: it is not there, damaged, or may be from somebody else.
    """
    path = library.parent
    if library.name == LIBRARY:
        with _folder(path) as folder, _compared(folder, path) as (descriptor, _):
            yield trust.path_of(descriptor)
        return
    with trust.folder(path) as folder, trust.file(folder, library.name) as descriptor:
        yield trust.path_of(descriptor)


@contextlib.contextmanager
def _compared(folder: int, path: Path) -> Iterator[tuple[int, Path]]:
    """A descriptor of the library of the entry that is open as `folder`, compared with its hash, and where it is; `path` is the entry's."""
    try:
        expected = _description(folder, path.name)["sha256"]
    except ValueError as error:
        raise OSError(f"{path} is damaged: {error}") from error
    top = path.parents[2]
    with contextlib.ExitStack() as stack:
        try:
            library, descriptor = path / LIBRARY, stack.enter_context(trust.file(folder, LIBRARY))
        except FileNotFoundError:
            library = shared(top, expected)
            inside = stack.enter_context(trust.folder(top, folders.FORMAT, folders.SHARED))
            descriptor = stack.enter_context(trust.file(inside, library.name))
        if _hash(descriptor) != expected:
            raise OSError(f"{path} is damaged: the library is another one")
        yield descriptor, library


def _hash(descriptor: int) -> str:
    """The hash of the file that is open as `descriptor`, in hexadecimal; one that has not changed since it was last asked for is not read again."""
    status = os.fstat(descriptor)
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if (known := _hashes.get(state)) is not None:
        return known
    found = hashlib.sha256(trust.content(descriptor)).hexdigest()
    if time.time() - status.st_ctime > _SETTLED:
        _hashes[state] = found
    return found


def library_of(path: Path) -> Path | None:
    """The library of the entry at `path`; None unless that is there, whole, and its user's own."""
    try:
        with _folder(path) as folder, _compared(folder, path) as (_, library):
            return library
    except OSError:
        return None


def intact(path: Path) -> bool:
    """Whether the entry at `path` is there, whole, and its user's own."""
    return library_of(path) is not None


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
    library, (entry,) = _made(stage, {key: source}, compile)
    library.rename(entry / LIBRARY)
    return entry


def make_several(
    stage: Path, sources: Mapping[str, Source], compile: Callable[[Path], Path]
) -> tuple[Path, dict[str, Path]]:
    """In the folder `stage` one library of all `sources`, and for each an entry, by key, that is complete where the library is `shared`."""
    library, entries = _made(stage, sources, compile)
    return library, dict(zip(sources, entries, strict=True))


def _made(stage: Path, sources: Mapping[str, Source], compile: Callable[[Path], Path]) -> tuple[Path, list[Path]]:
    """A library, named by its hash, and an entry without one for each of `sources`."""
    work = stage / "work"
    work.mkdir()
    start = time.monotonic()
    made = compile(work)
    seconds = time.monotonic() - start
    sha256 = hashlib.sha256(made.read_bytes()).hexdigest()
    made.chmod(0o700)  # whatever umask says
    entries = []
    for number, (key, source) in enumerate(sources.items()):
        entry = stage / f"entry-{number}"
        entry.mkdir(mode=0o700)
        (entry / f"source{suffix(source)}").write_text(source.text)
        described = {
            "key": key,
            "name": source.name,
            "entry": source.entry,
            "target": source.target.value,
            "arch": source.arch,
            "sha256": sha256,
            "build_seconds": round(seconds / len(sources), 3),
            "created": records.now(),
        }
        (entry / _META).write_text(json.dumps(described, indent=1))
        for file in entry.iterdir():
            file.chmod(0o600)
        entries.append(entry)
    return made.rename(stage / f"{sha256}{SHARED}"), entries


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
