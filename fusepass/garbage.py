"""Python's garbage collector, put off while much is made that stays: each collection would go over all of it again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from fusepass import background


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection in any thread; for a few tenths of a second at most, as other threads' garbage stays, too.

    What is done beside the program takes longer, and pauses nothing.
    """
    if not gc.isenabled() or background.active():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
