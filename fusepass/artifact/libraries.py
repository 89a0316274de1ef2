"""Loads shared libraries whose bytes were read and compared with their hash, so that no file can change in between."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

from fusepass.codegen import cache_folders, trust
from fusepass.errors import ArtifactError

_loaded: dict[str, ctypes.CDLL] = {}


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
