"""How far a compilation is: told step by step, shown on a terminal where it takes long, read by reports."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from fusepass.config import current

_SHOWN_AFTER = 1.0  # seconds
_REFRESHED = 0.1  # seconds between two lines


@dataclass(frozen=True)
class Step:
    """What a compilation does at a moment.

    Attributes:
        stage: such as ``"build"``; an infinitive.
        done: how many are done.
        of: how many there are to do; 0 where that is not counted.
        what: which one is under way.
    """

    stage: str
    done: int = 0
    of: int = 0
    what: str = ""

    def __str__(self) -> str:
        counted = f" {self.done} of {self.of} done" if self.of else ""
        return f"{self.stage}{counted}{f', now {self.what}' if self.what else ''}"


class Progress:
    """The step that one compilation is at; other threads may read it.

    Args:
        name: of what is compiled.
        checkpoint: is called at each step, in the thread that compiles.
    """

    def __init__(self, name: str, checkpoint: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.step: Step | None = None
        self._checkpoint = checkpoint

    def at(self, step: Step) -> None:
        """The compilation is at `step` now."""
        self.step = step
        self._checkpoint()

    def __str__(self) -> str:
        return self.name if self.step is None else f"{self.name}: {self.step}"


_followed: ContextVar[Progress | None] = ContextVar("fusepass_progress", default=None)


def tell(stage: str, done: int = 0, of: int = 0, what: str = "") -> None:
    """Say which step the compilation of this context is at."""
    progress = _followed.get()
    if progress is not None:
        progress.at(Step(stage, done, of, what))


@contextmanager
def followed(progress: Progress) -> Iterator[None]:
    """While open, steps are told to `progress`."""
    token = _followed.set(progress)
    try:
        yield
    finally:
        _followed.reset(token)


@contextmanager
def shown(name: str) -> Iterator[None]:
    """While open, steps of compiling `name` are shown on stderr as ``Config.progress`` says, unless somebody follows them already.

    A compilation of less than a second shows nothing, and the line is erased at the end.
    """
    wanted = current().progress
    if _followed.get() is not None or wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield
        return
    progress, over = Progress(name), threading.Event()
    thread = threading.Thread(target=_show, args=(progress, over), daemon=True)
    thread.start()
    try:
        with followed(progress):
            yield
    finally:
        over.set()
        thread.join()


def _show(progress: Progress, over: threading.Event) -> None:
    start = time.monotonic()
    if over.wait(_SHOWN_AFTER):
        return
    while not over.wait(_REFRESHED):
        passed = time.monotonic() - start
        print(f"\r\033[Kfusepass: {progress} ... {passed:.1f} s", end="", file=sys.stderr, flush=True)
    print("\r\033[K", end="", file=sys.stderr, flush=True)
