"""Sizes that change: few libraries serve many lengths, batches and images, with eager's results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.codegen import build
from fusepass.codegen.source import Source
from fusepass.compile import pipeline
from fusepass.errors import BuildError, FusepassWarning
from fusepass.numerics import check
from fusepass.report.choice import Choice
from fusepass.report.report import RegionState

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
    seen, build_each = Builds(), build.build_each

    def counted(sources: Sequence[Source]) -> Iterator[tuple[int, Path | BuildError]]:
        seen.texts |= {source.text for source in sources}
        return build_each(sources)

    monkeypatch.setattr(build, "build_each", counted)
    return seen


def made(model: nn.Module, **options: object) -> OptimizedModule:
    """`model`, optimised; generated code is not measured, but used."""
    return fusepass.optimize(model.eval(), **{"tune": "off", **options})


def assert_follows(model: nn.Module, optimised: nn.Module, x: torch.Tensor) -> None:
    """The optimised model's result obeys the numeric policy, and is laid out as eager's."""
    with torch.no_grad():
        outcome = check.check(model, optimised, (x,))
        assert outcome.ok, f"{list(x.shape)}: {outcome.explain()}"
        assert optimised(x).stride() == model(x).stride()


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 1.5 + 0.25) * torch.sigmoid(x)


class Attention(nn.Module):
    """Scores of each position with each other: two axes that grow together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(1, 2) * 0.125 + 1.0, -1)


class Table(nn.Module):
    """Rows of a table at places that come from data; how many there are varies."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.table(x)) + 1.0


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

# How many libraries each of them may need for the lengths from 1 to 64: those of length 1 are simpler, one for the
# sizes that came first, some more where rows get longer.
LIBRARIES = {"chain": 3, "layer norm": 3, "softmax": 8, "attention": 6, "linear": 3, "mean": 8, "padding": 5}
LOOPED = ("chain", "layer norm", "softmax", "linear")
SAMPLE = (1, 2, 3, 4, 7, 16, 17, 31, 32, 33, 64)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(3)
def test_a_loop_over_lengths_needs_few_libraries(name: str, builds: Builds) -> None:
    model = MODELS[name]()
    optimised = made(model)
    for length in range(1, 65) if name in LOOPED else SAMPLE:
        x = torch.randn(2, length, 48)
        if length in SAMPLE:
            assert_follows(model, optimised, x)
        with torch.no_grad():
            torch.testing.assert_close(optimised(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(builds) <= LIBRARIES[name]
    assert not optimised.report().fallbacks


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_long_loop_over_lengths_needs_few_libraries(name: str, builds: Builds) -> None:
    model = MODELS[name]()
    optimised = made(model)
    for length in range(1, 513):
        assert_follows(model, optimised, torch.randn(2, length, 48))
    assert len(builds) <= LIBRARIES[name] + 6
    assert not optimised.report().fallbacks


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_of_many_sizes_and_batches(memory_format: torch.memory_format, builds: Builds) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Hardswish())
    optimised = made(model)
    images = [(1, 12, 12), (2, 12, 12), (2, 9, 14), (5, 20, 7), (3, 31, 33), (1, 8, 8), (4, 40, 40), (7, 5, 5)]
    for batch, height, width in images:
        x = torch.randn(batch, 3, height, width).contiguous(memory_format=memory_format)
        assert_follows(model, optimised, x)
    assert len(builds) <= 6
    assert not optimised.report().fallbacks


def test_pools_over_many_sizes(builds: Builds) -> None:
    model = nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Sigmoid())
    optimised = made(model)
    for batch, height, width in [(1, 12, 12), (2, 12, 12), (2, 9, 14), (5, 20, 7), (3, 31, 33), (4, 40, 41)]:
        assert_follows(model, optimised, torch.randn(batch, 3, height, width))
    assert len(builds) <= 6  # whether a window reaches over the end of an axis is decided by its parity


def test_an_earlier_size_comes_back(builds: Builds) -> None:
    model = Chain()
    optimised = made(model)
    sizes = [(3, 5), (4, 5), (6, 5)]
    for shape in sizes:
        assert_follows(model, optimised, torch.randn(shape))
    libraries, signatures = len(builds), len(optimised.report().regions)
    for shape in reversed(sizes):
        assert_follows(model, optimised, torch.randn(shape))
    assert (len(builds), len(optimised.report().regions)) == (libraries, signatures) == (2, 3)


def test_nothing_and_one(builds: Builds) -> None:
    model = norm()
    optimised = made(model)
    for shape in [(2, 3, 48), (0, 3, 48), (2, 0, 48), (1, 3, 48), (1, 1, 48), (48,), (4, 7, 48), (0, 0, 48)]:
        assert_follows(model, optimised, torch.randn(shape))
    assert not optimised.report().fallbacks
    assert len(builds) <= 6


def test_two_sizes_that_were_equal_part(builds: Builds) -> None:
    model = Attention()
    optimised = made(model)
    for batch, length in [(4, 4), (5, 5), (5, 6), (6, 5), (9, 7)]:
        assert_follows(model, optimised, torch.randn(batch, length, 16))
    assert len(builds) <= 4


def test_places_are_checked_against_the_size_at_hand() -> None:
    model = Table()
    optimised = made(model)
    with torch.no_grad():
        for count in (3, 5, 8):
            x = torch.randint(0, 11, (2, count))
            torch.testing.assert_close(optimised(x), model(x))
        with pytest.raises(IndexError):
            optimised(torch.full((2, 8), 11))


def test_memory_that_is_not_aligned() -> None:
    model = norm()
    optimised = made(model)
    for length in (3, 5, 6):
        memory = torch.randn(2 * length * 48 + 1)
        assert_follows(model, optimised, memory[1:].view(2, length, 48))


def test_the_report_says_what_serves_several_sizes() -> None:
    optimised = made(Chain())
    with torch.no_grad():
        optimised(torch.randn(3, 5))
        optimised(torch.randn(4, 7))
    first, second = optimised.report().regions
    assert first.sizes is None
    assert second.sizes is not None
    assert second.sizes.startswith("for several sizes: size_0 = 4, size_1 = 7, ")
    (source,) = second.sources
    assert "input x: f32 size_0xsize_1" in source.text
    assert "library for several sizes: size_0 = 4" in str(second)
    assert "input x: f32 3x5" in first.sources[0].text


def test_too_many_libraries_run_the_operators() -> None:
    model = nn.Softmax(1)
    optimised = made(nn.Sequential(model, nn.ReLU()), max_builds=2)
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for length in (2000, 2001, 2002, 7, 8):
            x = torch.randn(3, length)
            torch.testing.assert_close(optimised(x), model(x))
    told = [str(entry.message) for entry in seen if issubclass(entry.category, FusepassWarning)]
    assert len(told) == 1
    assert "more than 2 libraries for its sizes (option max_builds)" in told[0]
    states = [region.state for region in optimised.report().regions]
    assert states == [RegionState.FUSED] * 3 + [RegionState.FALLBACK] * 2


def test_what_was_measured_serves_sizes_of_about_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def choose(work: pipeline.Work, regions: dict[str, pipeline.FusedRegion]) -> None:
        (region,) = regions.values()
        if work.choice is None:
            measured.append(region.inputs[0].shape)
            work.choice = Choice()

    monkeypatch.setattr(pipeline, "choose", choose)
    optimised = made(Chain(), tune="fast")
    with torch.no_grad():
        for length in (20, 21, 22, 23, 80):
            optimised(torch.randn(length, 16))
    assert measured == [(20, 16), (21, 16), (80, 16)]
    assert all(region.choice is not None for region in optimised.report().regions)


def test_a_model_whose_state_changes_at_each_call_is_not_traced_for_ever() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * 2.0 + self.step

    model = Counting()
    optimised = made(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        for step in range(20):
            model.step = float(step)
            x = torch.randn(3)
            torch.testing.assert_close(optimised(x), torch.relu(x) * 2.0 + step)
    (fallback,) = optimised.report().fallbacks
    assert fallback.reason == "called with more than 16 signatures of the same shapes"
    assert fallback.count == 4


SHAPES = st.lists(st.tuples(*[st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17])] * 3), min_size=2, max_size=3, unique=True)


class Mixed(nn.Module):
    """Reductions along two axes, a broadcast and a transpose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.softmax(x * 0.5, 1).transpose(1, 2)
        return functional.gelu(rows - x.mean((1, 2), keepdim=True)) + torch.amax(x, 1).unsqueeze(2)


@settings(max_examples=6, deadline=None)
@given(SHAPES)
def test_any_two_or_three_shapes(shapes: list[Shape]) -> None:
    model = Mixed()
    optimised = made(model)
    for shape in shapes:
        assert_follows(model, optimised, torch.randn(shape))
    assert not optimised.report().fallbacks
