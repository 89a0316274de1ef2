"""Clocks of tests, for candidates that say themselves how long they take."""

from __future__ import annotations

from collections.abc import Callable

from fusepass import measure


class Told(measure.Clock):
    """Gives what `seconds` makes of a call."""

    def __init__(self, seconds: Callable[[Callable[[], object]], float]) -> None:
        self._seconds = seconds

    def __call__(self, call: Callable[[], object]) -> float:
        return self._seconds(call)


class FakeTime:
    """Time in which a call takes 0.1 ms, and what it says that it spends."""

    def __init__(self) -> None:
        self.spent = 0.0
        self.clock = Told(self._seconds)

    def spend(self, seconds: float) -> None:
        self.spent += seconds

    def interrupt(self) -> None:
        """What a call says whose thread had to leave the processor to another one."""
        self.clock.interruptions += 1

    def _seconds(self, call: Callable[[], object]) -> float:
        self.spent = 1e-4
        call()
        return self.spent
