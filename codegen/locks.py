"""Locks that nobody waits for without end, and marks by which a folder of a process that has ended is known."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

_MARK = "alive"


@contextlib.contextmanager
def held(path: Path, patience: float) -> Iterator[bool]:
    """Hold the lock at `path` until the block ends; yields False where it could not be had within `patience` seconds.

    Raises:
        OSError, NotImplementedError: it cannot be locked at all.
    """
    import filelock  # here: a process that finds all it wants has no use for it

    _clean(path)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=patience)
    except filelock.Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def discard(path: Path) -> None:
    """Remove the lock at `path`, unless it is held."""
    with contextlib.suppress(OSError), _locked_at_once(path):
        path.unlink()


def mark(folder: Path) -> int:
    """Mark `folder` as in use until the descriptor that is returned is closed, or this process and its children end."""
    fresh = folder / f"{_MARK}.new"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # where files cannot be locked, the folder's age has to tell
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(folder / _MARK)  # only now, or it would look abandoned for a moment
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def abandoned(folder: Path) -> bool:
    """Whether `folder` was marked by a process that has ended."""
    try:
        with _locked_at_once(folder / _MARK):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def _locked_at_once(path: Path) -> Iterator[None]:
    """Hold the lock of the file at `path`, or raise OSError if somebody else does."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _clean(path: Path) -> None:
    """Take away what is at `path` and can be no lock."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    elif not stat.S_ISREG(mode):
        path.unlink(missing_ok=True)
