"""The parts of the proof: which jobs each has, which are not in its record yet, and what the record says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

from tests.farm.pool import Done, Job
from tests.fuzz import tried as fuzz
from tests.fuzz.record import Record
from tests.support import opinfo_jobs as operators
from tests.sweep import packages, table
from tests.sweep import processes as sweep
from tests.sweep.processes import Asked
from tests.sweep.trial import where

_MODELS = Path(__file__).parents[2] / "docs" / "models.md"


class Part(Protocol):
    """A part of the proof, with a record of its own."""

    name: str

    def missing(self) -> list[Job]:
        """What is not in the record."""

    def add(self, done: Done) -> None:
        """Take an outcome into the record, on disk, too."""

    def told(self) -> dict[str, Any]:
        """Counts, and under ``wrong`` what is."""


class Fuzz:
    """Random models: `fuzz_<device>.json`, as `python -m tests.fuzz` writes it."""

    def __init__(self, out: Path, device: str, commit: str, examples: int, size: int, seed: int) -> None:
        self.name = f"fuzz-{device}"
        self._path = out / f"fuzz_{device}.json"
        self._device, self._examples, self._size = device, examples, size
        self._seed = seed + (1_000_000 if device == "cpu" else 0)
        self._record = Record.of(self._path, device)
        self._record.begin(again=False, commit=commit)

    def missing(self) -> list[Job]:
        """Jobs for the examples that the record lacks; a few more, as a seed may give fewer than it is asked for."""
        chunks = -(-(self._examples - self._record.total) // self._size)
        chunks += chunks // 100
        seeds = [
            seed
            for seed in range(self._seed, self._seed + 2 * self._examples)
            if str(seed) not in self._record.examples
        ]
        return [fuzz.job(seed, self._size, self._device) for seed in seeds[: max(0, chunks)]]

    def add(self, done: Done) -> None:
        """Take an outcome into the record."""
        self._record.add(fuzz.outcome(done))
        self._record.save(self._path)

    def told(self) -> dict[str, Any]:
        """How many were tried, and the problems of what is wrong."""
        problems = [failure["problem"][:300] for failure in self._record.failures]
        return {"examples": self._record.total, "noise": len(self._record.noise), "wrong": problems}


class Models:
    """Models of other people in both modes: `models.jsonl`, as `python -m tests.sweep` writes it."""

    def __init__(self, out: Path, device: str, kernels: str, names: str) -> None:
        self.name = f"models-{device}"
        self._path = out / "models.jsonl"
        self._device, self._kernels, self._names = device, kernels, names

    def missing(self) -> list[Job]:
        """A job for each model and mode without an outcome."""
        there = {(outcome.package, outcome.name, outcome.mode) for outcome in self._outcomes()}
        sizes = dict(re.findall(r"^\| (\S+) \| yes \| \w+ \| (\d+) \|", _MODELS.read_text(), re.MULTILINE))
        each = 0.03 if self._device == "cuda" else 0.015  # seconds an operator
        return [
            sweep.job(
                Asked(package, entry.name, mode, self._device, self._kernels),
                3 + each * int(sizes.get(entry.name, 500)),
            )
            for package in packages.installed()
            for entry in packages.entries(package)
            for mode in ("eval", "train")
            if re.search(self._names, entry.name) and (package, entry.name, mode) not in there
        ]

    def add(self, done: Done) -> None:
        """Take an outcome into the record."""
        table.append(self._path, sweep.outcome(done))

    def told(self) -> dict[str, Any]:
        """How many models in both modes, the share of their operators that is fused, and what is wrong."""
        outcomes = self._outcomes()
        wrong = [f"{o.package} {o.name} {o.mode}: {o.verdict} {o.failed}"[:300] for o in outcomes if not o.ok]
        share = sum(o.fused for o in outcomes) / max(1, sum(o.ops for o in outcomes))
        return {"trials": len(outcomes), "fused": round(share, 3), "wrong": wrong}

    def _outcomes(self) -> list[table.Outcome]:
        found = table.read(self._path) if self._path.exists() else []
        return [outcome for outcome in found if outcome.device == where(self._device, self._kernels)]


class Operators:
    """PyTorch's samples: `operators.jsonl`, a line for each piece of the database."""

    def __init__(self, out: Path, device: str, kernels: str, pieces: int | None) -> None:
        self.name = f"operators-{device}-{kernels}"
        self._path = out / "operators.jsonl"
        self._device, self._kernels, self._pieces = device, kernels, pieces

    def missing(self) -> list[Job]:
        """The pieces without a line."""
        there = {line["piece"] for line in self._lines()}
        jobs = operators.jobs(self._device, self._kernels)[: self._pieces]
        return [job for job in jobs if job.arguments["piece"] not in there]

    def add(self, done: Done) -> None:
        """Take an outcome into the record."""
        line = done.outcome if not done.problem else {**done.job.arguments, "operators": [], "problem": done.problem}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def told(self) -> dict[str, Any]:
        """How many operators fuse, how many samples of them ran, what PyTorch left out, and what is wrong."""
        lines = self._lines()
        each = [operator for line in lines for operator in line["operators"]]
        return {
            "operators": len(each),
            "fused": sum(operator["samples"] > 0 for operator in each),
            "samples": sum(operator["samples"] for operator in each),
            "left out": sum(len(operator["left_out"]) for operator in each),
            "wrong": [text[:300] for operator in each for text in operator["wrong"]]
            + [line["problem"][-300:] for line in lines if "problem" in line],
        }

    def _lines(self) -> list[dict[str, Any]]:
        lines = map(json.loads, self._path.read_text().splitlines()) if self._path.exists() else []
        return [line for line in lines if (line["device"], line["kernels"]) == (self._device, self._kernels)]
