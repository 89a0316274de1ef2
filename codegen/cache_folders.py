"""The folders of the cache: the configured one, or one of this process where that cannot serve, and what is below."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fusepass.codegen import locks, trust
from fusepass.config import cache_directory
from fusepass.errors import warn

FORMAT = "v1"
CHOICES, REGIONS, GRAPHS, FAILED, SHARED = "choices", "regions", "graphs", "failed", "shared"
RECORDS = (CHOICES, REGIONS, GRAPHS)
"""The folders of `fusepass.codegen.records`."""

LIBRARIES = "libraries"
"""What entries are in where they are named; on disk they are in folders of two digits."""

STAGE = "tmp-"
"""How folders of builds under way begin."""

RECENT = 600.0
"""Seconds for which what was used is not taken away, whatever room is wanted: another process may be about to load it."""

LOCK = ".lock"
"""How the names of locks end."""

OWN = "fusepass-"
"""How folders in the system's temporary directory begin."""

_private: dict[Path, Path] = {}  # configured directory -> the one of this process that serves instead
_private_lock = threading.Lock()


def directory() -> Path:
    """The cache directory: the configured one, or one of this process where that cannot be trusted.

    Warns the first time that it is not the configured one.
    """
    return _served(trust.problem)


def directories() -> list[Path]:
    """Where to look for what is kept: the directory of this process, if there is one, and the configured one, if it is trusted.

    It need not be writable.
    """
    configured = cache_directory()
    own = [_private[configured]] if configured in _private else []
    return own if trust.problem(configured) else [*own, configured]


def writable() -> Path:
    """The cache directory that is written to, which exists; warns the first time that it is not the configured one."""
    return _served(unusable)


def unusable(directory: Path) -> str | None:
    """Why `directory` cannot be written to as a cache, or None; makes it where it does not exist.

    Libraries in it are run, so that nobody else may be able to put one there.
    """
    if problem := trust.problem(directory):
        return problem
    try:
        trust.make(directory)
        with trust.folder(directory) as folder:
            owner = os.fstat(folder).st_uid
        if owner != os.getuid():
            return f"it belongs to user {owner}, not to {os.getuid()}"
        root(directory).mkdir(mode=0o700, exist_ok=True)
        with trust.folder(directory, FORMAT):
            pass
    except OSError as error:
        return str(error)
    if not os.access(root(directory), os.W_OK | os.X_OK):
        return "it is not writable"
    return None


def fall_back(problem: str) -> Path:
    """A directory of this process in place of the configured one; warns the first time. Removed at exit."""
    configured = cache_directory()
    with _private_lock:
        if configured in _private:
            return _private[configured]
        private = Path(tempfile.mkdtemp(prefix=OWN))
        root(private).mkdir(mode=0o700)
        locks.mark(private)  # for as long as this process lives
        _private[configured] = private
    atexit.register(_remove_private, private, os.getpid())
    warn(
        f"the cache directory {configured} cannot be used: {problem}; kernels are built for this process "
        f"alone, in {private}; `python -m fusepass doctor` examines the tool chain"
    )
    return private


def root(top: Path) -> Path:
    """Where the cache directory `top` keeps what has the present format."""
    return top / FORMAT


def level(top: Path, name: str) -> Path:
    """The folder `name` of the cache directory `top`, which exists. One that is not trusted is replaced, with a warning."""
    path = root(top) / name
    try:
        path.mkdir(mode=0o700)
        return path
    except FileExistsError:
        pass
    try:
        with trust.folder(top, FORMAT, name):
            return path
    except FileNotFoundError:  # it was empty, and `cache.clear` has just removed it
        raise
    except OSError as error:
        warn(f"{path} is removed from the cache: {error}")
    remove(path)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@contextlib.contextmanager
def stage(inside: Path, prefix: str) -> Iterator[Path]:
    """A folder below `inside` until the block ends, removed by `cache.clear` should this process not live to do so."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
    try:
        mark = locks.mark(path)
        try:
            yield path
        finally:
            os.close(mark)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def touch(descriptor: int) -> bool:
    """Note that what is open as `descriptor` is used now, and say whether that was written: a time that is recent enough stays.

    Raises:
        OSError: it cannot be noted.
    """
    now = time.time()
    if now - os.fstat(descriptor).st_mtime > RECENT:
        os.utime(descriptor, (now, now))
        return True
    return False


def remove(path: Path) -> None:
    """Take away what is at `path`: a folder with all in it, a file, a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def nbytes(path: Path) -> int:
    """The size of the file at `path`, or of all files below it."""
    paths = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return sum(status.st_size for status in map(os.lstat, paths) if not stat.S_ISDIR(status.st_mode))


def _served(problem_of: Callable[[Path], str | None]) -> Path:
    configured = cache_directory()
    if configured in _private:
        return _private[configured]
    problem = problem_of(configured)
    return fall_back(problem) if problem else configured


def _remove_private(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child still runs its parent's exit functions
        shutil.rmtree(directory, ignore_errors=True)
