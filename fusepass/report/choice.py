"""What runs a region, generated code or its own operators, and how that was decided."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from fusepass.codegen.search.candidate import GENERATED

EAGER = "eager"
"""The candidate that is the region's own operators."""


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen for a region.

    Attributes:
        chosen: its name, `EAGER`, `GENERATED` or that of another candidate.
        seconds: seconds of one run of each candidate, the lower quartile of its rounds, by name; empty where nothing was measured.
        speedup: speed of the best generated candidate as a multiple of eager's, the median of the rounds' ratios; 0 where nothing was
            measured.
        recorded: whether it was found out earlier and read from the disk.
        reason: why times did not decide; None where they did.
        interval: bounds within which `speedup` lies by all rounds; zeros where nothing was measured.
        check: what came of comparing results with the operators', in words; None where they were not compared.
        dropped: candidates that may not be used, by name, and why: above all those with other results.
        disturbed: whether other work on the machine kept interrupting the trial; such a choice is not kept on disk.
        overruled: why something else runs than what its trial chose; None where that runs.
    """

    chosen: str = GENERATED
    seconds: tuple[tuple[str, float], ...] = ()
    speedup: float = 0.0
    recorded: bool = False
    reason: str | None = None
    interval: tuple[float, float] = (0.0, 0.0)
    check: str | None = None
    dropped: tuple[tuple[str, str], ...] = ()
    disturbed: bool = False
    overruled: str | None = None

    @property
    def leaves_eager(self) -> bool:
        """Whether the region runs as its own operators."""
        return self.chosen == EAGER

    @property
    def seconds_saved(self) -> float:
        """Seconds that the candidate saves each run, beside the region's own operators; infinite where nothing was measured."""
        seconds = dict(self.seconds)
        return seconds[EAGER] - seconds[self.chosen] if {EAGER, self.chosen} <= seconds.keys() else inf

    @property
    def nothing_is_right(self) -> bool:
        """Whether it runs as its own operators because no candidate gives their results."""
        return self.leaves_eager and bool(self.dropped) and not self.seconds

    def __str__(self) -> str:
        left = "left to eager" if self.leaves_eager else "not left to eager"
        parts = [
            *([f"{left}: {self.overruled}"] if self.overruled else []),
            self._decision(),
            *([self.check] if self.check else []),
        ]
        parts += [f'"{name}" is not used: {reason}' for name, reason in self.dropped]
        return "; ".join(parts)

    def _decision(self) -> str:
        times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.seconds)
        if not times:
            return f'chosen "{self.chosen}": not measured, {self.reason}'
        how = "measured earlier" if self.recorded else "measured"
        left = "left to eager: " if self.leaves_eager and not self.overruled else ""
        doubt = f"undecided, {self.reason}; " if self.reason else ""
        bounds = " ({:.2f} to {:.2f})".format(*self.interval) if self.interval[1] else ""
        speed = f"generated code runs at {self.speedup:.2f}x eager in the median round{bounds}"
        busy = " while other work interrupted it, so for this process only" if self.disturbed else ""
        return f'{left}chosen "{self.chosen}": {doubt}{speed}, {how}{busy} (lower quartiles: {times})'

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Choice:
        """The choice that `dataclasses.asdict` and JSON made `data` of.

        Raises:
            KeyError, TypeError, ValueError: `data` is no choice.
        """
        seconds = tuple((str(name), float(value)) for name, value in data["seconds"])
        low, high = data.get("interval", (0.0, 0.0))
        dropped = tuple((str(name), str(reason)) for name, reason in data.get("dropped", ()))
        return cls(**data | {"seconds": seconds, "interval": (float(low), float(high)), "dropped": dropped})
