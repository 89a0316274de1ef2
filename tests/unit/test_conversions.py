"""Halves on a CPU that are converted many at once, before and behind loops: whatever the sizes, strides and masks are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.config import override
from fusepass.numerics.check import check
from tests.support.batched import batched


class _Model(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs)


def _x(*shape: int) -> Tensor:
    return torch.randn(shape).half()


# What it is: the function, its inputs, and how often its source widens and narrows.
CASES: dict[str, tuple[Callable[..., object], tuple[Tensor, ...], int, int]] = {
    "flat": (lambda x: (x * 2).tanh(), (_x(5000),), 1, 1),
    "rows and a column": (lambda x, y: (x * y).tanh(), (_x(7, 1030), _x(7, 1)), 1, 1),
    "an odd offset": (lambda x: (x[1:] * 2).tanh(), (_x(2051),), 1, 1),
    "every second": (lambda x: (x[::2] * 2).tanh(), (_x(4100),), 0, 1),
    "too few": (lambda x: (x * 2).tanh(), (_x(9, 5).t(),), 0, 0),
    "floats come out, too": (lambda x: ((x * 2).tanh(), x.float() * 3), (_x(1500),), 1, 1),
    "floats go in, too": (lambda x, y: (x + y).tanh().half(), (_x(1500), torch.randn(1500)), 1, 1),
    "padded": (lambda x: F.pad(x.tanh(), (1, 2)) * 2, (_x(4, 300),), 0, 1),
    "repeated along rows": (lambda x, y: (x * y).tanh(), (_x(5, 1100), _x(1100)), 2, 1),
    "halves rounded in between": (lambda x: (x.tanh().half() * 3).sin(), (_x(1400),), 1, 1),
    "sums": (lambda x: (x.sum(1) * 2, x.amax(1)), (_x(9, 1700),), 1, 0),
    "a sum of squares": (lambda x: (x.float() * x.float()).sum(1), (_x(9, 1700),), 0, 0),
    "softmax": (lambda x: x.softmax(1), (_x(9, 1100),), 1, 1),
    "layer norm of two axes": (lambda x: F.layer_norm(x, x.shape[1:]), (_x(5, 40, 33),), 1, 1),
    "long rows": (lambda x: x.softmax(1), (_x(3, 70001),), 2, 1),  # in pieces first
    "rows in place": (lambda x: (x.softmax(1), x.amax(1), x.float().softmax(1)), (_x(9, 257),), 1, 1),
}


def test_halves_are_converted_at_once() -> None:
    wrong = []
    with batched() as batch, override(debug=True, tune="off"):
        made = {name: (_Model(function), inputs) for name, (function, inputs, _, _) in CASES.items()}
        fused = {name: fusepass.optimize(model, example_inputs=inputs) for name, (model, inputs) in made.items()}
        batch.compile()
        for name, (model, inputs) in made.items():
            outcome = check(model, fused[name], inputs)
            texts = {source.text for region in fused[name].report().regions for source in region.sources}
            text = "".join(texts)
            counts = text.count("fp::widen("), text.count("fp::narrow(")
            if not outcome.ok or counts != CASES[name][2:]:
                wrong.append((name, outcome.explain()[:30], counts))
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda x: (x * 2).tanh(), 2),
        (lambda x: x.softmax(1), 4),
    ],  # rows that stay on the stack have room for four times as many at a time
    ids=["pointwise", "rows"],
)
def test_sizes_that_come_at_run_time(function: Callable[[Tensor], Tensor], most: int) -> None:
    model = _Model(function)
    with override(debug=True, tune="off"):
        fused = fusepass.optimize(model)
        for size in (70, 300, 1023, 1024, 5000, 1025, 6144):
            outcome = check(model, fused, (_x(3, size),))
            assert outcome.ok, f"{size}: {outcome.explain()}"
        assert len({source.text for region in fused.report().regions for source in region.sources}) <= most
