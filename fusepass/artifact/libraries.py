"""The shared libraries of an artifact: written once each, and loaded from bytes that were compared with their hash."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fusepass.artifact.container import Reader
from fusepass.codegen import build, cache_entry, cache_folders, trust
from fusepass.codegen.source import Source
from fusepass.errors import ArtifactError, BuildError
from fusepass.runtime.region import Code

_loaded: dict[str, ctypes.CDLL] = {}


class Libraries:
    """What is written beside the graphs of an artifact: each library once, by number."""

    def __init__(self) -> None:
        self._files: dict[Path, Path] = {}
        self._sources: dict[Path, dict[str, Source]] = {}

    def number(self, file: Path, source: Source) -> int:
        """That of the library in `file`, which was built of `source`, maybe among others."""
        first = self._files.setdefault(cache_entry.library_of(file.parent) or file, file)
        self._sources.setdefault(first, {})[source.text] = source
        return list(self._sources).index(first)

    def unaligned(self, code: Code, library: Path) -> tuple[Source, Path] | None:
        """What serves inputs that are not aligned, which is built; None where it cannot be, so that they run the operators."""
        try:
            source = code.unaligned()
            return source, build.build(source)
        except BuildError:
            return None

    def entries(self) -> tuple[list[str], dict[str, bytes]]:
        """The names of the libraries in an artifact, in order; and its entries, the sources among them.

        Raises:
            OSError: a library is damaged by now.
        """
        names, files = [], {}
        for number, (file, sources) in enumerate(self._sources.items()):
            first = next(iter(sources.values()))
            names.append(f"libraries/{number}-{first.name}.so")
            with cache_entry.opened(file) as checked:
                files[names[-1]] = Path(checked).read_bytes()
            for source in sources.values():
                files[f"sources/{number}-{source.name}{cache_entry.suffix(source)}"] = source.text.encode()
        return names, files


class LoadedLibraries:
    """The libraries of an artifact by number: those that were taken while it was open."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._names: list[str] = reader.manifest["libraries"]
        self._taken: dict[int, ctypes.CDLL] = {}

    def take(self, numbers: Iterable[int]) -> None:
        """Load those of these numbers that are not yet.

        Raises:
            ArtifactError: one is damaged, or the loader does not take it.
        """
        for number in {*numbers} - self._taken.keys():
            name = self._names[number]
            content = self._reader.read(name)
            self._taken[number] = load(self._reader.manifest["entries"][name][1], content)

    def __getitem__(self, number: int) -> ctypes.CDLL:
        return self._taken[number]


def load(digest: str, content: bytes) -> ctypes.CDLL:
    """The library with these bytes, whose hash is `digest`; a process loads it once.

    Raises:
        ArtifactError: the loader does not take it.
    """
    if digest not in _loaded:
        try:
            _loaded[digest] = _from_memory(digest, content)
        except OSError as error:
            raise ArtifactError(f"a library of the artifact cannot be loaded on this machine: {error}") from error
    return _loaded[digest]


def _from_memory(digest: str, content: bytes) -> ctypes.CDLL:
    try:
        descriptor = os.memfd_create(f"fusepass-{digest[:16]}", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            return ctypes.CDLL(trust.path_of(descriptor))
    except OSError:  # a sandbox that has no such files, or runs none
        return _from_disk(content)


def _from_disk(content: bytes) -> ctypes.CDLL:
    with cache_folders.stage(Path(tempfile.gettempdir()), cache_folders.OWN) as folder:
        path = folder / "lib.so"
        path.write_bytes(content)
        return ctypes.CDLL(str(path))
