"""Whether replaying pays, found out in a specialisation's first calls: it does where launches take longer than kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fusepass.runtime.fast_path import awaited

_SAMPLES = 3
_MANY = 8
"""Calls in a graph from which on a replay is quicker than launches, with Python or without it."""
_HIDDEN = 2.0
"""How many times as long as the host a device may take and still be thought to wait for it now and then, at the begin of a call above all."""
_WORTH = 0.95
"""Of the time of launches, what a replay may take at most to be kept."""


class Taken(NamedTuple):
    """Seconds of one call: of the host, until everything was launched, and of the device, from its begin to its end."""

    host: float
    device: float


Pending = Callable[[], Taken | None]
"""What a call took; None as long as the device works on it. Never waits."""


@dataclass
class ReplayTrial:
    """Says of each call whether to launch or to replay it, until `verdict` is known.

    Nothing waits for the device: a call counts once the device is through with it, and calls in between are like it.

    Attributes:
        ready: whether calls are launched as they will be later on; so long nothing is timed.
        verdict: why calls are launched; empty where they are replayed; None so far.
    """

    ready: Callable[[], bool] = lambda: True
    verdict: str | None = None
    _launched: list[Pending] = field(default_factory=list)
    _replayed: list[Pending] = field(default_factory=list)

    @classmethod
    def of(cls, calls: int) -> ReplayTrial:
        """The trial of a graph of so many calls, which begins once the library is there by which few are quicker than a replay."""
        return cls(lambda: calls >= _MANY or not awaited())

    def replays(self) -> bool:
        """Whether the next call is to be replayed."""
        if self.verdict is not None:
            return not self.verdict
        launched = _least(self._launched)
        if launched is None:
            return False
        if launched.device > _HIDDEN * launched.host:
            self.verdict = "its kernels take longer than their launches"
            return False
        replayed = _least(self._replayed)
        if replayed is not None:
            faster = max(replayed) <= _WORTH * max(launched)
            self.verdict = "" if faster else "a replay takes as long as the launches"
            return faster
        return True

    def add(self, replayed: bool, pending: Pending) -> None:
        """Note one more call."""
        (self._replayed if replayed else self._launched).append(pending)


def _least(calls: list[Any]) -> Taken | None:
    """The least of each time; None as long as too few are known. The first call, which prepares things, does not count."""
    known = [taken for pending in calls[1:] if (taken := pending()) is not None]
    if len(known) < _SAMPLES:
        return None
    return Taken(min(taken.host for taken in known), min(taken.device for taken in known))
