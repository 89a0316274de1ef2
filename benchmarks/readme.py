"""Puts what was measured into README.md, and a plot of it beside docs/kernels.md: ``python -m benchmarks.readme``.

Everything comes from the JSON of one run, ``benchmarks/results/h200.json``, and of one run of first calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RUN, FIRST_CALL = RESULTS / "h200.json", RESULTS / "h200_first_call.json"
PLOT = ROOT / "docs" / "limits.svg"
BEGIN, END = "<!-- measured:begin -->\n", "<!-- measured:end -->\n"

_WAYS = ("eager", "compile", "fusepass")
_COLORS = {"eager": "#b8b8b8", "compile": "#7aa6d8", "fusepass": "#d9702e"}
_BAR, _GAP, _LEFT, _WIDTH = 7, 10, 330, 520


def block() -> str:
    """The text between the markers in README.md."""
    run, first = _read(RUN), _read(FIRST_CALL)
    rows: list[dict[str, Any]] = run["rows"]
    mission = [row for row in rows if row["group"] == "mission"]
    others = [row for row in rows if row["group"] != "mission"]
    lines = [
        f"On one {run['device']} (torch {run['torch']}), in one run: medians of side-by-side calls with the L2 cache flushed "
        "and fresh random inputs,",
        f"commit {run['commit']}; every result of fusepass was checked against float64. Modules as built (training mode), "
        "under `no_grad`, default flags. Milliseconds:",
        "",
        "| model | eager | torch.compile | fusepass | x eager | x torch.compile |",
        "|---|---|---|---|---|---|",
        *map(_table_row, mission),
        f"| geometric mean | | | | {_mean(mission, 'eager')} | {_mean(mission, 'compile')} |",
        "",
        *_said_of("other workloads of `benchmarks/workloads.py`", others),
        *_said_of("of them that are convolutions", [row for row in others if "conv" in row["workload"]]),
        *_slower(rows),
        "",
        *_first_calls(first),
        "",
        "Each bar is the share of the hardware's limit that was reached:",
        "",
        "![shares of the limit](docs/limits.svg)",
    ]
    return "\n".join(lines) + "\n"


def plot() -> str:
    """Bars of the limit over the time, for each workload and implementation, as SVG."""
    rows = [row for row in _read(RUN)["rows"] if row["limit_ms"]]
    height = len(_WAYS) * _BAR + _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 60}" height="{len(rows) * height + 40}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, way in enumerate(_WAYS):
        x = _LEFT + number * 110
        lines.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{_COLORS[way]}"/>')
        lines.append(f'<text x="{x + 14}" y="17">{"torch.compile" if way == "compile" else way}</text>')
    for number, row in enumerate(rows):
        top = 30 + number * height
        lines.append(f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{row["workload"]}</text>')
        for place, way in enumerate(_WAYS):
            time = _ms(row, way)
            if time is None:
                continue
            share = row["limit_ms"] / time
            length, y = min(share, 1.0) * _WIDTH, top + place * _BAR
            lines.append(f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR - 1}" fill="{_COLORS[way]}"/>')
            lines.append(f'<text x="{_LEFT + length + 3:.1f}" y="{y + 6}" font-size="7">{share:.0%}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(before + BEGIN + block() + END + rest.partition(END)[2])
    PLOT.write_text(plot())


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _ms(row: dict[str, Any], way: str) -> float | None:
    timing = (row["outcomes"].get(way) or {}).get("timing")
    return float(timing["median"]) if timing else None


def _ratio(row: dict[str, Any], way: str) -> float | None:
    theirs, ours = _ms(row, way), _ms(row, "fusepass")
    return theirs / ours if theirs and ours else None


def _mean(rows: Iterable[dict[str, Any]], way: str) -> str:
    ratios = [ratio for row in rows if (ratio := _ratio(row, way))]
    return f"{geometric_mean(ratios):.2f}" if ratios else "-"


def _table_row(row: dict[str, Any]) -> str:
    times = " | ".join(f"{time:.3f}" if (time := _ms(row, way)) else "-" for way in _WAYS)
    ratios = " | ".join(f"{ratio:.2f}" if (ratio := _ratio(row, way)) else "-" for way in _WAYS[:2])
    return f"| {row['workload']} | {times} | {ratios} |"


def _said_of(what: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line of means, and over how many workloads each was taken."""
    parts = []
    for way, name in (("eager", "eager"), ("compile", "torch.compile")):
        count = sum(_ratio(row, way) is not None for row in rows)
        parts.append(f"{_mean(rows, way)} x {name} ({count} measured)")
    return [f"Over the {len(rows)} {what} the geometric means are {' and '.join(parts)}."]


def _slower(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The workloads on which another implementation is faster by more than 2 %."""
    behind = []
    for row in rows:
        for way, name in (("eager", "eager"), ("compile", "torch.compile")):
            ratio = _ratio(row, way)
            if ratio is not None and ratio < 0.98:
                behind.append(f"{row['workload']} ({ratio:.2f} x {name})")
    if not behind:
        return ["None is slower than eager or torch.compile by more than 2 %."]
    return [f"Slower by more than 2 %: {', '.join(behind)}."]


def _first_calls(first: dict[str, Any]) -> list[str]:
    """Of the model that is measured so, and host times of a tiny one."""
    lines = []
    for row in first["rows"]:
        ours, eager = row["outcomes"].get("fusepass", {}), row["outcomes"].get("eager", {})
        if ours.get("first_call"):
            seconds = ours["first_call"]
            lines.append(
                f"The first call of {row['workload']} takes {seconds['cold']:.2f} s with an empty cache and "
                f"{seconds['warm']:.2f} s in a second process, beyond importing torch (commit {first['commit']})."
            )
        elif ours.get("host_us") and eager.get("host_us"):
            lines.append(
                f"A call of {row['workload']} costs {ours['host_us']:.0f} us of host time, "
                f"eager's {eager['host_us']:.0f} us."
            )
    return lines


if __name__ == "__main__":
    main()
