"""``python -m tests.sweep``: models of other people through `fusepass.optimize`, and docs/models.md from what comes out."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tests.sweep import packages, steps, table, training
from tests.sweep.processes import Asked, outcomes
from tests.sweep.trial import KERNELS, where

ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for. Returns 1 if a result was not right or not there in time, else 0."""
    options = _parser().parse_args(arguments)
    asked = [] if options.page_only else _asked(options)
    missing, wrong = set(asked), 0
    for trial, outcome in outcomes(asked, options.workers, options.minutes):
        table.append(options.outcomes, outcome)
        missing.remove(trial)
        wrong += not outcome.ok
        text = "ok" if outcome.ok else f"{outcome.verdict} {outcome.detail} {outcome.failed}"
        named = f"{trial.package} {trial.name} {trial.mode}"
        print(f"{named}: {outcome.share:.0%} fused, {outcome.route}, {outcome.total_seconds:.0f} s: {text}", flush=True)
    for trial in sorted(missing, key=str):
        print(f"{trial.package} {trial.name} {trial.mode}: not there in time")
    if options.page is not None:
        options.page.write_text(table.page(table.read(options.outcomes)))
    return int(wrong > 0 or bool(missing))


def _asked(options: argparse.Namespace) -> list[Asked]:
    known = table.read(options.outcomes) if options.missing and options.outcomes.exists() else []
    there = {(outcome.package, outcome.name, outcome.mode, outcome.device) for outcome in known}
    return [
        Asked(package, entry.name, mode, options.device, options.kernels)
        for package in options.package
        for entry in packages.entries(package)
        if re.search(options.models, entry.name)
        for mode in options.modes
        if (package, entry.name, mode, where(options.device, options.kernels)) not in there
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--package", nargs="*", choices=packages.NAMES + packages.TRAINED, default=packages.installed())
    parser.add_argument("--models", default="", help="a regular expression that names contain")
    parser.add_argument(
        "--modes", nargs="*", choices=("eval", "train", steps.MODE, *training.MODES), default=("eval", "train")
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", choices=tuple(KERNELS), default="interpreted", help="how fused regions run")
    parser.add_argument("--missing", action="store_true", help="only what has no outcome yet")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="several processes have so long")
    parser.add_argument(
        "--outcomes",
        type=Path,
        default=ROOT / "build" / "sweep.jsonl",
        help="JSON lines that outcomes are added to; a later one of the same model and mode takes the earlier one's place",
    )
    parser.add_argument("--page", type=Path, help="write the page from all outcomes, such as docs/models.md")
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
