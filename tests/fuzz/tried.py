"""A chunk of random models as a job: what is asked for, what a process makes of it, and what a record says of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.farm.pool import Done, Job


def job(seed: int, size: int, device: str) -> Job:
    """Try the `size` models of `seed`."""
    arguments = {"seed": seed, "size": size, "device": device}
    return Job(f"fuzz-{device}-{seed}", f"{__name__}:tried", arguments, size * (0.45 if device == "cuda" else 0.3))


def training_job(seed: int, size: int, device: str, partition: str) -> Job:
    """Train the `size` models of `seed`, their joint graphs cut as the device's or, on a CPU, as a GPU's."""
    arguments = {"seed": seed, "size": size, "device": device, "partition": partition}
    return Job(f"train-{device}-{partition}-{seed}", f"{__name__}:trained", arguments, size * 1.5)


def outcome(done: Done) -> dict[str, Any]:
    """What `Record.add` takes; a process that died, or could not tell, is a failure of its own."""
    if not done.problem:
        return done.outcome
    seed = done.job.arguments["seed"]
    told = {"seed": seed, "algebra": "", "problem": done.problem, "program": done.outcome.get("left", "")}
    return {"seed": seed, "examples": 0, "failures": [told], "noise": [], "seconds": 0.0, "phases": {}}


def tried(seed: int, size: int, device: str, left: Path) -> dict[str, Any]:
    """What came of the chunk of `seed`. The model at work stands in `left` meanwhile.

    A failure that takes the device with it (an illegal access, say) is told as it is, and what came after it in the chunk
    does not count as tried.
    """
    from tests.fuzz.chunk import draw, run  # only the process that tries them pays for the import

    return _tried(seed, size, device, left, draw, run)


def trained(seed: int, size: int, device: str, partition: str, left: Path) -> dict[str, Any]:
    """What came of a step of training of each model in the chunk of `seed`, told as `tried` tells it."""
    from tests.fuzz.training import draw_trained, run

    return _tried(seed, size, device, left, draw_trained, partial(run, partition=partition))


def _tried(
    seed: int, size: int, device: str, left: Path, draw: Callable[..., Any], run: Callable[..., Any]
) -> dict[str, Any]:
    from tests.fuzz.chunk import Phases
    from tests.fuzz.shrink import smallest
    from tests.support.lost import is_lost

    start = time.monotonic()
    phases = Phases()
    with phases.timed("draw"):
        examples = draw(seed, size)
    failures = run(examples, device, phases, lambda example: left.write_text(example.model.text))
    left.unlink(missing_ok=True)
    lost = next((failure.example for failure in failures if failure.lost), None)
    told, noise = {}, []
    for failure in failures:
        if failure.noise:
            noise.append({"seed": seed, "problem": failure.problem})
        else:
            found = failure if lost else smallest(failure, device, trying=run)
            text = found.example.model.text
            level = found.example.level.value
            told[text] = {"seed": seed, "algebra": level, "problem": found.problem, "program": text}
    return {
        "seed": seed,
        "examples": examples.index(lost) + 1 if lost else len(examples),
        "failures": list(told.values()),
        "noise": noise,
        "seconds": time.monotonic() - start,
        "phases": phases.seconds,
        "last": is_lost(device),
    }
