"""Writes what the cache holds to one file, and takes such a file in: for images of machines that have no compiler.

The file is a zip of the cache's own files. Each entry is compared with its description and hash before it is put in place, as when it
is loaded; and as libraries in it come to run, the file must be the user's or root's, and nobody else may be able to write to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fusepass.codegen import cache, cache_entry, choices, records, trust
from fusepass.codegen import cache_folders as folders
from fusepass.errors import BuildError

_KEY = r"[0-9a-f]{64}(?:-[0-9a-f]{16})?"
_OF_LIBRARY = re.compile(rf"{folders.LIBRARIES}/({_KEY})/(lib\.so|meta\.json|source\.cpp|source\.cu)")
_SHARED = re.compile(rf"{folders.SHARED}/([0-9a-f]{{64}}){re.escape(cache_entry.SHARED)}")
_OF_RECORD = re.compile(rf"({'|'.join(folders.RECORDS)})/({_KEY})\.json")

_GENERATED = (folders.REGIONS, folders.GRAPHS)
"""Records of what was generated: they are not counted, as nobody measured them."""


@dataclass(frozen=True)
class Moved:
    """What was written to a file or taken from it.

    Attributes:
        libraries, choices: how many.
    """

    libraries: int
    choices: int


def write(path: Path) -> Moved:
    """Write all libraries and records that are intact to the file `path`, in place of what is there.

    Raises:
        OSError: it cannot be written.
    """
    libraries = [entry for entry in cache.entries() if entry.intact]
    measured = [entry for entry in choices.entries() if entry.record is not None]
    handle, fresh_name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    fresh = Path(fresh_name)
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            shared = {entry.library.name: entry.library for entry in libraries if entry.library.parent != entry.path}
            for name, library in sorted(shared.items()):
                _add(archive, f"{folders.SHARED}/{name}", library)
            for entry in libraries:
                _add_library(archive, entry.path)
            for choice in measured:
                _add_record(archive, folders.CHOICES, choice.path)
            for folder in _GENERATED:
                for top, record in records.paths(folder):
                    if records.read(top, folder, record.stem) is not None:
                        _add_record(archive, folder, record)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return Moved(len({entry.key for entry in libraries}), len(measured))


def packed(folder: str, key: str) -> bytes | None:
    """The entry, shared library or record of `key` alone, as `unpack` takes it; None where it is not in the cache, or damaged.

    An entry that shares its library comes without it, so the library must have been unpacked before.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        if folder == folders.LIBRARIES:
            found = (cache_entry.serving(top, key) for top in folders.directories())
            if (serving := next((each for each in found if each is not None), None)) is not None:
                _add_library(archive, serving[0])
        elif folder == folders.SHARED:
            libraries = (cache_entry.shared(top, key) for top in folders.directories())
            if (library := next((each for each in libraries if each.is_file()), None)) is not None:
                _add(archive, f"{folders.SHARED}/{library.name}", library)
        else:
            tops = (top for top in folders.directories() if records.read(top, folder, key) is not None)
            if (top := next(tops, None)) is not None:
                _add_record(archive, folder, folders.root(top) / folder / f"{key}.json")
        if not archive.namelist():
            return None
    return file.getvalue()


def unpack(content: bytes) -> Moved:
    """Put what `packed` gave into the cache directory, where it is not there yet; says how much that was.

    Raises:
        BuildError: it is damaged, or was written by another version.
        OSError: the cache directory cannot be written.
    """
    with _damage("what was saved of a cache"), zipfile.ZipFile(io.BytesIO(content)) as archive:
        return _taken(archive)


def read(path: Path) -> Moved:
    """Put what the file `path` holds into the cache directory, where it is not there yet; says how much that was.

    Raises:
        BuildError: the file is damaged, was written by another version, or may be somebody else's. What came before the damage stays.
        OSError: it cannot be read, or the cache directory not be written.
    """
    try:
        with (
            _damage(path),
            trust.folder_of(path) as inside,
            trust.file(inside, path.name) as descriptor,
            os.fdopen(os.dup(descriptor), "rb") as file,
            zipfile.ZipFile(file) as archive,
        ):
            return _taken(archive)
    except trust.Distrusted as error:
        raise BuildError(f"{path} is not taken in: {error}", path=path) from error


@contextlib.contextmanager
def _damage(name: str | Path) -> Iterator[None]:
    """Says of what an archive raises inside that `name` is damaged."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise BuildError(f"{name} is damaged: {error}", path=name if isinstance(name, Path) else None) from error


def _add_library(archive: zipfile.ZipFile, path: Path) -> None:
    for inner in sorted(path.iterdir()):
        _add(archive, f"{folders.LIBRARIES}/{path.name}/{inner.name}", inner)


def _add_record(archive: zipfile.ZipFile, folder: str, path: Path) -> None:
    _add(archive, f"{folder}/{path.name}", path)


def _add(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    """Without the file's time, which in images is often one that zip does not know."""
    archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)


def _taken(archive: zipfile.ZipFile) -> Moved:
    libraries: dict[str, list[str]] = defaultdict(list)
    shared: dict[str, str] = {}
    kept: dict[str, dict[str, str]] = {folder: {} for folder in folders.RECORDS}
    for name in archive.namelist():
        if found := _SHARED.fullmatch(name):
            shared[found[1]] = name
        elif found := _OF_LIBRARY.fullmatch(name):
            libraries[found[1]].append(name)
        elif found := _OF_RECORD.fullmatch(name):
            kept[found[1]][found[2]] = name
        else:
            raise ValueError(f"{name} is nothing that the cache keeps")
    put = [_share(sha256, archive.read(name)) for sha256, name in shared.items()]
    made = sum(_put(key, {Path(each).name: archive.read(each) for each in names}) for key, names in libraries.items())
    for library in put:
        os.utime(library)  # it is removed behind those that share it: see `cache_entry.used`
    for folder in _GENERATED:
        for key, name in kept[folder].items():
            records.put(folder, key, archive.read(name))
    return Moved(made, sum(choices.put(key, archive.read(name)) for key, name in kept[folders.CHOICES].items()))


def _share(sha256: str, content: bytes) -> Path:
    """Keep a library that several entries share, if it is the one with this hash; says where."""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"the library {sha256[:12]} is not what was built")
    top = folders.writable()
    inside = folders.level(top, folders.SHARED)
    with folders.stage(folders.root(top), folders.STAGE) as stage:
        file = stage / "shared"
        file.touch(mode=0o700)
        file.write_bytes(content)
        return file.rename(inside / cache_entry.shared(top, sha256).name)


def _put(key: str, files: Mapping[str, bytes]) -> bool:
    """Make an entry of `files` under `key`; whether it was not there."""
    if cache.lookup(key) is not None:
        return False
    top = folders.writable()
    folders.level(top, key[:2])
    path = cache_entry.path_of(top, key)
    with folders.stage(folders.root(top), folders.STAGE) as stage:
        entry = stage / key
        entry.mkdir(mode=0o700)
        for name, content in files.items():
            (entry / name).touch(mode=0o700 if name == cache_entry.LIBRARY else 0o600)
            (entry / name).write_bytes(content)
        if not cache_entry.whole(stage, key, top):
            raise ValueError(f"the library of {key[:12]} is not what was built")
        with contextlib.suppress(OSError):  # another process was faster
            if os.path.lexists(path):
                folders.remove(path)
            entry.rename(path)
    return True
