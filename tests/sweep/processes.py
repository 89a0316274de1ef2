"""Trials one after the other, or in several processes at once."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.sweep import packages
from tests.sweep.entry import Entry
from tests.sweep.trial import Outcome, run


@dataclass(frozen=True)
class Asked:
    """A trial by names, which any process understands."""

    package: str
    name: str
    mode: str
    device: str
    kernels: str


def outcomes(asked: Sequence[Asked], workers: int, minutes: float) -> Iterator[tuple[Asked, Outcome]]:
    """What becomes of each, as it comes; several processes have `minutes`, and what one that died was at does not come."""
    if workers == 1:
        yield from map(_tried, asked)
        return
    end = time.monotonic() + 60 * minutes
    os.environ |= {"FUSEPASS_JOBS": "1", "OMP_NUM_THREADS": "1"}
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        found = pool.imap_unordered(_tried, asked)
        for _ in asked:
            try:
                yield found.next(timeout=max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                return


def _tried(asked: Asked) -> tuple[Asked, Outcome]:
    entry = _entries(asked.package)[asked.name]
    outcome = run(entry, training=asked.mode == "train", device=asked.device, kernels=asked.kernels)
    if asked.device != "cpu":
        torch.cuda.empty_cache()  # processes share the device
    return asked, outcome


@functools.cache
def _entries(package: str) -> dict[str, Entry]:
    return {entry.name: entry for entry in packages.entries(package)}
