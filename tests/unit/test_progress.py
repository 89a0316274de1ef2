"""How far a compilation is: on a terminal where it takes long, and nowhere else."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

import fusepass
from fusepass import progress
from fusepass.config import override
from fusepass.progress import Progress, Step, followed, shown, tell


class Terminal(io.StringIO):
    """Stands for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "wanted", "is_shown"),
    [
        (Terminal, None, True),
        (Terminal, False, False),
        (io.StringIO, None, False),
        (io.StringIO, True, True),
    ],
)
def test_a_long_compilation_is_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], wanted: bool | None, is_shown: bool
) -> None:
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "_SHOWN_AFTER", 0.05)
    with override(progress=wanted), shown("Net"):
        tell("tune", 2, 7, "add_relu")
        time.sleep(0.3)
    text = written.getvalue()
    assert ("fusepass: Net: tune 2 of 7 done, now add_relu ... 0." in text) == is_shown
    assert text.endswith("\r\033[K") == is_shown


def test_a_short_compilation_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Terminal()
    monkeypatch.setattr(sys, "stderr", written)
    with shown("Net"):
        tell("build", 0, 3)
    assert written.getvalue() == ""


def test_who_follows_a_compilation_is_told_of_what_happens_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line at a time: the builds of a model that is compiled show none of their own."""
    written, told = Terminal(), Progress("Net")
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "_SHOWN_AFTER", 0.0)
    with followed(told), shown("3 libraries"):
        tell("build", 1, 3, "add_relu")
        time.sleep(0.2)
    assert (written.getvalue(), str(told)) == ("", "Net: build 1 of 3 done, now add_relu")
    tell("build", 2, 3)
    assert told.step == Step("build", 1, 3, "add_relu")


@pytest.mark.parametrize("gradients", [False, True])
def test_stages_of_a_model_and_of_its_training_graphs_are_told(
    gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, Step]] = []

    class Noted(Progress):
        def at(self, step: Step) -> None:
            told.append((self.name, step))
            super().at(step)

    monkeypatch.setattr(progress, "Progress", Noted)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Softmax(1))
    optimised = fusepass.optimize(model, progress=True, tune="fast")
    with torch.set_grad_enabled(gradients):
        result = optimised(torch.randn(4, 8))
        if gradients:
            result.square().sum().backward()
    stages: dict[str, Any] = {}
    for name, step in told:
        stages.setdefault(name, []).append(step.stage)
    assert list(stages) == (["Sequential", "Sequential (backward)"] if gradients else ["Sequential"])
    for each in stages.values():
        assert [stage for stage in dict.fromkeys(each) if stage != "build"] == [
            "simplify", "layout", "partition", "generate", "tune",
        ]  # fmt: skip
