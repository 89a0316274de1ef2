"""Built libraries on disk under the hash of all that made them: atomic, locked across processes, verified.

Layout, below `Config.cache_dir`::

    v1/<first two digits of key>/<key>/  lib.so, source.cu or source.cpp, meta.json
    v1/tmp-*/                            builds under way
    v1/failed/                           sources that did not compile
    v1/choices/                          what `fusepass.codegen.choices` keeps
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fusepass.codegen.source import Source, Target
from fusepass.config import current
from fusepass.errors import BuildError, FusepassWarning

FORMAT = 1
UNREADABLE = "(unreadable)"
_SUFFIXES = {Target.CPU: ".cpp", Target.CUDA: ".cu"}
_STALE_SECONDS = 3600.0  # no build takes that long: its process has died


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
        return self.path / "lib.so"

    @property
    def intact(self) -> bool:
        """Whether the library is, byte for byte, the one that was built."""
        return _sha256(self.library) == self.sha256


def lookup(key: str) -> Path | None:
    """The library kept under `key`, if it is there and intact."""
    path = _entry_path(_root(), key)
    return path / "lib.so" if path.is_dir() and _read(path).intact else None


def store(key: str, source: Source, compile: Callable[[Path], Path]) -> Path:
    """Build `source` and keep it under `key`, unless another thread or process has done so meanwhile.

    `compile` writes into the directory it is given and returns the library. A damaged entry is replaced,
    with a warning. Where the cache directory cannot be written, a directory of this process serves instead,
    with one warning.

    Raises:
        BuildError: `compile` raised it, and now its `path` names a copy of the source; or nothing can be
            written.
    """
    try:
        return _store(_root(), key, source, compile)
    except (OSError, NotImplementedError) as error:  # filelock raises the latter where files cannot be locked
        _fall_back(current().cache_dir, str(error))
    try:
        return _store(_root(), key, source, compile)
    except OSError as error:
        raise BuildError(f"a build cannot be written: {error}", path=_root()) from error


def directory() -> Path:
    """The cache directory, which exists: the configured one, or one of this process where that cannot serve.

    Warns the first time that it is not the configured one.
    """
    configured = current().cache_dir
    if configured in _private:
        return _private[configured]
    problem = unusable(configured)
    return _fall_back(configured, problem) if problem else configured


def unusable(directory: Path) -> str | None:
    """Why `directory` cannot serve as cache, or None; makes it where it does not exist.

    Libraries in it are run, so that nobody else may be able to put one there.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _format_directory(directory).mkdir(mode=0o700, exist_ok=True)
        stat = directory.stat()
    except OSError as error:
        return str(error)
    if stat.st_uid != os.getuid():
        return f"it belongs to user {stat.st_uid}, not to {os.getuid()}"
    if stat.st_mode & 0o022:
        return f"others may write to it (mode {stat.st_mode & 0o777:o}; `chmod go-w` helps)"
    if not os.access(_format_directory(directory), os.W_OK | os.X_OK):
        return "it is not writable"
    return None


def entries() -> list[CacheEntry]:
    """All entries, in the order of their keys."""
    return [_read(path) for path in sorted(_root().glob("??/*")) if path.is_dir()]


def verify() -> list[CacheEntry]:
    """The damaged entries. Each is built anew when it is next asked for."""
    return [entry for entry in entries() if not entry.intact]


def clear() -> int:
    """Remove all entries and what dead builds left; builds under way are not disturbed.

    Returns:
        How many bytes were freed.
    """
    now = time.time()
    root = _root()
    left = [path for path in root.glob("tmp-*") if now - path.stat().st_mtime > _STALE_SECONDS]
    left += [root / "failed", root / "choices", *(entry.path for entry in entries())]
    freed = sum(map(_nbytes, left))
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return freed


def choices() -> Path:
    """The directory of measured choices, which exists."""
    path = _root() / "choices"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def suffix(source: Source) -> str:
    """File name ending of the text of `source`."""
    return _SUFFIXES[source.target]


def _store(root: Path, key: str, source: Source, compile: Callable[[Path], Path]) -> Path:
    path = _entry_path(root, key)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    import filelock  # here: a process that finds all it wants has no use for it

    with filelock.FileLock(f"{path}.lock"):
        if path.is_dir():
            if _read(path).intact:
                return path / "lib.so"
            warnings.warn(f"the cache entry {path} is damaged; it is built anew", FusepassWarning, stacklevel=2)
            shutil.rmtree(path)
        stage = Path(tempfile.mkdtemp(prefix="tmp-", dir=root))
        try:
            _fill(stage, source, compile)
            stage.rename(path)
        except BuildError as error:
            error.path = _keep_failed(root, key, source)
            raise
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return path / "lib.so"


def _fill(stage: Path, source: Source, compile: Callable[[Path], Path]) -> None:
    """Make `stage` a complete entry. The library is moved, not copied: a loaded one stays the same file."""
    work = stage / "work"
    work.mkdir()
    start = time.monotonic()
    compile(work).rename(stage / "lib.so")
    seconds = time.monotonic() - start
    shutil.rmtree(work)
    (stage / f"source{suffix(source)}").write_text(source.text)
    described = {
        "name": source.name,
        "entry": source.entry,
        "target": source.target.value,
        "arch": source.arch,
        "sha256": _sha256(stage / "lib.so"),
        "build_seconds": round(seconds, 3),
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    (stage / "meta.json").write_text(json.dumps(described, indent=1))


def _keep_failed(root: Path, key: str, source: Source) -> Path:
    path = root / "failed" / f"{source.name}-{key[:16]}{suffix(source)}"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text(source.text)
    return path


def _format_directory(directory: Path) -> Path:
    return directory / f"v{FORMAT}"


def _root() -> Path:
    return _format_directory(directory())


def _entry_path(root: Path, key: str) -> Path:
    return root / key[:2] / key


def _read(path: Path) -> CacheEntry:
    nbytes = _nbytes(path)
    try:
        described = json.loads((path / "meta.json").read_text())
        created = datetime.fromisoformat(described.pop("created"))
        target = Target(described.pop("target"))
        return CacheEntry(path, nbytes, target=target, created=created, **described)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        target = Target.CUDA if (path / f"source{_SUFFIXES[Target.CUDA]}").exists() else Target.CPU
        created = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
        return CacheEntry(path, nbytes, UNREADABLE, "", target, "", "", 0.0, created)


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


_private: dict[Path, Path] = {}  # configured directory -> the one of this process that serves instead
_private_lock = threading.Lock()


def _fall_back(directory: Path, problem: str) -> Path:
    """A directory of this process in place of `directory`; warns once, removed at exit."""
    with _private_lock:
        if directory in _private:
            return _private[directory]
        private = _private[directory] = Path(tempfile.mkdtemp(prefix="fusepass-"))
        _format_directory(private).mkdir()
    atexit.register(_remove_private, private, os.getpid())
    warnings.warn(
        f"the cache directory {directory} cannot be used: {problem}; kernels are built for this process "
        f"alone, in {private}; `python -m fusepass doctor` examines the tool chain",
        FusepassWarning,
        stacklevel=2,
    )
    return private


def _remove_private(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child still runs its parent's exit functions
        shutil.rmtree(directory, ignore_errors=True)
