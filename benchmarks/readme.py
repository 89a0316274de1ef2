"""Puts what was measured into README.md, and a plot of it beside docs/kernels.md: ``python -m benchmarks.readme``.

Networks come from ``benchmarks/results/h200_public*.json`` and ``h200_steps.json``, what ``benchmarks/gpu_networks.py --json`` writes. All else comes
from ``h200.json`` beside them, what ``benchmarks/run.py --json`` writes, and, for a line each, from those of ``--group chains``, ``--group single``,
``--group networks`` and ``--drawn``, or some of these. Lines name the device, where it is another one. A ``note`` in a file says what its numbers do not show.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import figures
from benchmarks.gpu_networks import Result
from benchmarks.implementations import RIVALS, Implementation
from benchmarks.public import INFERENCE

ROOT = Path(__file__).parents[1]
RUN = ROOT / "benchmarks" / "results" / "h200.json"
NETWORKS = sorted(RUN.parent.glob("h200_public*.json"))
STEPS = RUN.with_name("h200_steps.json")
GROUPS = {
    RUN.with_name("h200_chains.json"): "chains and blocks (`--group chains`)",
    RUN.with_name("h200_single.json"): "single operators and losses (`--group single`)",
    RUN.with_name("h200_networks.json"): "small networks and blocks (`--group networks`)",
    RUN.with_name("h200_drawn.json"): "drawn at random (`--drawn`)",
}
PLOT = ROOT / "docs" / "limits.svg"
BEGIN, END = "<!-- measured:begin -->\n", "<!-- measured:end -->\n"

_WAYS = tuple(way.value for way in Implementation)
_NAMES = {"eager": "eager", "compile": "torch.compile", "autotune": "max-autotune", "fusepass": "fusepass"}


def block() -> str:
    """The text between the markers in README.md."""
    run = _read(RUN)
    rows: list[dict[str, Any]] = run["rows"]
    mission = [row for row in rows if row["group"] == "mission"]
    others = [row for row in rows if row["group"] != "mission"]
    groups = {path: _read(path) for path in GROUPS if path.exists()}
    lines = [
        *_networks([*map(_read, NETWORKS)]),
        "",
        _steps(_read(STEPS)),
        "",
        "Modules as built (training mode), default flags:",
        "",
        "workloads | | x eager | x torch.compile | commit",
        "---|---|---|---|---",
        _means_row("models of fused operators (`--group mission`)", mission, run),
        _means_row("others of `benchmarks/workloads.py`", others, run),
        _means_row("convolutions among these", [row for row in others if "conv" in row["workload"]], run),
        *(_means_row(what, groups[path]["rows"], groups[path]) for path, what in GROUPS.items() if path in groups),
        "",
        *(["In the first lines' file torch.compile has max-autotune, too."] * ("autotune" in _timed(rows))),
        *_slower([run, *groups.values()]),
        *_wrong(rows),
        "Notes in `benchmarks/results` say what these numbers do not show.",
        "",
        "Shares of the hardware limit:",
        "",
        "![shares of the limit](docs/limits.svg)",
    ]
    return "\n".join(lines) + "\n"


def shares() -> dict[str, dict[str, float]]:
    """The limit over the time, for each workload and implementation."""
    rows = [row for row in _read(RUN)["rows"] if row["limit_ms"]]
    return {
        row["workload"]: {_NAMES[way]: row["limit_ms"] / time for way in _timed(rows) if (time := _ms(row, way))}
        for row in rows
    }


def main() -> None:
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(before + BEGIN + block() + END + rest.partition(END)[2])
    figures.draw_shares(shares(), PLOT)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _ms(row: dict[str, Any], way: str) -> float | None:
    timing = (row["outcomes"].get(way) or {}).get("timing")
    return float(timing["median"]) if timing else None


def _timed(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The ways of running a model that were timed, in their order."""
    found = {way for row in rows for way in _WAYS if _ms(row, way)}
    return [way for way in _WAYS if way in found]


def _ratio(row: dict[str, Any], rival: str) -> float | None:
    """How many times faster than the fastest mode of `rival` fusepass is."""
    theirs, ours = [time for way in RIVALS[rival] if (time := _ms(row, way))], _ms(row, "fusepass")
    return min(theirs) / ours if theirs and ours else None


def _mean(rows: Iterable[dict[str, Any]], rival: str) -> str:
    ratios = [ratio for row in rows if (ratio := _ratio(row, rival))]
    return f"{geometric_mean(ratios):.2f}" if ratios else "-"


def _networks(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The table of public networks."""
    inputs = {each.name: each for each in INFERENCE}
    table, ratios = [], []
    for run in runs:
        for row in run["rows"]:
            if (best := Result(**row).over) is None:
                continue
            taken, network = row["milliseconds"], inputs[row["name"]]
            eager, own = taken["eager"], taken["fusepass"]
            ratios.append(best)
            shape = "x".join(map(str, network.shape))
            times = " | ".join(f"{time:.2f}" for time in (eager, best * own, own, best))
            table.append(f"{network.name} {shape} | {times}")
    first, commits = runs[0], " and ".join(run["commit"] for run in runs)
    default = [
        run["rows"][0]["name"]
        for run in runs
        if not any("reduce-overhead" in row["milliseconds"] for row in run["rows"])
    ]
    modes = "".join(["the faster of default and reduce-overhead", *(f"; from {name} on, default" for name in default)])
    return [
        f"On one {first['device']} (torch {first['torch']}), side by side, commits {commits}: medians in milliseconds, L2 flushed, `no_grad`.",
        f"Networks of torchvision, timm and transformers in 16 bits. torch.compile is {modes}.",
        "",
        "network | eager | torch.compile | fusepass | x torch.compile",
        "---|---|---|---|---",
        *table,
        f"geometric mean | | | | {geometric_mean(ratios):.2f}",
    ]


def _steps(run: dict[str, Any]) -> str:
    """A line on steps of training."""
    ratios = [ratio for row in run["rows"] if (ratio := Result(**row).over)]
    mean, least = f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}"
    return f"Training steps of {len(ratios)} such networks: {mean} x torch.compile's default, least {least} ([table](docs/training.md))."


def _means_row(what: str, rows: Sequence[dict[str, Any]], run: dict[str, Any]) -> str:
    """Geometric means over the rows whose result is right, and how many these are."""
    right = [row for row in rows if _is_right(row)]
    means = " | ".join(_mean(right, rival) for rival in RIVALS)
    left_out = f" of {len(run['rows']) + len(run['left_out'])}" if run["left_out"] and rows is run["rows"] else ""
    return f"{what}{_where(run)} | {len(right)}{left_out} | {means} | {run['commit']}"


def _where(run: dict[str, Any]) -> str:
    """The device, unless it is that of the table, and how many share the run."""
    devices, table = run.get("devices", 1), _read(RUN)
    on = "on one" if devices == 1 else f"shared by {devices}"
    if run["device"] != table["device"]:
        return f", {on} {run['device']}"
    return "" if devices == table.get("devices", 1) else f", {on}"


def _slower(runs: Iterable[dict[str, Any]]) -> list[str]:
    """The workloads on which another implementation is faster by more than 2 %."""
    behind = [
        f"{row['workload']} ({ratio:.2f} x {rival})"
        for run in runs
        for row in run["rows"]
        for rival in RIVALS
        if (ratio := _ratio(row, rival)) is not None and ratio < 0.98
    ]
    return [f"Slower by more than 2 %: {', '.join(behind) or 'none'}."]


def _wrong(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The workloads that do not count, because their result is not right."""
    wrong = [row["workload"] for row in rows if not _is_right(row)]
    return [f"Outside the numeric policy, and not counted: {', '.join(wrong)}."] if wrong else []


def _is_right(row: dict[str, Any]) -> bool:
    return (row["outcomes"].get("fusepass") or {}).get("correct") is True


if __name__ == "__main__":
    main()
