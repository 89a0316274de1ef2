"""Rows as a table for people and as JSON for comparisons between commits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean, median

from benchmarks.case import Outcome, Row
from benchmarks.implementations import RIVALS, Implementation
from fusepass.report.table import Column, table

EAGER, COMPILE, AUTOTUNE, FUSEPASS = (way.value for way in Implementation)
_WIDTH = 132

Ratio = Callable[[Row], float | None]


def over(*ways: str) -> Ratio:
    """How many times faster than the fastest of `ways` fusepass is, on one row; None where nothing was measured."""

    def ratio(row: Row) -> float | None:
        theirs = [time for way in ways if (time := _ms(row, way))]
        ours = _ms(row, FUSEPASS)
        return min(theirs) / ours if theirs and ours else None

    return ratio


def of_limit(way: str) -> Ratio:
    """The hardware's limit over the time of `way`: 1 cannot be beaten."""

    def ratio(row: Row) -> float | None:
        time = _ms(row, way)
        return row.limit_ms / time if row.limit_ms and time else None

    return ratio


def mean(rows: Iterable[Row], ratio: Ratio) -> float | None:
    """Geometric mean over the rows that have the ratio."""
    values = [value for row in rows if (value := ratio(row))]
    return geometric_mean(values) if values else None


def failed(row: Row) -> bool:
    """Whether fusepass gave a wrong result or anything raised."""
    wrong = row.outcomes.get(FUSEPASS, Outcome()).correct is False
    return wrong or bool(row.error) or any(outcome.error for outcome in row.outcomes.values())


def text(rows: Sequence[Row], left_out: Sequence[str]) -> str:
    """Problems first, then the table, then geometric means: the end is what a reader sees."""
    lines = [*_problems(rows), ""]
    ways = [way.value for way in Implementation if any(way.value in row.outcomes for row in rows)]
    titles = (*ways, "x eager", "x compile", "of limit", "kernels", "host us", "check")
    columns = (Column("workload", least=24), *(Column(title, right=True) for title in titles))
    lines += [line for block in table(columns, [_cells(row, ways) for row in rows], _WIDTH) for line in block]
    lines += ["", *_means(rows), *_first_calls(rows)]
    if left_out:
        lines.append(f"left out for lack of time ({len(left_out)}): {', '.join(left_out)}")
    return "\n".join(lines)


def write_json(path: Path, machine: dict[str, object], rows: Sequence[Row], left_out: Sequence[str]) -> None:
    """Everything measured; `machine` says on what and when."""
    data = {"format": 1, **machine, "rows": [asdict(row) for row in rows], "left_out": list(left_out)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def _ms(row: Row, way: str) -> float | None:
    outcome = row.outcomes.get(way)
    return outcome.timing.median if outcome and outcome.timing else None


def _cells(row: Row, ways: Sequence[str]) -> tuple[str, ...]:
    outcomes = [row.outcomes.get(way, Outcome()) for way in ways]
    return (
        row.workload,
        *(f"{o.timing.median:.3f}" if o.timing else "-" for o in outcomes),
        *(_number(ratio(row), ".2f") for ratio in (over(*ways) for ways in RIVALS.values())),
        _number(of_limit(FUSEPASS)(row), ".0%"),
        "/".join(_number(o.kernels, "d") for o in outcomes),
        "/".join(_number(o.host_us, ".0f") for o in outcomes),
        _verdict(row),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _verdict(row: Row) -> str:
    correct = row.outcomes.get(FUSEPASS, Outcome()).correct
    if failed(row):
        return "WRONG" if correct is False else "ERROR"
    return "ok" if correct else "-"


def _problems(rows: Iterable[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row.error:
            lines.append(f"{row.workload}: {row.error}")
        for way, outcome in row.outcomes.items():
            if outcome.error:
                lines.append(f"{row.workload}: {way}: {outcome.error}")
            elif outcome.correct is False:
                lines.append(f"{row.workload}: {way} is outside the numeric policy: {outcome.check}")
        if row.fallbacks:
            lines.append(f"{row.workload}: fusepass fell back {row.fallbacks} times")
    return lines


def _means(rows: Sequence[Row]) -> list[str]:
    groups = list(dict.fromkeys(row.group for row in rows))
    sets = {group: [row for row in rows if row.group == group] for group in groups}
    if len(groups) > 1:
        sets["all"] = list(rows)
    lines = []
    for name, chosen in sets.items():
        speeds = [_number(mean(chosen, over(*ways)), ".2f") for ways in RIVALS.values()]
        shares = [f"{way} {_number(mean(chosen, of_limit(way)), '.0%')}" for way in (EAGER, COMPILE, FUSEPASS)]
        lines.append(
            f"geometric mean, {name} ({len(chosen)}): fusepass is {speeds[0]} x eager, {speeds[1]} x compile; "
            f"of the limit: {', '.join(shares)}"
        )
    return lines


def _first_calls(rows: Sequence[Row]) -> list[str]:
    lines = []
    for way in (COMPILE, AUTOTUNE, FUSEPASS):
        seconds = [o.first_call for row in rows if (o := row.outcomes.get(way)) and o.first_call]
        if seconds:
            cold, warm = median(s.cold for s in seconds), median(s.warm for s in seconds)
            lines.append(f"first call, {way}: {cold:.2f} s cold, {warm:.2f} s warm (median of {len(seconds)})")
    return lines
