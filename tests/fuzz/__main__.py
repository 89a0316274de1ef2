"""Runs random models until so many were tried, in several processes; goes on where an earlier run stopped."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tests.fuzz.record import Record

ROOT = Path(__file__).parents[2]


def main() -> int:
    """The exit status is 1 where a result was wrong."""
    asked = _arguments()
    if asked.chunk is not None:
        _chunk(asked)
        return 0
    record = Record.of(asked.record, asked.device)
    record.begin(again=asked.again)
    end = time.monotonic() + 60 * asked.minutes
    running: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}
    seeds = _seeds(asked.seed, record)
    started = time.monotonic()
    before = record.total
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        while running or (record.total < asked.examples and time.monotonic() < end):
            wanted = asked.examples - record.total - asked.size * len(running)
            if len(running) < asked.workers and wanted > 0 and time.monotonic() < end:
                number = next(seeds)
                running[number] = _start(asked, number, Path(directory))
                continue
            time.sleep(0.2)
            for number, (process, path) in list(running.items()):
                if process.poll() is not None:
                    record.add(_outcome(number, process, path))
                    record.save(asked.record)
                    del running[number]
                    rate = 60 * (record.total - before) / (time.monotonic() - started)
                    print(f"{record.total} examples, {len(record.failures)} wrong, {rate:.0f} a minute", flush=True)
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
    parser.add_argument("--chunk", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _seeds(first: int, record: Record) -> Iterator[int]:
    return (number for number in count(first) if str(number) not in record.examples)


def _start(asked: argparse.Namespace, number: int, directory: Path) -> tuple[subprocess.Popen[bytes], Path]:
    path = directory / f"{number}.json"
    command = [sys.executable, "-m", "tests.fuzz", "--chunk", str(number), "--record", str(path)]
    command += ["--device", asked.device, "--size", str(asked.size)]
    threads = str(max(1, (os.cpu_count() or 1) // asked.workers))
    cache = str(directory / "cache")
    environment = os.environ | {"FUSEPASS_JOBS": "1", "OMP_NUM_THREADS": threads, "FUSEPASS_CACHE_DIR": cache}
    return subprocess.Popen(command, cwd=ROOT, env=environment), path


def _outcome(number: int, process: subprocess.Popen[bytes], path: Path) -> dict[str, Any]:
    """What the chunk left; a process that died is a failure of its own."""
    if path.exists():
        return dict(json.loads(path.read_text()))
    problem = f"the process of the chunk ended with {process.returncode}"
    failure = {"seed": number, "algebra": "", "problem": problem, "program": ""}
    return {"seed": number, "examples": 0, "failures": [failure], "noise": [], "seconds": 0.0}


def _chunk(asked: argparse.Namespace) -> None:
    """One chunk in this process, its outcome as JSON in the file of the record."""
    from tests.fuzz.chunk import draw, run
    from tests.fuzz.shrink import smallest

    start = time.monotonic()
    examples = draw(asked.chunk, asked.size)
    told, noise = {}, []
    for failure in run(examples, asked.device):
        if failure.noise:
            noise.append({"seed": asked.chunk, "problem": failure.problem})
            continue
        small = smallest(failure, asked.device)
        text = small.example.model.text
        level = small.example.level.value
        told[text] = {"seed": asked.chunk, "algebra": level, "problem": small.problem, "program": text}
    outcome = {
        "seed": asked.chunk,
        "examples": len(examples),
        "failures": list(told.values()),
        "noise": noise,
        "seconds": time.monotonic() - start,
    }
    asked.record.write_text(json.dumps(outcome))


if __name__ == "__main__":
    sys.exit(main())
