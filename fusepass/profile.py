"""Where the time of one call goes: steps, their times, rates and limits, as frozen values, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusepass.report import SourceFile
from fusepass.table import Column, human_bytes, table, terminal_width, wrap

FORMAT = 1
"""Version of the JSON form; raised when a key is renamed, removed or changes its meaning."""

COLUMNS = (
    Column("step", least=16),
    Column("kind"),
    Column("ms", right=True),
    Column("before", right=True),
    Column("saved", right=True),
    Column("rate", right=True),
    Column("of limit", right=True),
)


@dataclass(frozen=True)
class OpTime:
    """One operator as eager would run it.

    Attributes:
        name: its node in the captured graph.
        target: the ATen operator, such as ``"aten.gelu.default"``.
        location: where the model has it; empty where that is not known.
        seconds: time by itself.
        inputs: names of the operators whose results it reads, views looked through.
    """

    name: str
    target: str
    location: str
    seconds: float
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """A region, or an operator outside of all regions.

    Attributes:
        name: the region's or the operator's.
        kind: ``"fused"``, ``"eager"`` or ``"fallback"`` for a region, ``"operator"`` for others.
        ops: the operators that it consists of.
        seconds: time of one run, as the optimised model runs it.
        bytes_moved: bytes that it reads and writes at least.
        bytes_saved: bytes that fusing saves.
        flops: floating-point operations of its convolutions and matrix products.
        limit_seconds: the time that the device's copy rate and its rate of matrix products allow at best.
        bound_by_products: whether the rate of matrix products is the limit, not the copy rate.
        inputs: names of the steps whose results it reads.
        sources: the generated sources.
        choice: for a region, which candidate runs it, and why, in words; empty where nothing was to be chosen.
    """

    name: str
    kind: str
    ops: tuple[OpTime, ...]
    seconds: float
    bytes_moved: int
    bytes_saved: int
    flops: int
    limit_seconds: float
    bound_by_products: bool
    inputs: tuple[str, ...]
    sources: tuple[SourceFile, ...] = ()
    choice: str = ""

    @property
    def seconds_before(self) -> float:
        """Time of its operators, each run by itself."""
        return sum(op.seconds for op in self.ops)

    @property
    def bandwidth(self) -> float:
        """Achieved bytes per second."""
        return self.bytes_moved / self.seconds

    @property
    def flop_rate(self) -> float:
        """Achieved floating-point operations per second, those of convolutions and matrix products alone."""
        return self.flops / self.seconds

    @property
    def fraction(self) -> float:
        """Limit over time: 1 is as fast as the device allows. Above 1 the data came from a cache."""
        return self.limit_seconds / self.seconds

    @property
    def rate(self) -> str:
        """The rate that limits it, in words."""
        if self.bound_by_products:
            return _rate(self.flop_rate, "FLOP/s")
        return _rate(self.bandwidth, "B/s")


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
        from fusepass.profile_page import page

        return page(self)

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
    limits = f"limits: copy rate {_rate(profile.bandwidth, 'B/s')} ({profile.bandwidth_source})"
    if profile.flop_limit:
        limits += f", matrix products {_rate(profile.flop_limit, 'FLOP/s')} (measured)"
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


def _rate(value: float, unit: str) -> str:
    """`value` with a decimal prefix and three digits: ``"4.27 TB/s"``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value / 1e3:.3g} k{unit}"


def cells(step: Step) -> tuple[str, ...]:
    """A row of the table; `COLUMNS` are its headings."""
    return (
        step.name,
        step.kind,
        f"{1e3 * step.seconds:.3g}",
        f"{1e3 * step.seconds_before:.3g}",
        human_bytes(step.bytes_saved) if step.bytes_saved else "",
        step.rate if step.bytes_moved else "",
        f"{step.fraction:.0%}" if step.bytes_moved else "",
    )
