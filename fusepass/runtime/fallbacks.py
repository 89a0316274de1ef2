"""Counts, at run time, what ran as the original operators although a fused form was meant for it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fusepass.errors import warn


@dataclass(frozen=True)
class FallbackReport:
    """Calls that ran as the original operators, or as another candidate, although a fused form was meant for them.

    Attributes:
        where: the region or module, or a candidate for a region.
        reason: why, in words.
        count: how many calls.
    """

    where: str
    reason: str
    count: int


class FallbackCounter:
    """Counts fallbacks at run time and warns at the first of each kind. Safe to share between threads.

    Copies and pickles carry the counts, not the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._toolchain_told = False
        self._elsewhere: list[tuple[tuple[str, str], Callable[[], int]]] = []
        self._joined: list[FallbackCounter] = []

    def count(
        self, where: str, reason: str, *, toolchain: bool = False, instead: str = "the original operators"
    ) -> None:
        """Count one call of `where` that ran as something else because of `reason`; `instead` says as what.

        The first of each (where, reason) warns with `FusepassWarning`. `toolchain` says that compiler, CUDA
        toolkit or cache is the cause: the warning names the command that examines them, and there is but one,
        because such a fault mostly befalls every region.
        """
        with self._lock:
            self._counts[where, reason] += 1
            told = self._counts[where, reason] > 1 or (toolchain and self._toolchain_told)
            self._toolchain_told |= toolchain
        if told:
            return
        advice = "; `python -m fusepass doctor` examines the tool chain" if toolchain else ""
        text = f"{where} runs as {instead}: {reason}{advice}"
        warn(text)

    def follow(self, where: str, reason: str, read: Callable[[], int]) -> None:
        """`read` gives how many more calls of `where` were counted elsewhere, for a `reason` that was told before."""
        with self._lock:
            self._elsewhere.append(((where, reason), read))

    def join(self, other: FallbackCounter) -> None:
        """From now on what `other` has counted is among these counts, too."""
        with self._lock:
            if other not in self._joined:
                self._joined.append(other)

    def _all(self) -> Counter[tuple[str, str]]:
        with self._lock:
            counts = self._counts.copy()
            for kind, read in self._elsewhere:
                counts[kind] += read()
            joined = list(self._joined)
        for other in joined:
            counts.update(other._all())
        return counts

    @property
    def total(self) -> int:
        """All fallbacks so far."""
        return self._all().total()

    def records(self) -> tuple[FallbackReport, ...]:
        """The counts so far, in the order of their first occurrence."""
        return tuple(FallbackReport(where, reason, n) for (where, reason), n in self._all().items())

    def __getstate__(self) -> dict[tuple[str, str], int]:
        return dict(self._all())

    def __setstate__(self, counts: dict[tuple[str, str], int]) -> None:
        self.__init__()  # type: ignore[misc]
        self._counts.update(counts)
