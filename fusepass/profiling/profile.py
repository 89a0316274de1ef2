"""Where the time of one call goes: steps, their times, rates and limits, as frozen values, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusepass.profiling.page import page
from fusepass.profiling.steps import COLUMNS, OpTime, Step, cells, per_second
from fusepass.report.markup import framed
from fusepass.report.table import table, terminal_width, wrap

__all__ = ["FORMAT", "OpTime", "Profile", "Step", "summary"]

FORMAT = 1
"""Version of the JSON form; raised when a key is renamed, removed or changes its meaning."""


@dataclass(frozen=True)
class Profile:
    """One call of a model, step by step. ``str()`` fits the terminal.

    Attributes:
        model: the model's class.
        device: such as ``"cuda:0"``.
        bandwidth: the device's copy rate in bytes per second, reads and writes both counted.
        bandwidth_source: how that is known, in words.
        flop_limit: rate of a large matrix product, measured, in operations per second; 0 where no step has any.
        steps: in the order in which they run.
    """

    model: str
    device: str
    bandwidth: float
    bandwidth_source: str
    flop_limit: float
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Sum of the steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def seconds_before(self) -> float:
        """Sum of the operators, each run by itself."""
        return sum(step.seconds_before for step in self.steps)

    def __str__(self) -> str:
        return "\n".join(_lines(self, terminal_width()))

    def to_json(self) -> str:
        """Everything as JSON; docs/profile.md describes the keys, which are stable within one `FORMAT`."""
        data = {"format": FORMAT, **asdict(self), "seconds": self.seconds, "seconds_before": self.seconds_before}
        for entry, step in zip(data["steps"], self.steps, strict=True):
            entry |= _derived(step)
        return json.dumps(data, indent=2, default=str)

    def to_html(self) -> str:
        """One page that needs nothing else: the graph before and after, regions as boxes, times and sources."""
        return page(f"{self.model} on {self.device}", summary(self), self.steps)

    def _repr_html_(self) -> str:
        """What notebooks show: the page, in a frame."""
        return framed(self.to_html(), 640)

    def save_html(self, path: str | Path) -> Path:
        """Write `to_html` to `path`, and give it back."""
        target = Path(path)
        target.write_text(self.to_html(), encoding="utf-8")
        return target


def _derived(step: Step) -> Mapping[str, Any]:
    return {
        "seconds_before": step.seconds_before,
        "bandwidth": step.bandwidth,
        "flop_rate": step.flop_rate,
        "fraction": step.fraction,
    }


def summary(profile: Profile) -> list[str]:
    """Sentences on the whole: limits, then times."""
    limits = f"limits: copy rate {per_second(profile.bandwidth, 'B/s')} ({profile.bandwidth_source})"
    if profile.flop_limit:
        limits += f", matrix products {per_second(profile.flop_limit, 'FLOP/s')} (measured)"
    ratio = profile.seconds_before / profile.seconds if profile.seconds else 1.0
    return [
        limits,
        f"in all: {1e3 * profile.seconds:.4g} ms; operators one by one {1e3 * profile.seconds_before:.4g} ms, {ratio:.2f}x",
    ]


def _lines(profile: Profile, width: int) -> list[str]:
    limits, total = summary(profile)
    rows = [line for block in table(COLUMNS, list(map(cells, profile.steps)), width) for line in block]
    head = wrap(f"{profile.model} on {profile.device}", width) + wrap(limits, width)
    chosen = [line for step in profile.steps if step.choice for line in wrap(f"{step.name}: {step.choice}", width)]
    return [*head, "", *rows, "", *wrap(total, width), *([""] if chosen else []), *chosen]
