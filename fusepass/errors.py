"""Exceptions and warnings that fusepass raises; refusing to fuse is a value, not an error."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType


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


def warn(text: str) -> None:
    """Show `text` as a `FusepassWarning` of the user's line that led here, and log it.

    That line is the first one outside of this package, of torch, and of code that has no file.
    """
    logging.getLogger("fusepass").info(text)
    frame: FrameType | None = sys._getframe(1)
    level, depth = 2, 2
    while frame is not None:
        if not _is_inside(frame.f_code.co_filename):
            level = depth
            break
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, FusepassWarning, stacklevel=level)


def _is_inside(file: str) -> bool:
    torch = sys.modules.get("torch")
    folders = [Path(__file__).parent, *([Path(torch.__file__).parent] if torch is not None and torch.__file__ else [])]
    return file.startswith(("<", *(f"{folder}/" for folder in folders)))
