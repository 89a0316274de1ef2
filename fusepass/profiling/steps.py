"""The steps of a profile as frozen values, and as rows of a table."""

from __future__ import annotations

from dataclasses import dataclass

from fusepass.report.records import SourceFile
from fusepass.report.table import Column, human_bytes

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
            return per_second(self.flop_rate, "FLOP/s")
        return per_second(self.bandwidth, "B/s")


def per_second(value: float, unit: str) -> str:
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
