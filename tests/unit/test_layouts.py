"""Tracing under fake tensors lays tensors out as eager does, or gives up: the graph alone, without kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.capture.trace import Captured, CaptureFailure, capture
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import check

# Eager's batch normalisation gives a contiguous result for it, fake tensors one with the input's strides.
SINGLE = torch.randn(1, 2, 2, 8, dtype=torch.float64).permute(2, 3, 1, 0)
LAST = torch.randn(2, 8, 3, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
PLAIN = torch.randn(2, 8, 3, 4, dtype=torch.float64)


class Normalised(nn.Module):
    """Writes to its input, so that AOTAutograd traces it."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8).to(torch.float64)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.then(self.norm(x))


QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "is_contiguous": lambda y: y.is_contiguous(),
    "channels last": lambda y: y.is_contiguous(memory_format=torch.channels_last),
    "stride": lambda y: y.stride(1) == 1,
    "dim_order": lambda y: y.dim_order() == (0, 1, 2, 3),
    "of a view": lambda y: y[:, :4].transpose(0, 1).stride(1) == 16,
    "of a result": lambda y: (y.relu() + 1).is_contiguous(),
    "the same": lambda y: y.contiguous() is y,
    "a view": lambda y: y._is_view(),
}

WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda y: y.reshape(-1),
    "flatten": lambda y: y.flatten(1),
    "ravel": lambda y: y.ravel(),
    "contiguous": lambda y: y.contiguous(),
    "channels last": lambda y: y.contiguous(memory_format=torch.channels_last),
    "of a view": lambda y: y.mT.reshape(-1),
}

INPUTS = {"single": SINGLE, "last": LAST, "plain": PLAIN}


@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.thinned(5)
def test_forward_branches_on_strides_as_in_eager(question: str, layout: str) -> None:
    asks = QUESTIONS[question]
    _agrees(Normalised(lambda y: y + 1 if asks(y) else y - 1), INPUTS[layout])


@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("viewed", WRITES)
@pytest.mark.thinned(5)
def test_a_write_shows_where_it_does_in_eager(viewed: str, layout: str) -> None:
    def written(y: Tensor) -> Tensor:
        WRITES[viewed](y).add_(1)
        return y

    _agrees(Normalised(written), INPUTS[layout])


@pytest.mark.parametrize(
    "x",
    [torch.randn(4, 1, 3).expand(4, 5, 3), torch.randn(4, 5, 6)[..., ::2], torch.randn(40).unfold(0, 8, 4)],
    ids=["expanded", "gaps", "windows"],
)
@pytest.mark.parametrize("asks", [Tensor.is_contiguous, lambda x: x.stride(1) == 0, lambda x: x.reshape(-1)._is_view()])
def test_inputs_whose_memory_overlaps_or_has_gaps(asks: Callable[[Tensor], bool], x: Tensor) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.view(-1).add_(1)
            return y + 1 if asks(x) else y - 1

    _agrees(Model(), x)


def _agrees(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        captured = capture(model, (x,), {})
        assert isinstance(captured, Captured), captured
        fused = fusepass.optimize(model, tune="off")
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()


@pytest.mark.parametrize("written", [False, True], ids=["recorded", "exported"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1 if x.storage_offset() == 0 else x - 1,
        lambda x: x + 1 if x[2:].storage_offset() == 2 else x - 1,
        lambda x: x.as_strided((2, 3), (3, 1), 1).exp(),
        lambda x: x.as_strided((2, 3), (3, 1), storage_offset=1).exp(),
        lambda x: torch.as_strided(x, (2, 3), (3, 1), 1).exp(),
    ],
)
def test_where_an_input_begins_is_nobody_s_business(function: Callable[[Tensor], Tensor], written: bool) -> None:
    """No signature has it."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if written:
                x.mul_(2)
            return function(x)

    memory = torch.randn(16)
    with torch.no_grad():
        with pytest.warns(FusepassWarning, match="storage_offset"):
            fused = fusepass.optimize(Model(), example_inputs=(memory[:12].clone(),))
        for first in (0, 4):
            mine, theirs = memory.clone(), memory.clone()
            torch.testing.assert_close(fused(mine[first:][:12]), Model()(theirs[first:][:12]))
            torch.testing.assert_close(mine, theirs)


def test_a_place_in_memory_of_its_own_is_traced() -> None:
    model = Normalised(lambda y: y[1:].as_strided((2, 3), (3, 1), y[1:].storage_offset()) + 1)
    _agrees(model, PLAIN)


@pytest.mark.parametrize(
    "asks", [lambda y: y.is_set_to(y), lambda y: y.untyped_storage().nbytes() > 100, lambda y: y.data_ptr() > 0]
)
def test_what_tracing_does_not_know_is_left_to_eager(asks: Callable[[Tensor], bool]) -> None:
    model = Normalised(lambda y: y + 1 if asks(y) else y - 1)
    with torch.no_grad():
        assert isinstance(capture(model, (PLAIN,), {}), CaptureFailure)
        with pytest.warns(FusepassWarning):
            outcome = check(model, fusepass.optimize(model), (PLAIN,))
    assert outcome.ok, outcome.explain()


def test_more_calls_than_were_noted() -> None:
    """What forward remembers is asked for once; of what follows, tracing alone says how it lies."""

    @functools.cache
    def kept() -> Tensor:
        return torch.ones(3, 4).mul(2)

    def remembered(y: Tensor) -> Tensor:
        kept()
        return (y * 2).relu() + 1

    _agrees(Normalised(remembered), PLAIN)
