"""Runs random models until so many were tried, in several processes; goes on where an earlier run stopped."""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import count
from pathlib import Path

from tests.farm.pool import Job, Pool
from tests.fuzz.record import Record
from tests.fuzz.tried import job, outcome, training_job

ROOT = Path(__file__).parents[2]
_GRACE = 60.0
"""Seconds after the last start at which what still runs is ended, and does not count as tried."""


def main() -> int:
    """The exit status is 1 where a result was wrong."""
    asked = _arguments()
    record = Record.of(asked.record, asked.device)
    record.mode = f"training, partition {asked.partition}" if asked.train else record.mode
    record.begin(again=asked.again)
    seeds = (number for number in count(asked.seed) if str(number) not in record.examples)
    started = time.monotonic()
    before, begun = record.total, 0

    def following() -> Job | None:
        nonlocal begun
        if record.total + asked.size * begun >= asked.examples:
            return None
        begun += 1
        if asked.train:
            return training_job(next(seeds), asked.size, asked.device, asked.partition)
        return job(next(seeds), asked.size, asked.device)

    threads = max(1, (os.cpu_count() or 1) // asked.workers)
    pool = Pool(asked.workers, started + 60 * asked.minutes, _GRACE, threads=threads)
    for done in pool.run(following):
        begun -= 1
        record.add(outcome(done))
        record.save(asked.record)
        rate = 60 * (record.total - before) / (time.monotonic() - started)
        print(f"{record.total} examples, {len(record.failures)} wrong, {rate:.0f} a minute", flush=True)
    print("seconds of all processes:", ", ".join(f"{name} {spent:.0f}" for name, spent in record.phases.items()))
    for failure in record.failures:
        print(f"\n# seed {failure['seed']}, algebra {failure['algebra']}: {failure['problem']}\n{failure['program']}")
    return 1 if record.failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=1000, help="different models that the record is to hold")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; each chunk has its own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--size", type=int, default=200, help="models of a chunk, compiled together")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="no chunk starts later")
    parser.add_argument("--again", action="store_true", help="try the seeds of recorded failures once more")
    parser.add_argument("--record", type=Path, default=ROOT / "build" / "fuzz.json")
    parser.add_argument("--train", action="store_true", help="a step of training of each model, through torch.compile")
    parser.add_argument(
        "--partition",
        choices=("own", "gpu", "h200"),
        default="own",
        help="how a CPU's joint graphs are cut; h200: divided and lowered, too, and interpreted",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
