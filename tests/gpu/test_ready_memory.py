"""Results and workspaces that a region's launcher has ready, and launches as graphs, on a CUDA device: streams, captured streams, addresses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.runtime import fast_path

pytestmark = [pytest.mark.gpu, pytest.mark.models]


class LongRows(nn.Module):
    """Few long rows, which several kernels sum with a workspace between them; a small result."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x * x).mean(-1, keepdim=True)) + (x * 0.5).amax(-1, keepdim=True)


@pytest.fixture
def ready() -> Iterator[tuple[OptimizedModule, Tensor]]:
    """A model whose calls need no Python, and an input."""
    fast_path.wait()
    optimised = fusepass.optimize(LongRows(), tune="off")
    x = torch.randn(4, 1 << 20, device="cuda")
    with torch.no_grad():
        for _ in range(8):
            optimised(x)
        assert optimised._table.door((x,)) is not fast_path.MISSED
        yield optimised, x
    assert optimised.report().fallbacks == ()


def assert_held(held: list[tuple[Tensor, Tensor]]) -> None:
    """Each result is what the model gave for the input that belongs to it."""
    for result, x in held:
        torch.testing.assert_close(result, LongRows()(x), rtol=1e-5, atol=1e-6)


def test_results_that_are_held_stay_as_they_are(ready: tuple[OptimizedModule, Tensor]) -> None:
    optimised, x = ready
    inputs = [x * factor for factor in torch.linspace(0.1, 1.0, 12, device="cuda")]
    held = [(optimised(value), value) for value in inputs]
    assert len({result.data_ptr() for result, _ in held}) == len(held)
    assert_held(held)


def test_launches_in_flight_keep_their_pointers(ready: tuple[OptimizedModule, Tensor]) -> None:
    """More sets of pointers than there are graphs, all behind work that takes long."""
    optimised, x = ready
    inputs = [x * factor for factor in torch.linspace(0.1, 1.0, 40, device="cuda")]
    torch.cuda._sleep(50_000_000)
    held = [(optimised(value), value) for value in [*inputs, *reversed(inputs), *inputs[::3]]]
    assert_held(held)


def test_parameters_are_read_where_they_are() -> None:
    class Scaled(LongRows):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight

    fast_path.wait()
    model = Scaled().cuda()
    optimised = fusepass.optimize(model, tune="off")
    x = torch.randn(4, 1 << 20, device="cuda")
    kept = []
    with torch.no_grad():
        for iteration in range(40):
            if iteration % 2:
                kept.append(model.weight.data)
                model.weight.data = torch.rand(4, 1, device="cuda")
            if iteration % 7 == 6:
                model.weight = nn.Parameter(torch.rand(4, 1, device="cuda"))
            model.weight.mul_(1.5)
            torch.testing.assert_close(optimised(x), model(x), rtol=1e-5, atol=1e-6)


def test_streams_in_iteration_do_not_share_a_workspace(ready: tuple[OptimizedModule, Tensor]) -> None:
    optimised, x = ready
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    inputs = [x * factor for factor in torch.linspace(0.1, 1.0, 24, device="cuda")]
    side.wait_stream(main)
    held = []
    for iteration, value in enumerate(inputs):
        with torch.cuda.stream(side if iteration % 3 or iteration > 16 else main):
            if iteration == 6:
                torch.cuda._sleep(20_000_000)  # what this stream does comes much later than what the other does
            held.append((optimised(value), value))
    torch.cuda.synchronize()
    assert_held(held)


def test_a_captured_call_keeps_to_the_memory_of_its_graph(ready: tuple[OptimizedModule, Tensor]) -> None:
    optimised, x = ready
    place, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = optimised(place) * 2  # what the model gave is dropped: its memory must stay the graph's
    held = [(optimised(x), x) for _ in range(12)]
    for factor in (0.25, 0.5):
        place.copy_(x * factor)
        graph.replay()
        held.append((optimised(x), x))
        torch.cuda.synchronize()
        torch.testing.assert_close(result, LongRows()(place) * 2, rtol=1e-5, atol=1e-6)
    assert_held(held)
