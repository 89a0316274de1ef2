"""Python's garbage collector, put off while much is made that stays: each collection would go over all of it again."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from fusepass import background

_here = threading.local()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection in any thread; for a few seconds at most, as other threads' garbage stays, too.

    What is done beside the program takes longer, and pauses nothing.
    """
    if not gc.isenabled() or background.active():
        yield
        return
    gc.disable()
    _here.paused = True
    try:
        yield
    finally:
        _here.paused = False
        gc.enable()


@contextlib.contextmanager
def collector_resumed() -> Iterator[None]:
    """Collections again, inside a pause of this thread's: for what waits, or takes long."""
    if not getattr(_here, "paused", False):
        yield
        return
    _here.paused = False
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        _here.paused = True
