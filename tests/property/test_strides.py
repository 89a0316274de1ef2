"""Results have eager's strides, whatever the order of the input's dimensions, sizes 1 and 0 included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fusepass
from fusepass.capture import trace
from fusepass.config import Algebra, override
from tests.support.interpreted import original_operators

pytestmark = pytest.mark.models

Made = Callable[[Tensor, Tensor], Tensor]

ANY_RANK: dict[str, Made] = {
    "roll": lambda x, y: x.roll((1, 1), (0, -1)),
    "flip": lambda x, y: x.flip(-1),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "stack": lambda x, y: torch.stack([x, x], 1),
    "repeat": lambda x, y: x.repeat_interleave(2, 1),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 1.0),
    "index": lambda x, y: x[:, torch.tensor([0, 0])],
    "index_last": lambda x, y: x[..., torch.tensor([0])],
    "index_select": lambda x, y: x.index_select(1, torch.tensor([0, 0])),
    "gather": lambda x, y: x.gather(1, torch.zeros_like(x, dtype=torch.long)),
    "triangle": lambda x, y: x.tril(),
    "add": lambda x, y: x + y,
    "cast": lambda x, y: x.double(),
    "like": lambda x, y: torch.full_like(x, 2.0) + x,
    "clone": lambda x, y: x.clone(),
    "transposed": lambda x, y: x.transpose(0, 1) * 2,
    "split": lambda x, y: x.unflatten(0, (1, -1)) * 2,
    "softmax": lambda x, y: x.softmax(1),
    "layer_norm": lambda x, y: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x, y: F.group_norm(x, 1),
    "sum": lambda x, y: x.sum(1, keepdim=True),
    "amax": lambda x, y: x.amax(-1),
    "product": lambda x, y: x @ y.mT,
}
BY_RANK: dict[int, dict[str, Made]] = {
    3: {
        "nearest": lambda x, y: F.interpolate(x, scale_factor=2),
        "linear": lambda x, y: F.interpolate(x, scale_factor=2, mode="linear"),
        "avg_pool": lambda x, y: F.avg_pool1d(x, 2, 1, 1),
        "max_pool": lambda x, y: F.max_pool1d(x, 2, 1, 1),
        "pad": lambda x, y: F.pad(x, (1, 1), mode="replicate"),
    },
    4: {
        "nearest": lambda x, y: F.interpolate(x, scale_factor=2),
        "exact": lambda x, y: F.interpolate(x, size=3, mode="nearest-exact"),
        "bilinear": lambda x, y: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "bicubic": lambda x, y: F.interpolate(x, scale_factor=2, mode="bicubic"),
        "avg_pool": lambda x, y: F.avg_pool2d(x, 2, 1, 1),
        "avg_pools": lambda x, y: F.avg_pool2d(F.avg_pool2d(x, 2, 1, 1), 2, 1),
        "max_pool": lambda x, y: F.max_pool2d(x.sigmoid(), 2, 1, 1),
        "adaptive": lambda x, y: F.adaptive_avg_pool2d(x, 2),
        "all": lambda x, y: F.adaptive_avg_pool2d(x, 1),
        "maxima": lambda x, y: F.adaptive_max_pool2d(x, 2),
        "pad": lambda x, y: F.pad(x, (1, 1, 0, 1)),
        "repeated": lambda x, y: F.pad(x, (1, 1, 0, 1), mode="replicate"),
        "shuffle": lambda x, y: F.pixel_shuffle(torch.cat([x] * 4, 1), 2),
        "batch_norm": lambda x, y: F.batch_norm(x, None, None, training=True),
    },
    5: {
        "nearest": lambda x, y: F.interpolate(x, scale_factor=2),
        "trilinear": lambda x, y: F.interpolate(x, scale_factor=2, mode="trilinear"),
        "avg_pool": lambda x, y: F.avg_pool3d(x, 2, 1, 1),
        "max_pool": lambda x, y: F.max_pool3d(x, 2, 1, 1),
        "adaptive": lambda x, y: F.adaptive_avg_pool3d(x, 2),
        "pad": lambda x, y: F.pad(x, (1, 1, 0, 1, 1, 0)),
    },
}


@dataclass(frozen=True)
class Case:
    """`made` of tensors of `shape`, whose dimensions lie in `orders`, slowest first; scaled before, or activated behind."""

    rank: int
    made: str
    shape: tuple[int, ...]
    orders: tuple[tuple[int, ...], tuple[int, ...]]
    before: bool
    behind: bool

    def inputs(self) -> list[Tensor]:
        return [laid_out(self.shape, order) for order in self.orders]


class Step(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.made = case, (ANY_RANK | BY_RANK[case.rank])[case.made]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.made(x * 1.5 if self.case.before else x, y)
        return z.relu() if self.case.behind else z


def laid_out(shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """A tensor whose dimensions lie in `order`, slowest first."""
    back = [order.index(dim) for dim in range(len(order))]
    return torch.randn([shape[dim] for dim in order]).permute(back)


@st.composite
def cases(draw: Any) -> Case:
    rank = draw(st.integers(3, 5))
    made = draw(st.sampled_from(sorted(ANY_RANK | BY_RANK[rank])))
    shape = draw(st.tuples(*[st.sampled_from([1, 2, 3, 1, 2, 0])] * rank))
    orders = draw(st.tuples(*[st.permutations(range(rank)).map(tuple)] * 2))
    return Case(rank, made, shape, orders, draw(st.booleans()), draw(st.booleans()))


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([Algebra.SAFE, Algebra.OFF]))
def test_strides_are_those_of_eager(case: Case, algebra: Algebra) -> None:
    hold(case, algebra)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_strides_are_those_of_eager_in_the_slow_export(case: Case) -> None:
    declined = mock.patch.object(trace, "_record", side_effect=trace.Declined("not recorded"))
    with declined as record:
        hold(case, Algebra.OFF)
    record.assert_called()


def hold(case: Case, algebra: Algebra) -> None:
    """An optimised step gives results of eager's shape, strides and type."""
    model, inputs = Step(case), case.inputs()
    with torch.no_grad():
        try:
            wanted = model(*inputs)
        except (RuntimeError, IndexError, ValueError):
            assume(False)  # no operator for these sizes
        with override(algebra=algebra, debug=True), original_operators():
            got = fusepass.optimize(model, tune="off")(*inputs)
    assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


@pytest.mark.parametrize("algebra", [Algebra.SAFE, Algebra.OFF])
@pytest.mark.parametrize("behind", [False, True])
def test_nearest_upsampling_of_a_transposed_tensor(behind: bool, algebra: Algebra) -> None:
    case = Case(3, "nearest", (3, 2, 1), ((2, 1, 0), (0, 1, 2)), False, behind)
    model, inputs = Step(case), case.inputs()
    with override(algebra=algebra, debug=True):
        got = fusepass.optimize(model)(*inputs)
    assert got.stride() == (4, 2, 1)
    torch.testing.assert_close(got, model(*inputs), rtol=0, atol=0)
