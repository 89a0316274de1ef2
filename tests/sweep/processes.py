"""Trials one after the other, or in several processes at once."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.farm.pool import Done, Job, Pool
from tests.support.lost import is_lost
from tests.sweep import packages, steps, training
from tests.sweep.entry import Entry
from tests.sweep.trial import Outcome, run, where


@dataclass(frozen=True)
class Asked:
    """A trial by names, which any process understands."""

    package: str
    name: str
    mode: str
    device: str
    kernels: str


def outcomes(asked: Sequence[Asked], workers: int, minutes: float) -> Iterator[tuple[Asked, Outcome]]:
    """What becomes of each, as it comes; several processes have `minutes`, and what is not done by then does not come."""
    if workers == 1:
        yield from ((trial, _run(trial)) for trial in asked)
        return
    pool = Pool(workers, time.monotonic() + 60 * minutes, grace=0.0, longest=60 * minutes)
    for done in pool.each(map(job, asked)):
        yield Asked(**done.job.arguments), outcome(done)


def job(asked: Asked, seconds: float = 1.0) -> Job:
    """A trial for another process, which takes about `seconds`."""
    name = f"{asked.package}-{asked.name}-{asked.mode}-{asked.device}"
    return Job(name, f"{__name__}:tried", dataclasses.asdict(asked), seconds)


def outcome(done: Done) -> Outcome:
    """What a process made of a `job`; one that died is an outcome, too."""
    if not done.problem:
        return Outcome.of(done.outcome["trial"])
    asked = Asked(**done.job.arguments)
    first = next(iter(done.problem.splitlines()))
    return Outcome(asked.package, asked.name, asked.mode, where(asked.device, asked.kernels), first, done.problem)


def tried(left: Path, **asked: str) -> dict[str, Any]:
    """A trial as JSON."""
    trial = Asked(**asked)
    found = _run(trial)
    lost = is_lost(trial.device)
    if trial.device != "cpu" and not lost:
        torch.cuda.empty_cache()  # processes share the device
    return {"trial": dataclasses.asdict(found), "last": lost}


def _run(asked: Asked) -> Outcome:
    entry = _entries(asked.package)[asked.name]
    if asked.mode == steps.MODE:
        return steps.run(entry)
    if asked.mode in training.MODES:
        return training.run(entry, asked.mode, asked.kernels)
    return run(entry, training=asked.mode == "train", device=asked.device, kernels=asked.kernels)


@functools.cache
def _entries(package: str) -> dict[str, Entry]:
    return {entry.name: entry for entry in packages.entries(package)}
