"""Several sources as one translation unit: a compiler's start and its headers take longer than most kernels.

Each source keeps its text, in a namespace of its own, and its entries, whose names do not depend on that. So sources whose entries have the
same name, as those of a region's candidates do, are in different units.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fusepass.codegen.source import Source

_INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)
SECONDS = 2e-5  # that a compiler takes for a byte of generated text: 10 us of C++, 14 to 21 us of CUDA by nvcc or NVRTC were measured
_START = 0.6  # seconds that nvcc takes for nothing at all; a C++ compiler, also behind NVRTC, 0.2 and the starts of its processes
_ROUNDED = 1.001  # equal shares add up to the whole
_MOST = 4.0  # seconds of a unit: the last one to begin may be what everybody waits for


def qualified(name: str, source: Source, sources: Sequence[Source]) -> str:
    """What is called `name` in `source`, as the unit of `sources` knows it."""
    return f"in_{source.entry}::{name}" if len(sources) > 1 else name


def joined(sources: Sequence[Source]) -> Source:
    """One source with the kernels and entries of all `sources`, which are for one machine; their headers come first, once."""
    first, *others = sources
    if not others:
        return first
    includes = dict.fromkeys(line.strip() for source in sources for line in _INCLUDE.findall(source.text))
    parts = [f"namespace in_{each.entry} {{\n\n{each.text}\n}}  // namespace in_{each.entry}\n" for each in sources]
    name = f"{first.name}_and_{len(others)}_more"
    headers = tuple(dict.fromkeys(header for source in sources for header in source.headers))
    return replace(first, name=name, text="\n".join([*includes, "", *parts]), headers=headers)


def seconds(source: Source) -> float:
    """About how long a compiler takes for `source` beyond its start."""
    return SECONDS * len(source.text)


class Queue:
    """Sources that wait for one of several compilers, by key. Threads may use it.

    A compiler that is free takes its share of what waits, so that all of them end at about the same time. Where no other one is free, that is
    a share for each that will be, if it is worth a compiler's start.

    Attributes:
        jobs: how many compilers there are.
    """

    def __init__(self, jobs: int, waiting: Mapping[str, Source] | None = None) -> None:
        self.jobs = jobs
        self._waiting = dict(waiting or {})
        self._compilers = self._busy = 0
        self._lock = threading.Lock()

    def add(self, key: str, source: Source) -> None:
        """Let `source` wait behind the others."""
        with self._lock:
            self._waiting[key] = source

    def remove(self, keys: Iterable[str]) -> None:
        """Let the sources of `keys` wait no longer."""
        with self._lock:
            for key in keys:
                self._waiting.pop(key, None)

    def clear(self) -> None:
        """Let nothing wait."""
        with self._lock:
            self._waiting.clear()

    def begin(self) -> bool:
        """Whether there may be one more compiler; it is to take `units`."""
        with self._lock:
            begun = self._compilers < self.jobs
            self._compilers += begun
            return begun

    def units(self) -> Iterator[dict[str, Source]]:
        """What a compiler that has begun gets, one unit after another, until nothing waits."""
        busy = False
        try:
            while True:
                with self._lock:
                    self._busy -= busy
                    taken = self._share()
                    busy = bool(taken)
                    self._busy += busy
                    if not taken:
                        self._compilers -= 1
                        return
                yield taken
        except GeneratorExit:
            with self._lock:
                self._busy -= busy
                self._compilers -= 1
            raise

    def _share(self) -> dict[str, Source]:
        total = sum(map(seconds, self._waiting.values()))
        free = self.jobs - self._busy
        most = min(_MOST, total / free if free > 1 else max(total / self.jobs, _START))
        taken: dict[str, Source] = {}
        names: set[str] = set()
        spent = 0.0
        for key, source in sorted(self._waiting.items(), key=lambda pair: -seconds(pair[1])):
            own = {name for name in (source.name, source.entry, source.replay) if name is not None}
            first = next(iter(taken.values()), source)
            alike = (source.target, source.arch) == (first.target, first.arch)
            if not taken or (alike and not names & own and spent + seconds(source) <= most * _ROUNDED):
                taken[key], spent = source, spent + seconds(source)
                names |= own
        for key in taken:
            del self._waiting[key]
        return taken
