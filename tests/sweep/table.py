"""Outcomes of a sweep as JSON lines and as the page docs/models.md."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import platform
import statistics
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from tests.sweep import packages as known
from tests.sweep import steps, training
from tests.sweep.trial import Outcome

_MOST_REASONS = 20


def append(path: Path, outcome: Outcome) -> None:
    """Add one outcome to the JSON lines in `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")


def read(path: Path) -> list[Outcome]:
    """The outcomes in `path`, of each model, mode and device the last, by package and name."""
    latest: dict[tuple[str, ...], Outcome] = {}
    for line in path.read_text().splitlines():
        outcome = Outcome.of(json.loads(line))
        latest[outcome.package, outcome.name, outcome.mode, outcome.device] = outcome
    return [latest[key] for key in sorted(latest)]


def page(outcomes: Sequence[Outcome]) -> str:
    """The whole page, of what has no gradients."""
    outcomes = [outcome for outcome in outcomes if outcome.mode not in (steps.MODE, *training.MODES)]
    packages = sorted({outcome.package for outcome in outcomes})
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", *packages))
    parts = [
        "# Models of other people",
        "Written by `python -m tests.sweep`, which docs/testing.md explains. Random weights, a batch of two, small "
        "inputs, no gradients, in evaluation and in training mode. A result is right when it is within the numeric "
        "policy (`fusepass.numerics.check`), or beyond it by nothing but rounding errors of values that cancel "
        "(`tests/fuzz/noise.py`), buffers and inputs after the call included, and when the random generator is "
        "where eager leaves it; each model is called twice.",
        f"{versions}; {platform.machine()}; {datetime.date.today().isoformat()}.",
        _table(
            ("package", "kernels", "models", "right", "operators", "fused, eval", "fused, train", "seconds"),
            [
                (package, device, *_summary([o for o in outcomes if (o.package, o.device) == (package, device)]))
                for package, device in sorted({(o.package, o.device) for o in outcomes})
            ],
        ),
        "*Kernels*: `interpreted` by the reference interpreter, `compiled`, or `original`, where fused regions were "
        "generated in full but ran as their ATen operators. *Fused* is the share of ATen operators that are in generated "
        "kernels; views, which are no kernels, count as operators, and in training the writes to running statistics do. "
        "*Seconds* is the median CPU time of the first call in Python (capture, simplification, partition, code "
        "generation) per 100 operators. Outcomes gather over several runs, perhaps of several commits and on machines with "
        "other versions than those above; the way of capture is the last run's.",
        "## Operators left to ATen",
        _table(("operators", "reason"), _reasons(outcomes)),
        "## Ways of capture",
        _table(("models", "way", "why not as one graph"), _routes(outcomes)),
    ]
    wrong = [(o.name, o.mode, o.verdict if o.verdict != "ok" else o.failed[0]) for o in outcomes if not o.ok]
    if wrong:
        parts += ["## Not right", _table(("model", "mode", "what"), wrong)]
    missing = [(package, ", ".join(names)) for package in packages if (names := _not_run(package, outcomes))]
    if missing:
        parts += ["## Not run in both modes", _table(("package", "models"), missing)]
    for package in packages:
        parts += [f"## {package}", _models([o for o in outcomes if o.package == package])]
    return "\n\n".join(parts) + "\n"


def _summary(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    names = {outcome.name for outcome in outcomes}
    wrong = {outcome.name for outcome in outcomes if not outcome.ok}
    seconds = [outcome.seconds_per_100_ops for outcome in outcomes if outcome.seconds]
    operators = sum(outcome.ops for outcome in outcomes)
    shares = (_share([o for o in outcomes if o.mode == mode]) for mode in ("eval", "train"))
    return (
        str(len(names)),
        str(len(names - wrong)),
        str(operators),
        *shares,
        f"{statistics.median(seconds):.2f}" if seconds else "-",
    )


def _not_run(package: str, outcomes: Sequence[Outcome]) -> list[str]:
    """The models of `package` without an outcome in evaluation or in training mode."""
    if package not in known.installed():
        return []
    modes = {(outcome.name, outcome.mode) for outcome in outcomes if outcome.package == package}
    names = [entry.name for entry in known.entries(package)]
    return [name for name in names if not {(name, "eval"), (name, "train")} <= modes]


def _share(outcomes: Sequence[Outcome]) -> str:
    operators = sum(outcome.ops for outcome in outcomes)
    return f"{sum(outcome.fused for outcome in outcomes) / operators:.0%}" if operators else "-"


def _reasons(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    total: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        total.update(dict(outcome.refused))
    # Why a model was not traced is a refusal as well, of the model; it has a table of its own.
    operators = [(reason, count) for reason, count in total.most_common() if not reason.startswith("forward ")]
    return [(str(count), reason) for reason, count in operators[:_MOST_REASONS]]


def _routes(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    models = {(outcome.package, outcome.name): outcome for outcome in outcomes if outcome.mode == "eval"}
    routes = collections.Counter((outcome.route, outcome.reason) for outcome in models.values())
    return [(str(count), route, reason) for (route, reason), count in routes.most_common()]


def _models(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for name in sorted({outcome.name for outcome in outcomes}):
        found = [outcome for outcome in outcomes if outcome.name == name]
        modes = {outcome.mode: outcome for outcome in found}
        first = modes.get("eval", found[0])
        rows.append(
            (
                name,
                "yes" if all(outcome.ok for outcome in found) else "no",
                first.route,
                str(first.ops),
                str(first.kernels),
                *(f"{modes[mode].share:.0%}" if mode in modes else "-" for mode in ("eval", "train")),
            )
        )
    return _table(("model", "right", "way", "operators", "kernels", "fused, eval", "fused, train"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
