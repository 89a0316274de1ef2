"""In-place operators, views, ``out=``, shared parameters and random numbers: values, memory and generator as in eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusepass
from fusepass.config import override
from fusepass.numerics.check import check
from tests.support.interpreted import interpreted

pytestmark = pytest.mark.models

Case = Callable[..., Any]


class Model(nn.Module):
    """What cases work on; `second` shares the weight of `first`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm, self.drop, self.cell = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.GRUCell(4, 4)
        self.register_buffer("state", torch.randn(4, 4))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, *args: Any) -> Any:
        return self.case(self, *args)


def in_place_chain(m: Any, x: Tensor) -> Any:
    y = x * 2
    y.add_(1).relu_()
    y[0] = 3
    y[:, 1] *= 2
    return y.sigmoid()


def input_written(m: Any, x: Tensor) -> Any:
    x.mul_(2)
    return x, x.view(-1), (x + 1).relu()


def part_of_input_written(m: Any, x: Tensor) -> Any:
    x[0].add_(5)
    return x.tanh() + 1


def inputs_and_parameters_returned(m: Any, x: Tensor) -> Any:
    return x.view(2, 8), x.t(), m.weight.t(), m.weight, x, (m.weight + x).relu()


def shared_parameters(m: Any, x: Tensor) -> Any:
    return F.gelu(m.second(m.first(x).relu()))


def buffers_written(m: Any, x: Tensor) -> Any:
    m.state.mul_(0.9).add_(x * 0.1)
    m.count += 1
    return (x - m.state).relu() / m.count


def part_of_buffer_written(m: Any, x: Tensor) -> Any:
    m.state.copy_(torch.roll(m.state, 1, 0))
    m.state[:2] = x[:2]
    return (m.state + x).relu()


def out_argument(m: Any, x: Tensor) -> Any:
    made = torch.zeros(4, 8, dtype=x.dtype)
    torch.mul(x, 2, out=made[:, :4])
    made[:, 4:] = x
    return made.relu() + 1


def loop_of_cells(m: Any, x: Tensor) -> Any:
    h, steps = torch.zeros_like(x), []
    for _ in range(3):
        h = m.cell(x, h)
        steps.append(h)
    return torch.stack(steps), h


def views_see_later_writes(m: Any, x: Tensor) -> Any:
    y = x * 2
    seen = y.view(-1)
    y += 1
    return seen.relu() + 1, y


def parts_written(m: Any, x: Tensor) -> Any:
    y = x * 1.5
    a, b = y.chunk(2, 1)
    a.add_(1)
    b.mul_(b)
    return y.tanh(), a


def transposed_in_place(m: Any, x: Tensor) -> Any:
    y = x[0].expand(4, 4).clone()
    y += x
    y.t_()
    return y.relu(), y.t().sigmoid()


def masks_and_scatter(m: Any, x: Tensor) -> Any:
    y = x.clone()
    y.masked_fill_(~torch.ones(4, 4, dtype=torch.bool).tril(), -1e9)
    z = torch.zeros_like(x).scatter_(1, torch.zeros(4, 1, dtype=torch.long), 1.0)
    z[torch.tensor([0, 2])] = 0.5
    z.fill_diagonal_(0)
    return y.softmax(-1), (x + z).relu()


def results_converted_in_place(m: Any, x: Tensor) -> Any:
    y = (x > 0).long()
    y += 2
    y *= y
    return y, (y.to(x.dtype) / 3).relu()


def detached_and_written(m: Any, x: Tensor) -> Any:
    y = x.detach()
    y += 1
    return (x * 2).relu()


def one_result_thrice(m: Any, x: Tensor) -> Any:
    y = (x + 1).relu()
    return {"y": y, "more": [y, (y.view(-1),)]}


def norm_used_twice(m: Any, x: Tensor) -> Any:
    return m.norm(m.norm(x)).relu()


def dropouts(m: Any, x: Tensor) -> Any:
    y = m.drop(F.relu(m.drop(x) + 1)) * 2
    return F.dropout(y * 1.0, 0.3, True, inplace=True).relu() + F.dropout(x, 0.3, True)


def other_random_numbers(m: Any, x: Tensor) -> Any:
    y = F.alpha_dropout(x, 0.3, True).relu() + F.feature_alpha_dropout(x.view(1, 4, 4), 0.4, True).view(4, 4)
    return y + torch.bernoulli(torch.full_like(x, 0.5)) * F.rrelu(x, training=True)


CASES: tuple[Case, ...] = (
    in_place_chain, input_written, part_of_input_written, inputs_and_parameters_returned, shared_parameters,
    buffers_written, part_of_buffer_written, out_argument, loop_of_cells, views_see_later_writes, parts_written,
    transposed_in_place, masks_and_scatter, results_converted_in_place, detached_and_written, one_result_thrice,
    norm_used_twice, dropouts, other_random_numbers,
)  # fmt: skip


def same_tensor_twice(m: Any, x: Tensor, y: Tensor) -> Any:
    return (x + y).relu() * y


def same_tensor_twice_and_written(m: Any, x: Tensor, y: Tensor) -> Any:
    x.add_(1)
    return (x * y).relu()


def compared(case: Case, inputs: tuple[Tensor, ...], training: bool) -> None:
    """Both calls of an optimised model, and after them memory, objects and generator."""
    model = Model(case).train(training)
    with override(debug=True), warnings.catch_warnings(), interpreted():
        warnings.simplefilter("ignore")
        fused = fusepass.optimize(model)
        for call in ("first", "second"):
            outcome = check(model, fused, inputs)
            assert outcome.ok, f"{call} call: {outcome.explain()}"
        twin = copy.deepcopy(model)
        assert sharing(fused, model, copy.deepcopy(inputs)) == sharing(twin, twin, copy.deepcopy(inputs))


def sharing(call: nn.Module, owner: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Which results share memory with, or are, which inputs, states and other results; and the generator's state."""
    with torch.no_grad():
        torch.manual_seed(3)
        results = [leaf for leaf in pytree.tree_leaves(call(*inputs)) if isinstance(leaf, Tensor)]
        generator = torch.get_rng_state().tolist()
    others = [*inputs, *owner.parameters(), *owner.buffers(), *results]
    memory = [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in others] for a in results]
    return memory, [[a is b for b in others] for a in results], generator


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.thinned(3)
def test_as_in_eager(case: Case, training: bool) -> None:
    compared(case, (torch.randn(4, 4),), training)


@pytest.mark.parametrize("same", [False, True], ids=["two tensors", "one tensor"])
@pytest.mark.parametrize("case", [same_tensor_twice, same_tensor_twice_and_written], ids=lambda case: case.__name__)
def test_a_tensor_that_is_given_twice(case: Case, same: bool) -> None:
    x = torch.randn(4, 4)
    compared(case, (x, x if same else torch.randn(4, 4)), False)
