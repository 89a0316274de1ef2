"""Graphs whose sizes or numbers depend on data, dynamic ones with BatchNorm, and statistics that are the caller's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.compile.pipeline import CompiledGraph
from fusepass.training.backend import Backend

x, count, times = torch.linspace(-2, 3, 30).view(5, 6), torch.tensor(3), torch.tensor([1, 2, 0, 3, 1])
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "nonzero": (lambda x: x.relu().nonzero().float() * 2 + x.sum(), (x,)),
    "a mask": (lambda x: (x * 2 + 1)[x > 0] * 3 + 1, (x,)),
    "unique": (lambda x: torch.unique((x.detach() * 2).round()) * 2 + 1 + x.sum(), (x,)),
    "repeated": (lambda x, times: torch.repeat_interleave(x.tanh() * 2, times, dim=0).exp() + 1, (x, times)),
    "a size": (lambda x, count: torch.full((count.item(),), 2.0) * x.sum() + 1, (x, count)),
    "a number": (lambda x, count: x * count.item() + 1, (x, count)),
    "a slice": (lambda x, count: (x.exp() * 2)[: count.item()] + 1, (x, count)),
    "between": (lambda x: (x.relu() * 3 + 1)[(x * 2).sum(1) > 0].sum(0).exp() * 2 - x.sigmoid().sum(0), (x,)),
}


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    """Let Dynamo keep what depends on data in its graphs."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


FUSED = {
    "a mask": ["mul_add_gt"],
    "unique": ["mul_round_sum"],
    "repeated": ["tanh_mul"],
    "a slice": ["exp_mul"],
    "between": ["relu_mul_add_sum_mul_gt", "exp_mul_sigmoid_sum_sub"],
}
"""The parts whose sizes are constant."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.invariant(47)
def test_sizes_that_depend_on_data_serve_with_gradients(name: str) -> None:
    function, inputs = CASES[name]
    made: list[CompiledGraph] = []
    compiled = torch.compile(function, backend=Backend("graph", {"tune": "off"}, observe=made.append))
    found = []
    for run in (compiled, function):
        first = inputs[0].clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            result = run(first, *inputs[1:])
        result.sum().backward()
        found.append((result, first.grad))
    torch.testing.assert_close(*found)
    assert [work.region.name for graph in made for work in graph.works] == FUSED.get(name, [])


def test_the_warning_says_where_and_which_operator() -> None:
    def masked(x: Tensor) -> Tensor:
        return x[x > 0] * 3

    place = r"graph of masked \(test_data_dependent\.py:\d+\) runs as the original operators: what aten\.index\.Tensor gives"
    with pytest.warns(fusepass.FusepassWarning, match=place):
        torch.testing.assert_close(torch.compile(masked, backend="fusepass")(x), masked(x))


def test_batch_norm_in_training_fuses_with_dynamic_sizes() -> None:
    """Its momentum is a number of Python's, which Dynamo makes dynamic until AOTAutograd asks for it to be none."""
    made: list[CompiledGraph] = []
    model = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU())
    twin = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU())
    compiled = torch.compile(model, backend=Backend("graph", {"tune": "off"}, observe=made.append), dynamic=True)
    for rows in (4, 7):
        given = torch.randn(rows, 6)
        torch.testing.assert_close(compiled(given), twin(given))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert any(work.state.name == "FUSED" for graph in made for work in graph.works)


class Statistics(nn.Module):
    """Batch norm whose running statistics are inputs."""

    def forward(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True) * 2


@pytest.mark.invariant(47)
def test_statistics_that_are_inputs_move_once() -> None:
    given, expected = (torch.zeros(6), torch.ones(6)), (torch.zeros(6), torch.ones(6))
    compiled = fusepass.optimize(Statistics(), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, *given), Statistics()(x, *expected))
    torch.testing.assert_close(given, expected)
