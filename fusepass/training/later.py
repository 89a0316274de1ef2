"""Graphs that run their own operators until they are compiled beside the program (``Config.compile``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusepass import background
from fusepass.background import Job
from fusepass.runtime.modes import ThreadModes, settle
from fusepass.training.calls import Call


class Later:
    """A boxed call that something better takes the place of.

    Args:
        name: what reports call the job.
        now: what serves calls at first, and for good where compiling fails.
        make: makes what serves them later, in another thread.
        jobs: where the job is noted while it is under way.
    """

    def __init__(self, name: str, now: Call, make: Callable[[], Call], jobs: list[Job]) -> None:
        self._boxed_call = True  # to AOTAutograd
        self._call = now
        modes = ThreadModes()

        def work() -> None:
            with modes.entered():
                made = make()
                settle()
            self._call = made

        jobs[:] = [job for job in jobs if not job.over or job.error]
        jobs.append(job := Job(name, work))
        background.start(job)

    def __call__(self, arguments: list[Any]) -> Any:
        return self._call(arguments)
