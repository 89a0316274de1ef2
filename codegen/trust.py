"""Opens files that nobody else can have put there: level by level, no links followed, owner and mode of each compared.

What belongs to the user or to root, and neither group nor others may write to, is trusted.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # or a pipe would be waited for
_MOST_LINKS = 40  # as in the kernel
_MOST_BYTES = 1 << 24  # of a description
_PART = 1 << 16  # bytes to read at once
_ROOT = 0
_opened = itertools.count()


class Distrusted(PermissionError):
    """Somebody else may have written what is to be read, or may change it."""


def problem(path: Path) -> str | None:
    """Why nothing in the folder `path` may be used, or put there; None, too, where there is none."""
    try:
        _check_above(path)
        if os.path.islink(path):
            return "it is a link; name the folder itself"
        with folder(path):
            return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return str(error)


def make(path: Path) -> None:
    """Make the folder `path`, and those above it that are missing, for this user alone.

    Raises:
        OSError: that cannot be; `Distrusted` where one would be made in somebody else's folder.
    """
    missing = [here for here in (path, *path.parents) if not os.path.lexists(here)]
    for each in reversed(missing):
        owner = each.parent.stat().st_uid
        if not _is_trusted(owner):
            raise Distrusted(f"{each.parent}, where it would be made, belongs to user {owner}, not to {os.getuid()}")
        each.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(exist_ok=True)  # raises where it is no folder


@contextlib.contextmanager
def folder(top: Path, *names: str) -> Iterator[int]:
    """A descriptor of the folder `names` below the folder `top`.

    Raises:
        OSError: it cannot be opened, or a level is a link; `Distrusted` where it or a level from `top` on is not trusted.
    """
    descriptor = os.open(top, _FOLDER)
    try:
        _check(descriptor)
        for depth, name in enumerate(names, 1):
            above, descriptor = descriptor, os.open(name, _FOLDER, dir_fd=descriptor)
            os.close(above)
            _check(descriptor, *names[:depth])
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folder_of(path: Path) -> Iterator[int]:
    """A descriptor of the folder that `path` is in, whoever may write there: what is opened in it is compared by itself.

    Raises:
        OSError: there is no such folder.
    """
    descriptor = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file(inside: int, name: str) -> Iterator[int]:
    """A descriptor of the file `name` of the folder that is open as `inside`.

    Raises:
        OSError: it cannot be opened, is a link or no file; `Distrusted` where it is not trusted.
    """
    descriptor = os.open(name, _FILE, dir_fd=inside)
    try:
        if not stat.S_ISREG(_check(descriptor, name).st_mode):
            raise OSError(errno.EINVAL, "it is no file", name)
        yield descriptor
    finally:
        os.close(descriptor)


def content(descriptor: int, most: int = sys.maxsize) -> bytes:
    """The bytes of the file that is open as `descriptor`, and has not been read from: all, or more than `most`."""
    parts, length = [], 0
    while length <= most:
        part = os.read(descriptor, _PART)
        parts.append(part)
        length += len(part)
        if len(part) < _PART:
            break
    return b"".join(parts)


def read_object(inside: int, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` of the folder that is open as `inside`.

    Raises:
        OSError: as `file` does.
        ValueError: it holds something else, however odd.
    """
    with file(inside, name) as descriptor:
        text = content(descriptor, _MOST_BYTES)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{name} is too long")
    try:
        read = json.loads(text)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    if not isinstance(read, dict):
        raise ValueError(f"{name} holds no object")
    return read


def path_of(descriptor: int) -> str:
    """A path of the file that is open as `descriptor`, which no other call gives.

    The loader takes a path that it has seen for the library that it loaded then, and numbers of descriptors recur. So the
    number of this call is written into the path, a slash for each binary digit: none of them changes what it names.
    """
    spelled = "".join("/." if digit == "1" else "/" for digit in f"{next(_opened):b}")
    return f"/proc/self/fd{spelled}/{descriptor}"


def _check_above(path: Path) -> None:
    """Raise `Distrusted` if others could put another folder in the place of `path` by what they may do to those above it.

    In a folder that everybody may write to, everybody may replace any folder; with the sticky bit, only put a link where
    nothing was. Links are followed, and those that do not exist are not looked at.
    """
    here, sticky, followed = "/", False, 0
    pending = [*reversed(path.parent.parts[1:])]
    while True:
        try:
            status = os.lstat(here)
        except FileNotFoundError:
            return
        if stat.S_ISLNK(status.st_mode):
            if sticky and not _is_trusted(status.st_uid):
                raise Distrusted(f"the link {here} above it belongs to user {status.st_uid}")
            followed += 1
            if followed > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            pending += reversed(Path(os.readlink(here)).parts)
            here = os.path.dirname(here)
        else:
            sticky = bool(status.st_mode & stat.S_ISVTX)
            if status.st_mode & stat.S_IWOTH and not sticky:
                raise Distrusted(f"others may write to {here} above it (mode {stat.S_IMODE(status.st_mode):o})")
        if not pending:
            return
        part = pending.pop()
        here = os.path.dirname(here) if part == ".." else os.path.join(here, part)


def _check(descriptor: int, *names: str) -> os.stat_result:
    """The status of what is open as `descriptor`; raises `Distrusted` if others could have written to it, or can."""
    status = os.fstat(descriptor)
    name = "/".join(names) or "it"
    if not _is_trusted(status.st_uid):
        raise Distrusted(f"{name} belongs to user {status.st_uid}, not to {os.getuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise Distrusted(f"others may write to {name} (mode {mode:o}; `chmod go-w` helps)")
    return status


def _is_trusted(owner: int) -> bool:
    return owner in (os.getuid(), _ROOT)
