"""Exceptions and warnings that fusepass raises; refusing to fuse is a value, not an error."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any


class FusepassError(Exception):
    """Base class of every exception that fusepass itself raises for a fault of its own or of the machine."""


class CaptureError(FusepassError):
    """A model could not be turned into an ATen graph; the text says which construct stopped it.

    Args:
        final: no other way of capturing can help either.
        only_children: no way of capturing it whole gives eager's results.
    """

    def __init__(self, text: str, *, final: bool = False, only_children: bool = False) -> None:
        super().__init__(text)
        self.final = final
        self.only_children = only_children


class IRError(FusepassError):
    """A kernel program breaks an invariant of the IR: a bug in lowering or in an IR pass."""


class ScheduleError(FusepassError):
    """No schedule fits a kernel on a device: a bug in the scheduler."""


class RenderError(FusepassError):
    """A program could not be printed as source: a bug in the renderer."""


class BuildError(FusepassError):
    """The compiler, the loader or the cache failed.

    Attributes:
        command: the command that ran, empty where none was started.
        path: the source file or directory concerned, if any.
        stderr: what the command printed, untouched.
    """

    def __init__(
        self, message: str, *, command: Sequence[str] = (), path: Path | None = None, stderr: str = ""
    ) -> None:
        super().__init__(message)
        self.command = tuple(command)
        self.path = path
        self.stderr = stderr

    def __str__(self) -> str:
        parts = [super().__str__()]
        if self.command:
            parts.append("command: " + " ".join(self.command))
        if self.path is not None:
            parts.append(f"path: {self.path}")
        if self.stderr:
            parts.append(self.stderr.strip())
        return "\n".join(parts)


class ArtifactError(FusepassError):
    """A model cannot be saved as an artifact, or a file is none that can be loaded here; the text says why and what to do."""


class FusepassWarning(UserWarning):
    """Something ran as the original operators, or slower than it could; shown once per cause."""


@dataclass(frozen=True)
class Place:
    """A line of the user's program, and the module that it is in, by its globals."""

    file: str
    line: int
    entries: dict[str, Any]


_said_at: ContextVar[Place | None] = ContextVar("fusepass_said_at", default=None)


def not_saved(name: str) -> str:
    """Why an artifact has nothing for a region at the sizes of a call."""
    return f"the artifact has no library for {name} at these sizes; save it with an example of them, too"


def warn(text: str) -> None:
    """Show `text` as a `FusepassWarning` of the user's line that led here, and log it."""
    logging.getLogger("fusepass").info(text)
    place = _said_at.get() or place_of_user()
    registry = place.entries.setdefault("__warningregistry__", {})
    source = None if place.file.startswith("<") else place.entries  # a prompt's loader has none, and raises
    warnings.warn_explicit(
        text, FusepassWarning, place.file, place.line, place.entries.get("__name__"), registry, source
    )


def place_of_user() -> Place:
    """The first line, from the innermost call on, that is outside of this package, of torch, and of code that has no file.

    Where all code is such, as at a prompt or in ``python -c``, the outermost line.
    """
    frame: FrameType = sys._getframe(1)
    while _is_inside(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


@contextmanager
def said_at(place: Place) -> Iterator[None]:
    """While open, warnings of this context are those of the line `place`: that of a call for which another thread works."""
    token = _said_at.set(place)
    try:
        yield
    finally:
        _said_at.reset(token)


def _is_inside(file: str) -> bool:
    torch = sys.modules.get("torch")
    folders = [Path(__file__).parent, *([Path(torch.__file__).parent] if torch is not None and torch.__file__ else [])]
    return file.startswith(("<", *(f"{folder}/" for folder in folders)))
