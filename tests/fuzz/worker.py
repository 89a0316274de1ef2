"""A process that tries one chunk of random models after the other: the seeds come on its standard input, one a line."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.fuzz.chunk import Failure, Phases, draw, is_lost, run
from tests.fuzz.shrink import smallest


def main() -> None:
    """Ends with its input, and after an outcome that says `last`."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.worker", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--size", type=int, required=True, help="models of a chunk")
    parser.add_argument(
        "--directory", type=Path, required=True, help="where <seed>.json is left, and <seed>.judged, the model at work"
    )
    asked = parser.parse_args()
    faulthandler.enable()  # a process that hangs is ended by SIGABRT
    for line in sys.stdin:
        outcome = tried(int(line), asked.size, asked.device, asked.directory)
        path = asked.directory / f"{outcome['seed']}.json"
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(outcome))
        os.replace(aside, path)
        if outcome["last"]:
            return


def tried(seed: int, size: int, device: str, directory: Path) -> dict[str, Any]:
    """What came of the chunk of `seed`, as `Record.add` takes it.

    A failure that takes the device with it (an illegal access, say) is told as it is, and what came after it in the chunk
    does not count as tried. `last` says that this process is of no more use.
    """
    start = time.monotonic()
    phases = Phases()
    with phases.timed("draw"):
        examples = draw(seed, size)
    judged = directory / f"{seed}.judged"
    failures = run(examples, device, phases, lambda example: judged.write_text(example.model.text))
    judged.unlink(missing_ok=True)
    lost = next((failure.example for failure in failures if failure.lost), None)
    told, noise = {}, []
    for failure in failures:
        if failure.noise:
            noise.append({"seed": seed, "problem": failure.problem})
        else:
            found = _told(seed, failure if lost else smallest(failure, device))
            told[found["program"]] = found
    return {
        "seed": seed,
        "examples": examples.index(lost) + 1 if lost else len(examples),
        "failures": list(told.values()),
        "noise": noise,
        "seconds": time.monotonic() - start,
        "phases": phases.seconds,
        "last": is_lost(device),
    }


def _told(seed: int, failure: Failure) -> dict[str, Any]:
    level, text = failure.example.level.value, failure.example.model.text
    return {"seed": seed, "algebra": level, "problem": failure.problem, "program": text}


if __name__ == "__main__":
    main()
