"""``python -m tests.proof``: random models, PyTorch's samples and models of other people, divided over the cores of a machine.

What is there after the time is over is told, and what is not done yet; a later run over the same folder goes on with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from tests.farm.pool import Pool
from tests.fuzz.record import described_commit, versions
from tests.proof.parts import Fuzz, Models, Operators, Part


def main() -> int:
    """The exit status is 1 where something was wrong, 2 where nothing was wrong but something is not done."""
    asked = _arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    commit = asked.commit or described_commit()
    parts = _parts(asked, commit)
    missing = {job.name: (job, part) for part in parts for job in part.missing()}
    pool = Pool(
        asked.workers, started + 60 * asked.minutes, asked.grace, longest=asked.longest, devices=_devices(asked.device)
    )
    spent: Counter[str] = Counter()
    for done in pool.each([job for job, _ in missing.values()]):
        _, part = missing.pop(done.job.name)
        spent[part.name] += done.seconds
        part.add(done)
        told = f"{done.job.name}: {done.seconds:.0f} s, {len(missing)} to do, {time.monotonic() - started:.0f} s"
        print(told, *(["PROBLEM", done.problem.splitlines()[-1]] if done.problem else []), flush=True)
    summary = {
        "commit": commit,
        **versions(),
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu",
        "devices": _devices(asked.device),
        "workers": asked.workers,
        "seconds": round(time.monotonic() - started),
        "parts": {part.name: {**part.told(), "seconds": round(spent[part.name])} for part in parts},
        "not done": sorted(missing),
    }
    (asked.out / "proof.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary["parts"], indent=1), f"{len(missing)} not done", sep="\n")
    wrong = any(part.told()["wrong"] for part in parts)
    return 1 if wrong else 2 if missing else 0


def _parts(asked: argparse.Namespace, commit: str) -> list[Part]:
    every: list[Part] = []
    for device in ("cuda", "cpu") if asked.device == "cuda" else ("cpu",):
        every.append(Fuzz(asked.out, device, commit, asked.examples, asked.size, asked.seed))
        every.append(Models(asked.out, device, "compiled", asked.models))
        every.append(Operators(asked.out, device, "compiled", asked.pieces))
    every.append(Operators(asked.out, "cpu", "interpreted", asked.pieces))
    return [part for part in every if not asked.only or part.name in asked.only]


def _devices(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the records; what they hold is not done again"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cuda: both")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="nothing begins later")
    parser.add_argument("--grace", type=float, default=20.0, help="seconds after which what still runs is ended")
    parser.add_argument("--longest", type=float, default=240.0, help="seconds that one job may take")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, dealt out to all GPUs")
    parser.add_argument(
        "--only", nargs="*", default=(), help="names of parts, as in fuzz-cuda or operators-cpu-interpreted"
    )
    parser.add_argument("--examples", type=int, default=20_000, help="random models for each device")
    parser.add_argument("--size", type=int, default=100, help="random models of a job")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of a GPU's; a CPU's are a million later")
    parser.add_argument("--models", default="", help="a regular expression that names of models contain")
    parser.add_argument("--pieces", type=int, help="so many pieces of the operators; all of them otherwise")
    parser.add_argument("--commit", default="", help="what git does not say where there is none")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
