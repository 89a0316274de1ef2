"""Where the time to a public network's first result goes, stage by stage, with an empty and a filled cache.

python benchmarks/first_call.py --networks                 # all of `benchmarks/public.py` that are called without gradients
python benchmarks/first_call.py --networks densenet201 googlenet
python benchmarks/first_call.py --smallest --device cpu    # all of `benchmarks/smallest.py`
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.public import INFERENCE
from benchmarks.smallest import SMALLEST

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("first_call.py")
CACHE = "FUSEPASS_CACHE_DIR"
CACHES = ("empty", "filled")
KNOWN = {network.name: network for network in (*INFERENCE, *SMALLEST)}
STAGES = (
    "capture", "simplify", "layout", "partition", "lower", "passes", "render", "search", "build", "load", "tune", "whole graph", "splice", "rest",
)  # fmt: skip
"""In the order of the table. `generate` in the report is lowering, passes, rendering and the search around them; with a filled cache nothing of
it is left but looking up what was generated, under `search`. Where workers generate (option `workers`), only what this process does itself is
among the three, and `search` has the waiting. `build` is what the compilers take after that, as they start beside it."""


@dataclass(frozen=True)
class FirstNetwork:
    """What a process found of its first call.

    Attributes:
        seconds: by stage; `rest` is what no stage has.
        total: seconds of the call.
        processor: seconds that processors worked for the call, those of the compilers that it waited for included, those of workers not: where others use the machine
            as well, they say more than `total`.
        regions: how many there are.
        libraries: how many the cache has then.
        peak: GiB of memory that the process had at most.
    """

    seconds: Mapping[str, float]
    total: float
    processor: float
    regions: int
    libraries: int
    peak: float


def measured(name: str, device: str) -> FirstNetwork:
    """The first call in this process; imports, CUDA's start and an eager call come before."""
    import torch

    network = KNOWN[name]
    where = torch.device(device)
    import fusepass

    with torch.no_grad(), network.casting(where):
        model, x = network.model(where), network.input(where)
        model(x)
        fused = fusepass.optimize(model)
        with timed() as spent:
            start, used = time.perf_counter(), _processor_seconds()
            fused(x)
            if where.type == "cuda":
                torch.cuda.synchronize()
            total, used = time.perf_counter() - start, _processor_seconds() - used
    report = fused.report()
    told = dict(report.seconds)
    search = told.pop("generate", 0.0) - sum(spent.values())
    seconds = {**told, **spent, "search": max(search, 0.0)}
    return FirstNetwork(
        seconds={**seconds, "rest": max(total - sum(seconds.values()), 0.0)},
        total=total,
        processor=used,
        regions=len(report.regions),
        libraries=len([*Path(os.environ[CACHE]).rglob("*.so")]),
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
    )


def _processor_seconds() -> float:
    """Seconds of this process, and of its children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


@contextmanager
def timed() -> Iterator[Mapping[str, float]]:
    """Seconds in the three parts of generation."""
    from fusepass.autotune import candidates
    from fusepass.codegen import generate

    spent: dict[str, float] = defaultdict(float)

    def clocked(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[stage] += time.perf_counter() - start

        return call

    parts = ((candidates, "lower", "lower"), (generate, "run_passes", "passes"), (generate, "render", "render"))
    with ExitStack() as patches:
        for owner, function, stage in parts:
            patches.enter_context(mock.patch.object(owner, function, clocked(stage, getattr(owner, function))))
        yield spent


def networks(names: Sequence[str], device: str, timeout_s: float, caches: Sequence[str] = CACHES) -> None:
    """Print a line for each network and each of `caches`, measured in processes of their own."""
    print(
        f"{'network':20} {'cache':6}"
        + "".join(f"{stage:>12}" for stage in (*STAGES, "total", "processor", "regions", "built", "GiB"))
    )
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for cache in caches:
                command = [sys.executable, str(SCRIPT), "--one", name, "--device", device]
                environment = os.environ | {CACHE: folder}
                print(f"{name:20} {cache:6}{_line(command, environment, timeout_s)}", flush=True)


def _line(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f" over {timeout_s:g} s"
    if done.returncode:
        return f" failed with status {done.returncode}: {done.stderr.strip()[-200:]}"
    found = FirstNetwork(**json.loads(done.stdout.splitlines()[-1]))
    numbers = (*(found.seconds.get(stage, 0.0) for stage in STAGES), found.total, found.processor)
    return (
        "".join(f"{number:12.2f}" for number in numbers) + f"{found.regions:12}{found.libraries:12}{found.peak:12.1f}"
    )
