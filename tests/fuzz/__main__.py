"""Runs random models until so many were tried, in several processes; goes on where an earlier run stopped."""

from __future__ import annotations

import argparse
import json
import os
import signal
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
_GRACE = 60.0
"""Seconds after the last start at which what still runs is ended, and does not count as tried."""

_LONGEST = 240.0
"""Seconds after which a chunk is ended: a kernel may never come to its end."""


def main() -> int:
    """The exit status is 1 where a result was wrong."""
    asked = _arguments()
    record = Record.of(asked.record, asked.device)
    record.begin(again=asked.again)
    seeds = _seeds(asked.seed, record)
    started = time.monotonic()
    end = started + 60 * asked.minutes
    before = record.total
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        workers = [_Worker(asked, Path(directory)) for _ in range(asked.workers)]

        def wanted() -> bool:
            tried = record.total + asked.size * sum(worker.seed is not None for worker in workers)
            return tried < asked.examples and time.monotonic() < end

        while wanted() or any(worker.seed is not None for worker in workers):
            for worker in workers:
                if worker.seed is None and wanted():
                    worker.begin(next(seeds))
                elif (outcome := worker.outcome()) is not None:
                    record.add(outcome)
                    record.save(asked.record)
                    rate = 60 * (record.total - before) / (time.monotonic() - started)
                    print(f"{record.total} examples, {len(record.failures)} wrong, {rate:.0f} a minute", flush=True)
                elif time.monotonic() > worker.since + _LONGEST:
                    worker.kill()
                elif time.monotonic() > end + _GRACE:
                    worker.leave()
            time.sleep(0.1)
        for worker in workers:
            worker.end()
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
    return parser.parse_args()


def _seeds(first: int, record: Record) -> Iterator[int]:
    return (number for number in count(first) if str(number) not in record.examples)


class _Worker:
    """A process of `tests.fuzz.worker`, which takes seconds to start and so tries many chunks; another one when it has died.

    Attributes:
        seed: of the chunk that it is at.
        since: when it began that, by `time.monotonic`.
    """

    def __init__(self, asked: argparse.Namespace, directory: Path) -> None:
        self.seed: int | None = None
        self.since = 0.0
        self._directory = directory
        self._command = [sys.executable, "-m", "tests.fuzz.worker", "--directory", str(directory)]
        self._command += ["--device", asked.device, "--size", str(asked.size)]
        threads = str(max(1, (os.cpu_count() or 1) // asked.workers))
        own = {"FUSEPASS_JOBS": "1", "OMP_NUM_THREADS": threads, "FUSEPASS_CACHE_DIR": str(directory / "cache")}
        self._environment = os.environ | own
        self._process: subprocess.Popen[str] | None = None

    def begin(self, seed: int) -> None:
        """Have a chunk tried."""
        self.seed, self.since = seed, time.monotonic()
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()

    def outcome(self) -> dict[str, Any] | None:
        """What came of the chunk, once it is there; a process that died is a failure of its own."""
        if self.seed is None or self._process is None:
            return None
        status = self._process.poll()  # before the file is looked for, which may be its last
        path = self._directory / f"{self.seed}.json"
        if path.exists():
            found = dict(json.loads(path.read_text()))
            path.unlink()
        elif status is None:
            return None
        else:
            problem = f"the process of the chunk ended with {status}"
            judged = self._directory / f"{self.seed}.judged"
            program = judged.read_text() if judged.exists() else ""
            failure = {"seed": self.seed, "algebra": "", "problem": problem, "program": program}
            found = {"seed": self.seed, "examples": 0, "failures": [failure], "noise": [], "seconds": 0.0}
            found |= {"phases": {}, "last": True}
        self.seed = None
        if found["last"]:
            self.end()
        return found

    def kill(self) -> None:
        """Have the chunk that it is at fail, and tell where it was."""
        if self._process is not None and self.seed is not None:
            self._process.send_signal(signal.SIGABRT)

    def leave(self) -> None:
        """Forget the chunk that it is at, and the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self.seed = None, None

    def end(self) -> None:
        """Let the process come to its end."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None


if __name__ == "__main__":
    sys.exit(main())
