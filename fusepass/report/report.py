"""What was fused, what was not and why, as frozen values that go to text and to JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fusepass.report.choice import Choice
from fusepass.report.graph import to_networkx
from fusepass.report.records import (
    CaptureRoute,
    GraphNode,
    KernelRecord,
    ModelRecord,
    OpRecord,
    RefusalReport,
    RegionRecord,
    RegionState,
    RewriteReport,
    SourceFile,
    TensorRecord,
)
from fusepass.report.table import terminal_width
from fusepass.report.text import region_text, report_text
from fusepass.runtime.fallbacks import FallbackCounter, FallbackReport

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "CaptureRoute",
    "FallbackCounter",
    "FallbackReport",
    "GraphNode",
    "KernelRecord",
    "OpRecord",
    "RefusalReport",
    "RegionReport",
    "RegionState",
    "Report",
    "RewriteReport",
    "SourceFile",
    "TensorRecord",
]

FORMAT = 2
"""Version of the JSON form; raised when a key is renamed, removed or changes its meaning."""

_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class RegionReport(RegionRecord):
    """One region of operators that runs as one fused call; `RegionRecord` says what is known of it."""

    def __str__(self) -> str:
        return region_text(self, terminal_width())


@dataclass(frozen=True)
class Report(ModelRecord):
    """What became of one model; `ModelRecord` says what is known of it.

    ``str()`` fits the terminal; `to_json` and `from_json` keep everything.
    """

    regions: tuple[RegionReport, ...] = ()
    backward: Report | None = None

    def __str__(self) -> str:
        return report_text(self, terminal_width())

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from fusepass.report.markup import report_html  # jinja2, which a first call may do without

        return report_html(self)

    def to_networkx(self, *, fused: bool = True) -> nx.MultiDiGraph[str]:
        """What runs, as a networkx graph: regions and operators, and tensors with their bytes between them.

        Args:
            fused: False for the graph before, in which each operator is a node. `fusepass.report.graph.to_networkx` lists the attributes.
        """
        return to_networkx(self.graphs, fused=fused)

    def to_json(self) -> str:
        """Everything as JSON; the keys are described in docs/report.md and are stable within one `FORMAT`."""
        return json.dumps({"format": FORMAT, **_encoded(self)}, indent=2, default=str)

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
            return _report(data)
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
        backward = [r.backward for r in reports if r.backward is not None]
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
            background=tuple(dict.fromkeys(text for r in reports for text in r.background)),
            graphs=tuple(graph for r in reports for graph in r.graphs),
            backward=cls.merge(backward) if backward else None,
        )


def _joined(parts: Iterable[str], separator: str) -> str:
    return separator.join(dict.fromkeys(parts))


def _sums(entries: Iterable[tuple[_Key, _Number]]) -> tuple[tuple[_Key, _Number], ...]:
    """Values added up by key, in the order of the keys' first occurrence."""
    sums: dict[_Key, _Number] = {}
    for key, value in entries:
        sums[key] = sums[key] + value if key in sums else value
    return tuple(sums.items())


def _encoded(report: Report) -> dict[str, Any]:
    """The fields of a report in the form that JSON has them in."""
    backward = None if report.backward is None else _encoded(report.backward)
    return {**asdict(replace(report, backward=None)), "seconds": dict(report.seconds), "backward": backward}


def _report(data: dict[str, Any]) -> Report:
    return Report(**data | _decoded(data))


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
        "background": tuple(data.get("background", ())),
        "graphs": tuple(tuple(map(_node, graph)) for graph in data.get("graphs", ())),
        "backward": _report(data["backward"]) if data.get("backward") else None,
    }


def _region(data: dict[str, Any]) -> RegionReport:
    decoded = {
        "ops": tuple(OpRecord(**entry) for entry in data["ops"]),
        "kernels": tuple(KernelRecord(**entry) for entry in data["kernels"]),
        "state": RegionState(data["state"]),
        "sources": tuple(_source(entry) for entry in data["sources"]),
        "choice": Choice.from_json(data["choice"]) if data.get("choice") else None,
        "written": tuple(data.get("written", ())),
        "ruled_out": tuple((name, times) for name, times in data.get("ruled_out", ())),
        "beyond_budget": tuple(data.get("beyond_budget", ())),
    }
    return RegionReport(**data | decoded)


def _node(data: dict[str, Any]) -> GraphNode:
    return GraphNode(**data | {"reads": tuple(TensorRecord(**entry) for entry in data["reads"])})


def _source(data: dict[str, Any]) -> SourceFile:
    path = data["path"]
    return SourceFile(data["name"], None if path is None else Path(path), data["text"])
