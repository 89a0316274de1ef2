"""The programs in examples/, as small as they go; and what the demo says of a model that is left to eager."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fusepass
from fusepass.autotune import tune
from fusepass.report.choice import EAGER, Choice
from tests.support.layout import ROOT


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They find each other as programs do, beside themselves."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("FUSEPASS_TUNE", "off")
    yield
    for name in {*sys.modules} - before:
        if "." not in name and (ROOT / "examples" / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.models
@pytest.mark.parametrize("name", ["resnet", "vit", "unet"])
def test_an_example_is_right_and_fuses_most_of_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(name).main("cpu", small=True)
    first, verdict, speed = capsys.readouterr().out.splitlines()
    fused, total = counts(first)
    assert fused > total / 2
    assert "ok: " in verdict
    assert "times as fast" in speed


def counts(line: str) -> tuple[int, int]:
    """Operators fused, and all, of "... on cpu: 3 of 4 operators fused in ..."."""
    words = line.partition(": ")[2].split()
    return int(words[0]), int(words[2])


@pytest.mark.models
def test_a_small_gpt2_learns_as_in_eager_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module("gpt2_training").main("cpu", small=True)
    assert capsys.readouterr().out.count("compilers included") == 2


def test_the_demo_shows_no_speed_of_what_is_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    demo: Any = importlib.import_module("demo")
    monkeypatch.setattr(demo, "medians", lambda *_: pytest.fail("there is nothing to measure"))
    monkeypatch.setattr(tune, "_measured", lambda *_: Choice(EAGER, ((EAGER, 1.0), ("generated", 50.0)), 0.02))
    model, x = nn.Sequential(nn.GELU(), nn.Softmax(1)), torch.rand(3, 5)
    with torch.no_grad():
        fused = fusepass.optimize(model, x, tune="fast")
        assert [region.state.value for region in fused.report().regions] == ["eager"]
        assert demo.speed(fused, model, (x,), "cpu") == "no generated kernel runs it, so there is no speed-up to show"
