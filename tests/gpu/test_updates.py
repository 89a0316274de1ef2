"""Statistics that a region writes itself: in a loop, on streams, in graphs of the caller's and in our own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.api.module import OptimizedModule
from tests.support.precision import exact_products

pytestmark = [pytest.mark.gpu, pytest.mark.models]


@pytest.fixture(autouse=True)
def _surroundings() -> Iterator[None]:
    with exact_products(), torch.no_grad():
        yield


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small": (lambda: nn.BatchNorm2d(64), (32, 64, 28, 28)),
    "tiny": (lambda: nn.BatchNorm1d(5), (7, 5)),
    "one channel": (lambda: nn.BatchNorm1d(1), (300, 1, 11)),
    "in teams": (lambda: nn.BatchNorm2d(67), (65, 67, 113, 111)),
    "in strips": (lambda: nn.BatchNorm1d(8192), (16_384, 8192)),
    "in pieces": (lambda: nn.BatchNorm2d(3), (64, 3, 224, 224)),
    "behind a convolution": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()), (8, 3, 66, 65)),
    "behind a transposed one": (
        lambda: nn.Sequential(nn.ConvTranspose3d(16, 32, 3, 2, 1), nn.BatchNorm3d(32), nn.Tanh()), (4, 16, 8, 16, 16)
    ),
    "behind a product": (
        lambda: nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.ReLU()), (4096, 512)
    ),
    "instances": (lambda: nn.InstanceNorm2d(16, track_running_stats=True), (8, 16, 40, 40)),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, nn.Module, OptimizedModule]:
    """A model, its twin, and the twin optimised."""
    torch.manual_seed(0)
    model = MODELS[name][0]().cuda().train()
    twin = copy.deepcopy(model)
    return model, twin, fusepass.optimize(twin)


def inputs(name: str, count: int) -> list[Tensor]:
    return [torch.randn(MODELS[name][1], device="cuda") * 0.5 + number for number in range(count)]


def assert_same_state(model: nn.Module, twin: nn.Module) -> None:
    for mine, eager in zip(twin.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_each_call_writes_once(name: str) -> None:
    model, twin, optimised = made(name)
    stream = torch.cuda.Stream()
    for number, x in enumerate(inputs(name, 8)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream if number % 4 == 3 else torch.cuda.current_stream()):
            torch.testing.assert_close(optimised(x), model(x), rtol=1e-3, atol=1e-3)
        torch.cuda.current_stream().wait_stream(stream)
        assert_same_state(model, twin)
    (region,) = optimised.report().regions
    assert region.written or region.state.value == "eager"
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["small", "in teams"])
def test_graphs_write_at_each_replay(name: str) -> None:
    model, twin, optimised = made(name)
    x, *others = inputs(name, 5)
    for _ in range(3):
        optimised(x), model(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = optimised(x)
    for other in others:
        x.copy_(other)
        graph.replay()
        torch.testing.assert_close(result, model(x), rtol=1e-3, atol=1e-3)
        assert_same_state(model, twin)


def test_our_own_graphs_write_at_each_replay() -> None:
    model, twin, _ = made("small")
    optimised = fusepass.optimize(twin, cuda_graphs=True)
    for x in inputs("small", 6):
        torch.testing.assert_close(optimised(x), model(x), rtol=1e-3, atol=1e-3)
        assert_same_state(model, twin)
    assert optimised.report().cuda_graphs == ("replayed, 1 captured",)
