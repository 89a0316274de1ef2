"""Workers that take one job after the other: one that dies or hangs costs the job that it was at, and is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """A call of a function of the tests in another process.

    Attributes:
        name: its own; part of a file's name.
        call: ``module:function``. It returns what JSON takes, a dictionary; ``last`` in it, if true, says that the process
            is of no more use, as when an illegal access took the GPU from it.
        arguments: keywords of the call, as JSON takes them; ``left``, a file for what is to be known when the process dies,
            is added.
        seconds: that it may take, about.
    """

    name: str
    call: str
    arguments: Mapping[str, Any]
    seconds: float = 1.0


@dataclass(frozen=True)
class Done:
    """What became of a job.

    Attributes:
        outcome: what its call returned; where its process died, ``left`` is what it left behind.
        problem: a traceback, or how the process ended; empty where all is well.
        seconds: that it took.
    """

    job: Job
    outcome: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Pool:
    """How many processes, how long, and what they see of the machine.

    Attributes:
        workers: processes.
        until: no job begins later, by `time.monotonic`.
        grace: seconds after `until` at which what still runs is ended, and is not among the outcomes.
        longest: seconds after which a job is ended: a kernel may never come to its end.
        threads: of each process.
        devices: GPUs that processes are dealt out to; None leaves that as it is.
    """

    workers: int
    until: float = float("inf")
    grace: float = 60.0
    longest: float = 240.0
    threads: int = 1
    devices: int | None = None

    def run(self, following: Callable[[], Job | None]) -> Iterator[Done]:
        """What becomes of each job, as it comes. `following` gives the next one, or None if there is none at present."""
        with tempfile.TemporaryDirectory(prefix="farm-") as directory:
            workers = [_Worker(Path(directory), self._environment(number, directory)) for number in range(self.workers)]
            while True:
                for worker in workers:
                    if worker.job is None:
                        if time.monotonic() < self.until and (job := following()) is not None:
                            worker.begin(job)
                    elif (done := worker.done()) is not None:
                        yield done
                    elif time.monotonic() > worker.since + self.longest:
                        worker.abort()
                    elif time.monotonic() > self.until + self.grace:
                        worker.leave()
                if all(worker.job is None for worker in workers):
                    job = following() if time.monotonic() < self.until else None
                    if job is None:
                        break
                    workers[0].begin(job)
                time.sleep(0.05)
            for worker in workers:
                worker.end()

    def each(self, jobs: Iterable[Job]) -> Iterator[Done]:
        """What becomes of `jobs`, begun in the order of the longest first."""
        rest = iter(sorted(jobs, key=lambda job: -job.seconds))
        return self.run(lambda: next(rest, None))

    def _environment(self, number: int, directory: str) -> dict[str, str]:
        # oneDNN crashes in half-precision convolutions of eager itself where processors have AMX (PyTorch 2.11, conv3d), and a job is
        # lost with its process. What is generated here has no part in it.
        plain = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
        own = {"FUSEPASS_JOBS": "1", "FUSEPASS_CACHE_DIR": f"{directory}/cache", "OMP_NUM_THREADS": str(self.threads)}
        if self.devices:
            own["CUDA_VISIBLE_DEVICES"] = str(number % self.devices)
        return plain | os.environ | own


class _Worker:
    """A process of `tests.farm.worker`, which takes seconds to start and so takes many jobs; another one when it has died.

    Attributes:
        job: what it is at.
        since: when it began that, by `time.monotonic`.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.job: Job | None = None
        self.since = 0.0
        self._directory, self._environment = directory, environment
        self._process: subprocess.Popen[str] | None = None

    def begin(self, job: Job) -> None:
        """Have a job done."""
        self.job, self.since = job, time.monotonic()
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "tests.farm.worker", "--directory", str(self._directory)]
            self._process = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()

    def done(self) -> Done | None:
        """What became of the job, once that is known."""
        if self.job is None or self._process is None:
            return None
        status = self._process.poll()  # before the file is looked for, which may be its last
        path = self._directory / f"{self.job.name}.json"
        job, seconds = self.job, time.monotonic() - self.since
        if path.exists():
            found = json.loads(path.read_text())
            path.unlink()
            done = Done(job, found["outcome"], found["problem"], seconds)
            last = bool(done.outcome.get("last"))
        elif status is None:
            return None
        else:
            left = self._directory / f"{job.name}.left"
            told = {"left": left.read_text() if left.exists() else ""}
            done = Done(job, told, f"its process ended with {status}", seconds)
            last = True
        self.job = None
        if last:
            self.end()
        return done

    def abort(self) -> None:
        """Have the process end, and tell where it was."""
        if self._process is not None and self.job is not None:
            self._process.send_signal(signal.SIGABRT)

    def leave(self) -> None:
        """Forget the job, and the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self.job = None, None

    def end(self) -> None:
        """Let the process come to its end."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None
