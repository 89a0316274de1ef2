"""What was fused, what was not and why, as frozen values that go to text and to JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fusepass.choice import Choice
from fusepass.fallbacks import FallbackCounter, FallbackReport
from fusepass.records import (
    CaptureRoute,
    KernelRecord,
    OpRecord,
    RefusalReport,
    RegionState,
    RewriteReport,
    SourceFile,
)
from fusepass.report_text import region_text, report_text
from fusepass.table import terminal_width

__all__ = [
    "CaptureRoute",
    "FallbackCounter",
    "FallbackReport",
    "KernelRecord",
    "OpRecord",
    "RefusalReport",
    "RegionReport",
    "RegionState",
    "Report",
    "RewriteReport",
    "SourceFile",
]

FORMAT = 2
"""Version of the JSON form; raised when a key is renamed, removed or changes its meaning."""

_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class RegionReport:
    """One region of operators that runs as one fused call.

    Attributes:
        name: the region's name, which the rewritten graph and the sources use too.
        pattern: the pattern that grew it.
        ops: the operators it replaced, in graph order.
        kernels: the generated kernels, in launch order.
        bytes_before: bytes that the operators move, each run by itself.
        bytes_after: bytes that the anchor and the kernels move, each reading a buffer once and writing it once.
        anchor: which implementation its convolution or matrix product uses, ``"library: aten.convolution"``;
            None for a region without an anchor.
        device: such as ``"cuda:0"``.
        signature: types and shapes in words, ``"float32[2, 64, 8, 8] -> float32[2, 64]"``.
        state: whether it runs as generated kernels.
        reason: why it does not although it was meant to; None otherwise.
        choice: how it was decided that generated code, or its own operators, run it; None where nothing was decided.
        sources: the generated sources.
        build_seconds: seconds spent in compiler or cache.
        sizes: whether its library serves other sizes, too, and the numbers that it is called with for these, or why it
            does not; None for the first sizes, which have one of their own.
        like: the name of the earlier region that differs in nothing but names, as that of an equal layer does, whose kernels,
            library and choice it has; None where there is none.
        written: the inputs that its kernels write over, such as running statistics.
    """

    name: str
    pattern: str
    ops: tuple[OpRecord, ...]
    kernels: tuple[KernelRecord, ...]
    bytes_before: int
    bytes_after: int
    anchor: str | None
    device: str
    signature: str
    state: RegionState = RegionState.FUSED
    reason: str | None = None
    sources: tuple[SourceFile, ...] = ()
    build_seconds: float = 0.0
    choice: Choice | None = None
    sizes: str | None = None
    like: str | None = None
    written: tuple[str, ...] = ()

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic that fusing saves per call at most; 0 for a region of original operators."""
        return self.bytes_before - self.bytes_after if self.state is RegionState.FUSED else 0

    def __str__(self) -> str:
        return region_text(self, terminal_width())


@dataclass(frozen=True)
class Report:
    """What became of one model. ``str()`` fits the terminal; `to_json` and `from_json` keep everything.

    Attributes:
        model: the model's class name.
        device: such as ``"cuda:0"``.
        capture: how the model was captured.
        regions: the fused regions.
        refusals: the operators that may not fuse.
        fallbacks: what ran as the original operators so far.
        reason: why a less complete capture was needed; None where it was not.
        rewrites: what algebraic rules did, in the order in which they did it.
        ops_total: operators in the captured graphs.
        ops_fused: how many of them run inside regions.
        seconds: seconds for each stage, by its name, in the order in which they ran.
        cuda_graphs: what became of ``Config.cuda_graphs``, in words, for each specialisation; empty where it is off.
    """

    model: str
    device: str
    capture: CaptureRoute
    regions: tuple[RegionReport, ...] = ()
    refusals: tuple[RefusalReport, ...] = ()
    fallbacks: tuple[FallbackReport, ...] = ()
    reason: str | None = None
    rewrites: tuple[RewriteReport, ...] = ()
    ops_total: int = 0
    ops_fused: int = 0
    seconds: tuple[tuple[str, float], ...] = ()
    cuda_graphs: tuple[str, ...] = ()

    @property
    def fused_share(self) -> float:
        """Fraction of the operators that run inside regions, 0 to 1; 0 for a model without operators."""
        return self.ops_fused / self.ops_total if self.ops_total else 0.0

    @property
    def bytes_before(self) -> int:
        """Bytes that the operators of all regions move when each runs by itself."""
        return sum(region.bytes_before for region in self.regions)

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic saved per call at most, over the regions that run as generated kernels."""
        return sum(region.bytes_saved for region in self.regions)

    def __str__(self) -> str:
        return report_text(self, terminal_width())

    def to_json(self) -> str:
        """Everything as JSON; the keys are described in docs/report.md and are stable within one `FORMAT`."""
        data = {"format": FORMAT, **asdict(self), "seconds": dict(self.seconds)}
        return json.dumps(data, indent=2, default=str)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote.

        Raises:
            ValueError: `text` is not JSON, not a report, or of another format.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"not a fusepass report of format {FORMAT}")
        try:
            return cls(**data | _decoded(data))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a fusepass report: {error}") from error

    @classmethod
    def merge(cls, reports: Sequence[Report]) -> Report:
        """One report of several graphs of one model: its signatures, its children, the pieces Dynamo found.

        Regions and rewrites are kept one after another, equal refusals once; counts and seconds add up; the
        capture is the least complete of all.

        Raises:
            ValueError: `reports` is empty.
        """
        if not reports:
            raise ValueError("nothing to merge: give at least one report")
        fallbacks = _sums(((f.where, f.reason), f.count) for r in reports for f in r.fallbacks)
        routes = list(CaptureRoute)
        return replace(
            reports[0],
            model=_joined((r.model for r in reports), ", "),
            device=_joined((r.device for r in reports), ", "),
            capture=max((r.capture for r in reports), key=routes.index),
            regions=tuple(region for r in reports for region in r.regions),
            refusals=tuple(dict.fromkeys(refusal for r in reports for refusal in r.refusals)),
            fallbacks=tuple(FallbackReport(*key, count) for key, count in fallbacks),
            reason=_joined((r.reason for r in reports if r.reason), "; ") or None,
            rewrites=tuple(rewrite for r in reports for rewrite in r.rewrites),
            ops_total=sum(r.ops_total for r in reports),
            ops_fused=sum(r.ops_fused for r in reports),
            seconds=_sums(entry for r in reports for entry in r.seconds),
            cuda_graphs=tuple(dict.fromkeys(text for r in reports for text in r.cuda_graphs)),
        )


def _joined(parts: Iterable[str], separator: str) -> str:
    return separator.join(dict.fromkeys(parts))


def _sums(entries: Iterable[tuple[_Key, _Number]]) -> tuple[tuple[_Key, _Number], ...]:
    """Values added up by key, in the order of the keys' first occurrence."""
    sums: dict[_Key, _Number] = {}
    for key, value in entries:
        sums[key] = sums[key] + value if key in sums else value
    return tuple(sums.items())


def _decoded(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a report that JSON holds in another form."""
    return {
        "capture": CaptureRoute(data["capture"]),
        "regions": tuple(_region(entry) for entry in data["regions"]),
        "refusals": tuple(RefusalReport(**entry) for entry in data["refusals"]),
        "fallbacks": tuple(FallbackReport(**entry) for entry in data["fallbacks"]),
        "rewrites": tuple(RewriteReport(**entry) for entry in data["rewrites"]),
        "seconds": tuple(data["seconds"].items()),
        "cuda_graphs": tuple(data.get("cuda_graphs", ())),
    }


def _region(data: dict[str, Any]) -> RegionReport:
    decoded = {
        "ops": tuple(OpRecord(**entry) for entry in data["ops"]),
        "kernels": tuple(KernelRecord(**entry) for entry in data["kernels"]),
        "state": RegionState(data["state"]),
        "sources": tuple(_source(entry) for entry in data["sources"]),
        "choice": Choice.from_json(data["choice"]) if data.get("choice") else None,
        "written": tuple(data.get("written", ())),
    }
    return RegionReport(**data | decoded)


def _source(data: dict[str, Any]) -> SourceFile:
    path = data["path"]
    return SourceFile(data["name"], None if path is None else Path(path), data["text"])
