"""Sizes that change: few libraries serve many lengths, batches and images, with eager's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional

import fusepass
from fusepass import numerics
from fusepass.codegen import build
from fusepass.codegen.source import Source

Shape = tuple[int, ...]


class Builds:
    """The libraries that were asked for, told apart by their text."""

    def __init__(self) -> None:
        self.texts: set[str] = set()

    def __len__(self) -> int:
        return len(self.texts)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Builds]:
    """Counts the libraries of the models that a test optimises."""
    seen, build_all = Builds(), build.build_all

    def counted(sources: Sequence[Source]) -> object:
        seen.texts |= {source.text for source in sources}
        return build_all(sources)

    monkeypatch.setattr(build, "build_all", counted)
    return seen


def assert_follows(model: nn.Module, optimised: nn.Module, x: torch.Tensor) -> None:
    """The optimised model's result obeys the numeric policy."""
    with torch.no_grad():
        result = numerics.check(model, optimised, (x,))
    assert result.ok, f"{list(x.shape)}: {result}"


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 1.5 + 0.25) * torch.sigmoid(x)


class Attention(nn.Module):
    """Scores of each position with each other: two axes that grow together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(1, 2) * 0.125 + 1.0, -1)


class Scaled(nn.Module):
    """The mean over the varying axis divides by its length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x - x.mean(1, keepdim=True)) * 2.0


class Padded(nn.Module):
    """Masks whose bounds are sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([functional.pad(torch.sin(x), (0, 0, 1, 2)), x * 2.0], 1)


def norm() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(48), nn.GELU())


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(48, 32), nn.GELU())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": Chain,
    "layer norm": norm,
    "softmax": lambda: nn.Sequential(nn.Softmax(1), nn.Hardtanh()),
    "attention": Attention,
    "linear": linear,
    "mean": Scaled,
    "padding": Padded,
}
"""Models of inputs of shape (batch, length, 48)."""

LIBRARIES = {"chain": 3, "layer norm": 3, "softmax": 8, "attention": 6, "linear": 3, "mean": 8, "padding": 5}
"""How many each of them may need for the lengths from 1 to 64."""


def made(model: nn.Module, **options: object) -> nn.Module:
    """`model`, optimised; all generated code is used."""
    return fusepass.optimize(model.eval(), tune="off", **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_loop_over_lengths_needs_few_libraries(name: str, builds: Builds) -> None:
    model = MODELS[name]()
    optimised = made(model)
    for length in range(1, 65):
        assert_follows(model, optimised, torch.randn(2, length, 48))
    assert len(builds) <= LIBRARIES[name], f"{len(builds)} libraries"
    assert not optimised.report().fallbacks
