"""Assignments through a mask of what is learned: one graph, with eager's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusepass.compile.pipeline import CompiledGraph
from fusepass.training.backend import Backend
from tests.support.interpreted import original_operators

X = torch.linspace(-3, 3, 4 * 3 * 5).view(4, 3, 5).sin()


class Assigning(nn.Module):
    def __init__(self, mask: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(5, 5), mask
        self.token = nn.Parameter(torch.linspace(1, 2, max(1, torch.Size(shape).numel())).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        first = y[:2]
        y[self.mask] = self.token.exp()
        return torch.tanh(y) * first.sum()


def graphs(model: nn.Module) -> int:
    """How many graphs a step of `model` is, whose results and gradients are eager's."""
    torch._dynamo.reset()
    made: list[CompiledGraph] = []
    steps = []
    with original_operators():
        for call in (model, torch.compile(model, backend=Backend("step", {"tune": "off"}, observe=made.append))):
            model.zero_grad()
            result = call(X)
            result.square().sum().backward()
            steps.append([result.detach(), *(each.grad for each in model.parameters())])
    torch.testing.assert_close(steps[1], steps[0])
    return len(made)


ROWS, ELEMENTS, NOWHERE = X[..., 0] > 0, X > 0.5, torch.zeros(4, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (ROWS, (5,)),
        (ROWS, (1, 5)),
        (ROWS, (1,)),
        (ROWS, ()),
        (ROWS[:, 0], (3, 5)),
        (ROWS[:, 0], (1, 5)),
        (ELEMENTS, (1,)),
        (ELEMENTS, ()),
        (NOWHERE, (5,)),
    ],
)
def test_what_all_places_get_is_chosen_in_one_graph(mask: Tensor, shape: tuple[int, ...]) -> None:
    assert graphs(Assigning(mask, shape)) == 2


@pytest.mark.filterwarnings("ignore:Error detected")
def test_what_each_place_gets_of_its_own_ends_the_graph() -> None:
    assert graphs(Assigning(ROWS, (int(ROWS.sum()), 5))) != 2
