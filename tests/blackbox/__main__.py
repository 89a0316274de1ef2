"""Runs the black-box suites, each case in three ways, in several processes, and records what came of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.blackbox.run import PIECE, job, piece
from tests.blackbox.suites import SUITES
from tests.blackbox.ways import WAYS
from tests.farm.pool import Done, Pool
from tests.fuzz.record import described_commit, versions

ROOT = Path(__file__).parents[2]


def main() -> int:
    """The exit status is 1 where a case failed."""
    asked = _arguments()
    jobs = []
    for suite in asked.suites:
        for way in asked.ways:
            count = len(piece(suite, asked.only))
            jobs += [job(suite, way, start, asked.only, asked.kernels) for start in range(0, count, PIECE)]
    pool = Pool(asked.workers, longest=600.0, threads=max(1, (os.cpu_count() or 1) // asked.workers))
    started, outcomes = time.monotonic(), list[dict[str, Any]]()
    for number, done in enumerate(pool.each(jobs), 1):
        told = _told(done)
        outcomes += told
        for each in told:
            if each["verdict"] == "failed":
                print(f"\n{each['suite']}, {each['way']}: {each['case']}\n    {each['problem']}")
        print(f"{number} of {len(jobs)} jobs, {len(outcomes)} runs", flush=True)
    record = {
        "commit": asked.commit or described_commit(),
        "versions": versions(),
        "kernels": asked.kernels,
        "minutes": round((time.monotonic() - started) / 60, 1),
        **summary(outcomes),
    }
    asked.record.parent.mkdir(parents=True, exist_ok=True)
    asked.record.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["counts"], indent=1), f"{len(record['failed'])} failed", sep="\n")
    return 1 if record["failed"] else 0


def summary(outcomes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts by suite and way, and the cases that failed, or that PyTorch's own tracing fails in the same way."""
    listed = list(outcomes)
    counts: dict[str, dict[str, Counter[str]]] = {}
    for each in listed:
        counts.setdefault(each["suite"], {}).setdefault(each["way"], Counter())[each["verdict"]] += 1
    plain = [{name: value for name, value in each.items() if name != "verdict"} for each in listed]
    return {
        "counts": counts,
        "failed": [plain[n] for n, each in enumerate(listed) if each["verdict"] == "failed"],
        "as aot_eager": [plain[n] for n, each in enumerate(listed) if each["verdict"] == "as aot_eager"],
    }


def _told(done: Done) -> list[dict[str, Any]]:
    """Outcomes of a job; a process that ended is the fault of the case that it was at, and nothing is known of those behind it."""
    if not done.problem:
        runs: list[dict[str, Any]] = done.outcome["runs"]
        return runs
    arguments = done.job.arguments
    told = {"suite": arguments["suite"], "way": arguments["way"], "case": done.outcome.get("left", done.job.name)}
    return [{**told, "verdict": "failed", "problem": done.problem}]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.blackbox", description=__doc__)
    parser.add_argument("--suites", nargs="+", choices=tuple(SUITES), default=tuple(SUITES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--only", default="", help="a regular expression that names of cases are searched for")
    parser.add_argument("--kernels", choices=("interpreted", "compiled"), default="interpreted")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--commit", default="", help="what is tried, where git does not know")
    parser.add_argument("--record", type=Path, default=ROOT / "build" / "blackbox.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
