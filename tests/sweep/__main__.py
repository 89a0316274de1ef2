"""``python -m tests.sweep``: models of other people through `fusepass.optimize`, and docs/models.md from what comes out."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tests.sweep import packages, table
from tests.sweep.trial import KERNELS, run

ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for. Returns 1 if a result was not right, else 0."""
    options = _parser().parse_args(arguments)
    wrong = 0
    for package in [] if options.page_only else options.package:
        for entry in packages.entries(package):
            for mode in options.modes if re.search(options.models, entry.name) else ():
                outcome = run(entry, training=mode == "train", device=options.device, kernels=options.kernels)
                table.append(options.outcomes, outcome)
                wrong += not outcome.ok
                text = "ok" if outcome.ok else f"{outcome.verdict} {outcome.detail} {outcome.failed}"
                print(f"{package} {entry.name} {mode}: {outcome.share:.0%} fused, {outcome.route}: {text}", flush=True)
    if options.page is not None:
        options.page.write_text(table.page(table.read(options.outcomes)))
    return int(wrong > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--package", nargs="*", choices=packages.NAMES, default=packages.installed())
    parser.add_argument("--models", default="", help="a regular expression that names contain")
    parser.add_argument("--modes", nargs="*", choices=("eval", "train"), default=("eval", "train"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", choices=tuple(KERNELS), default="interpreted", help="how fused regions run")
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
