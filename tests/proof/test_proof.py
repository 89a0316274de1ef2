"""A small proof: its records, what is told of them, and how it goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.farm.pool import Done, Job, Pool
from tests.fuzz.tried import tried
from tests.proof.__main__ import main
from tests.proof.parts import Models, Operators
from tests.sweep.processes import Asked, job


def test_a_proof_tells_what_was_tried_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(pool: Pool, jobs: list[Job]) -> Iterator[Done]:
        return (Done(each, tried(**each.arguments, left=tmp_path / "left"), seconds=1.0) for each in jobs)

    monkeypatch.setattr(Pool, "each", here)
    command = [
        "proof",
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--only",
        "fuzz-cpu",
        "--size",
        "2",
        "--commit",
        "abc",
    ]
    for examples in (2, 4):
        monkeypatch.setattr(sys, "argv", [*command, "--examples", str(examples)])
        assert main() == 0
        told = json.loads((tmp_path / "proof.json").read_text())
        assert (told["commit"], told["not done"]) == ("abc", [])
        assert told["parts"]["fuzz-cpu"]["examples"] == examples
        assert told["parts"]["fuzz-cpu"]["wrong"] == []


def test_a_process_that_died_is_a_problem_of_the_operators(tmp_path: Path) -> None:
    part = Operators(tmp_path, "cpu", "compiled", 2)
    first, second = part.missing()
    part.add(Done(first, problem="its process ended with -11"))
    found = {"operator": "add", "samples": 3, "wrong": ["add float32 #0: off"], "left_out": []}
    part.add(Done(second, {**second.arguments, "operators": [found]}))
    assert not part.missing()
    assert part.told()["samples"] == 3
    assert part.told()["wrong"] == ["add float32 #0: off", "its process ended with -11"]


def test_a_process_that_died_is_a_model_that_is_wrong(tmp_path: Path) -> None:
    part = Models(tmp_path, "cpu", "compiled", "^none of them$")
    assert part.missing() == []
    assert part.told() == {"trials": 0, "fused": 0.0, "wrong": []}
    asked = Asked("torchvision", "resnet18", "eval", "cpu", "compiled")
    part.add(Done(job(asked), problem="its process ended with -9"))
    assert part.told()["wrong"] == ["torchvision resnet18 eval: its process ended with -9 ()"]
