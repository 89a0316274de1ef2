"""What one model has compiled beside its calls (``Config.compile``): the jobs under way, and what only a thread that calls it can capture."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from fusepass import background
from fusepass.background import Job
from fusepass.capture.isolation import NotBeside
from fusepass.capture.trace import CaptureFailure
from fusepass.dispatch.making import Begun, Maker, kinds
from fusepass.progress import tell
from fusepass.runtime.modes import ThreadModes

_log = logging.getLogger(__name__)
_MOST_WAITING = 8
"""Jobs of one model at once: each keeps the inputs of a call."""

_MOST_TRIES = 4
"""Captures beside that come to nothing as the model is changed meanwhile; then a thread that calls it captures it."""

_DYNAMO = "fusepass.training.backend"
"""The module that imports it."""

Conclude = Callable[[object, CaptureFailure], None]
"""What is told, with the lock held, that calls of that key cannot be specialised for."""


class Beside:
    """The jobs of one model.

    Args:
        maker: makes its specialisations.
        lock: the specialiser's.
        conclude: as `Conclude`; it is no method of the specialiser's, whom jobs that wait do not keep.
    """

    __slots__ = ("__weakref__", "_conclude", "_jobs", "_left", "_lock", "_maker", "_tries")

    def __init__(self, maker: Maker, lock: threading.RLock, conclude: Conclude) -> None:
        self._maker = maker
        self._lock = lock
        self._conclude = conclude
        self._jobs: dict[object, Job] = {}
        self._left: dict[object, str] = {}
        self._tries: Counter[object] = Counter()

    @property
    def jobs(self) -> list[Job]:
        """Those under way, and those that failed."""
        return [job for job in tuple(self._jobs.values()) if job.error or not job.over]

    def under_way(self, kind: object) -> bool:
        """Whether there is a job for calls of this `kind`."""
        job = self._jobs.get(kind)
        return job is not None and not job.over

    def is_left(self, kind: object) -> bool:
        """Whether only a thread that makes such a call can capture it."""
        return kind in self._left

    def leave(self, kind: object, reason: str) -> None:
        """From now on that is so."""
        _log.info("%s: not captured beside the calls: %s", self._maker.name, reason)
        with self._lock:
            self._left[kind] = reason

    def capture(
        self,
        key: object,
        kind: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Job | None:
        """Have such a call captured and compiled; None where that is not to be now."""
        return self._start(kind, tensors, lambda own: own._captured(key, kind, args, kwargs, tensors))

    def compile(self, key: object, kind: object, begun: Begun) -> None:
        """Have a call compiled that was captured."""
        self._start(kind, begun.tensors, lambda own: own._compiled(key, begun))

    def dynamo_is_there(self) -> bool:
        """Whether Dynamo is imported, which takes seconds; if not, that is done."""
        if _DYNAMO in sys.modules:
            return True
        with self._lock:
            if not self.under_way(_DYNAMO):
                self._add(_DYNAMO, f"{self._maker.name} for calls that need gradients", _import_dynamo)
        return False

    def _start(self, kind: object, tensors: Sequence[torch.Tensor], work: Callable[[Beside], None]) -> Job | None:
        """Have `work` done in the modes of this call, unless the model is gone by then."""
        modes, found = ThreadModes(), weakref.ref(self)

        def run() -> None:
            alive = found()
            if alive is not None:
                with modes.entered():
                    work(alive)

        return self._add(kind, f"{self._maker.name} for {kinds(tensors)}", run)

    def _add(self, kind: object, name: str, work: Callable[[], None]) -> Job | None:
        """Have `work` done, unless as much is under way as may be, or it failed before."""
        self._jobs = {each: job for each, job in self._jobs.items() if job.error or not job.over}
        if kind in self._jobs or sum(not job.over for job in self._jobs.values()) >= _MOST_WAITING:
            return None
        self._jobs[kind] = job = Job(name, work)
        background.start(job)
        return job

    def _captured(
        self,
        key: object,
        kind: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """In the thread of the jobs."""
        try:
            begun = self._maker.begin_beside(args, kwargs, tensors)
        except NotBeside as reason:
            self.leave(kind, str(reason))
            return
        if begun is not None:
            self._compiled(key, begun)
            return
        self._tries[kind] += 1  # a later call asks again
        if self._tries[kind] >= _MOST_TRIES:
            self.leave(kind, "the model changed each time it was captured")

    def _compiled(self, key: object, begun: Begun) -> None:
        """In the thread of the jobs."""
        made = self._maker.finish(begun)
        if isinstance(made, CaptureFailure):
            with self._lock:
                self._conclude(key, made)


def kind_of(key: object, tensors: Sequence[torch.Tensor]) -> object:
    """What tells calls apart that are compiled on their own, but for the model's state."""
    modes = torch.is_inference_mode_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))
    facts = tuple((each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in tensors)
    return key, modes, facts


def numpy_state() -> list[object]:
    """The state of NumPy's generator, which a call that draws from it changes; nothing where nobody has imported that."""
    if "numpy.random" not in sys.modules:
        return []
    state: Any = numpy.random.get_state(legacy=False)["state"]
    return [each.tobytes() if isinstance(each, numpy.ndarray) else each for each in state.values()]


def _import_dynamo() -> None:
    tell("import Dynamo")
    importlib.import_module(_DYNAMO)
