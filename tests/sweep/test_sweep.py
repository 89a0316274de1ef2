"""A few models of each package, and the page that a sweep writes; `python -m tests.sweep` runs the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from tests.sweep import packages, steps, table, training
from tests.sweep.__main__ import main
from tests.sweep.entry import Entry, images
from tests.sweep.processes import Asked, outcomes
from tests.sweep.trial import Outcome, run

SAMPLE = {
    "torchvision": ("resnet18", "squeezenet1_1", "lraspp_mobilenet_v3_large"),
    "timm": ("coat_tiny", "test_vit", "test_convnext"),
    "transformers": ("bert", "llama-cache", "t5", "vit", "mamba"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(("package", "name"), [(package, name) for package in SAMPLE for name in SAMPLE[package]])
def test_models_of_other_people(package: str, name: str, mode: str) -> None:
    if package not in packages.installed():  # importing it comes after declaring operators
        pytest.skip(f"{package} is not installed")
    (entry,) = (entry for entry in packages.entries(package) if entry.name == name)
    outcome = run(entry, training=mode == "train")
    assert outcome.ok, f"{outcome.verdict} {outcome.detail} {outcome.failed}"
    assert outcome.fused > 0


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("package", "name"), [("timm", "test_vit"), ("transformers", "bert"), ("transformers", "mamba")]
)
def test_steps_of_models_of_other_people(package: str, name: str) -> None:
    if package not in packages.installed():
        pytest.skip(f"{package} is not installed")
    ((_, outcome),) = outcomes([Asked(package, name, steps.MODE, "cpu", "interpreted")], workers=1, minutes=10)
    assert outcome.ok, f"{outcome.verdict} {outcome.detail} {outcome.failed}"


@pytest.mark.sweep
def test_several_processes_and_compiled_kernels() -> None:
    if "timm" not in packages.installed():
        pytest.skip("timm is not installed")
    asked = [Asked("timm", "test_vit", mode, "cpu", "compiled") for mode in ("eval", "train")]
    found = dict(outcomes(asked, workers=2, minutes=10))
    assert set(found) == set(asked)
    assert all(outcome.ok and outcome.fused for outcome in found.values())


class Noisy(nn.Module):
    """Draws random numbers and counts calls in a buffer."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return torch.dropout(x * self.scale, 0.5, True).relu() + 1


def entry(make: type[nn.Module] = Noisy) -> Entry:
    return Entry("own", make.__name__, make, lambda: images(4))


@pytest.mark.parametrize("kernels", ["interpreted", "compiled"])
def test_an_outcome_tells_what_was_fused(kernels: str) -> None:
    outcome = run(entry(), training=True, kernels=kernels)
    assert (outcome.verdict, outcome.route, outcome.mode) == ("ok", "traced", "train")
    assert 0 < outcome.share < 1
    assert dict(outcome.refused)["draws random numbers"] == 1


def test_an_exception_is_an_outcome() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no such thing")

    outcome = run(entry(Broken), training=False)
    assert outcome.verdict == "raises ValueError: no such thing"
    assert "Traceback" in outcome.detail


class Greedy(Noisy):
    """Draws one number more."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        torch.rand(1)
        return result


@pytest.mark.parametrize(
    ("other", "verdict"), [(Noisy(1.001), "wrong in the first call"), (Greedy(), "the random generator is elsewhere")]
)
def test_a_difference_is_an_outcome(monkeypatch: pytest.MonkeyPatch, other: nn.Module, verdict: str) -> None:
    optimize = fusepass.optimize

    def another(model: nn.Module) -> nn.Module:
        other._buffers = model._buffers
        return optimize(other)

    monkeypatch.setattr("tests.sweep.trial.fusepass.optimize", another)
    assert run(entry(), training=False).verdict.startswith(verdict)


class Trained(nn.Module):
    """Two layers with a bend between them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Conv2d(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.layers(x)
        return value


def test_a_step() -> None:
    outcome = steps.run(entry(Trained))
    assert (outcome.verdict, outcome.mode) == ("ok", steps.MODE)
    assert outcome.ok
    assert 0 < outcome.fused < outcome.ops


@pytest.mark.parametrize("mode", training.MODES)
def test_three_steps(mode: str) -> None:
    outcome = training.run(entry(Trained), mode)
    assert (outcome.verdict, outcome.mode, outcome.failed) == ("ok", mode, ())
    assert 0 < outcome.fused < outcome.ops


class Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda result: Multiplied.apply(result, 1.01), "wrong: step 0: gradient of layers.0.weight"),
        (lambda result: result * 1.01, "wrong: step 0: result 0"),
        (lambda result: result + 0 * torch.rand(()), "step 0: the random generator is elsewhere"),
        (lambda result: [result], "step 0: the result is list"),
    ],
)
def test_a_difference_in_training_is_an_outcome(
    change: Callable[[Tensor], object], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def optimize(model: nn.Module) -> Any:
        optimized = fusepass.optimize(model)
        return (lambda x: change(optimized(x))), lambda: ([optimized.report()], ())

    monkeypatch.setattr(training, "_optimized", optimize)
    assert verdict in training.run(entry(Trained), "optimize").verdict


def test_a_wrong_gradient_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    aten = torch.ops.aten
    monkeypatch.setattr(
        steps, "BENDS", {aten.threshold_backward.default: lambda gradient, x, bend: gradient * (x > 1e-4)}
    )
    assert steps.run(entry(Trained)).ok
    monkeypatch.setattr(
        steps, "BENDS", {aten.threshold_backward.default: lambda gradient, x, bend: gradient * (x > 1e-1)}
    )
    assert steps.run(entry(Trained)).verdict.startswith("gradients are wrong: layers.0.weight")


def test_outcomes_are_kept_and_become_a_page(tmp_path: Path) -> None:
    kept, page = tmp_path / "outcomes.jsonl", tmp_path / "models.md"
    first = Outcome("numpy", "a", "eval", "cpu", "ok", route="traced", ops=10, fused=5, refused=(("too | odd", 5),))
    wrong = Outcome("numpy", "b", "eval", "cpu", "ok", ops=10, fused=10, failed=("region: no code",))
    for outcome in (wrong, first, first):
        table.append(kept, outcome)
    assert table.read(kept) == [first, wrong]
    assert main(["--page-only", "--outcomes", str(kept), "--page", str(page)]) == 0
    text = page.read_text()
    assert "| numpy | cpu | 2 | 1 | 20 | 75% | - |" in text
    assert "| b | eval | region: no code |" in text
    assert "| 5 | too \\| odd |" in text
    assert f"torch {torch.__version__}" in text
