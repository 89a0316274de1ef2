"""What was tried and found, as a JSON file that a later run goes on from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Record:
    """What is known of some seeds.

    Attributes:
        device: "cpu" or "cuda", and which.
        versions: of torch and Python.
        commits: what was tried, in the order of the runs.
        examples: how many different models each seed gave, by seed; those that were tried.
        failures: seed, problem, and the smallest program that shows it.
        noise: results beyond the numeric policy that are nothing but rounding errors (`tests.fuzz.noise`), or what
            documents name (`tests.fuzz.places`, `tests.fuzz.limits`).
        seconds: of all processes together.
        phases: where they went.
        mode: what was run of each model.
    """

    device: str
    versions: dict[str, str]
    commits: list[str] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    noise: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    mode: str = "forward"

    @property
    def total(self) -> int:
        return sum(self.examples.values())

    def add(self, outcome: dict[str, Any]) -> None:
        """Take in what a chunk gave."""
        self.examples[str(outcome["seed"])] = outcome["examples"]
        self.failures += outcome["failures"]
        self.noise += outcome["noise"]
        self.seconds = round(self.seconds + outcome["seconds"], 1)
        for name, spent in outcome["phases"].items():
            self.phases[name] = round(self.phases.get(name, 0.0) + spent, 1)

    def save(self, path: Path) -> None:
        """All or nothing, so that a run that is cut short leaves what it had."""
        aside = path.with_suffix(".part")
        told = {"total": self.total, "wrong": len(self.failures), **asdict(self)}
        aside.write_text(json.dumps(told, indent=1) + "\n")
        os.replace(aside, path)

    def begin(self, *, again: bool, commit: str = "") -> None:
        """Before a run: notes the commit; with `again` the seeds that failed are to be tried once more."""
        commit = commit or described_commit()
        if commit not in self.commits:
            self.commits.append(commit)
        if again:
            for failure in self.failures:
                self.examples.pop(str(failure["seed"]), None)
            self.failures = []
            self.noise = [each for each in self.noise if str(each["seed"]) in self.examples]

    @classmethod
    def of(cls, path: Path, device: str) -> Record:
        """What `path` says, or an empty record.

        Raises:
            ValueError: it is about another kind of device.
        """
        if not path.exists():
            return cls(_described(device), versions())
        told = json.loads(path.read_text())
        if not told["device"].startswith(device):
            raise ValueError(f"{path} is about {told['device']}")
        return cls(**{name: told[name] for name in cls.__dataclass_fields__ if name in told})


def described_commit() -> str:
    """What the files here are, as git says it."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _described(device: str) -> str:
    return f"cuda, {torch.cuda.get_device_name()}" if device == "cuda" else f"cpu, {platform.machine()}"


def versions() -> dict[str, str]:
    """Of torch and Python."""
    return {"torch": torch.__version__, "python": platform.python_version()}
