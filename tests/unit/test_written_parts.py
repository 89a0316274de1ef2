"""Writes to slices of a tensor that forward made: the recorder puts the part into the whole, and what else is a view of that sees it."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch
from torch import Tensor, nn

from fusepass.capture import trace
from fusepass.capture.escapes import Declined
from fusepass.capture.trace import Captured, capture


class _Calls(nn.Module):
    """A buffer, and forward as it is given."""

    def __init__(self, function) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 6))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _regions_of_a_mask(self: _Calls, x: Tensor) -> Tensor:
    mask = x.new_zeros(4, 6)
    number = 0
    for rows in (slice(0, 2), slice(2, 4)):
        for cols in (slice(0, -4), slice(-4, -1), slice(-1, None)):
            mask[rows, cols] = number
            number += 1
    return x + mask


def _views_see_it(self: _Calls, x: Tensor) -> Tensor:
    y = x * 2
    first, row = y[:, 1:], y[2]
    first += 3
    row.mul_(first[3, 0])
    y.relu_()
    return first.sum() + row + y[0]


def _steps(self: _Calls, x: Tensor) -> Tensor:
    y = x + 1
    y[::2, 1::3] = x[:2, :2]
    y[:, 5].neg_()
    return y * x


def _buffer(self: _Calls, x: Tensor) -> Tensor:
    self.cache[1:3].copy_(x[:2])
    self.cache[0] += x[3]
    return self.cache * 2


def _other_strides(self: _Calls, x: Tensor) -> Tensor:
    y = (x + 1).t() * 1
    y[1:4].mul_(x.t()[1:4])
    return y.relu()


def _whole_is_gone(self: _Calls, x: Tensor) -> Tensor:
    return (x + 1)[1:].mul_(2)


CASES = [_regions_of_a_mask, _views_see_it, _steps, _buffer, _other_strides, _whole_is_gone]


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def declined(*_: object) -> None:
        raise AssertionError("it is not recorded")

    monkeypatch.setattr(trace, "_export", declined)


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__.strip("_"))
def test_written_slices_are_recorded(function) -> None:
    model, x = _Calls(function), torch.randn(4, 6)
    with torch.no_grad():
        captured = capture(model, (x,), {})
        assert isinstance(captured, Captured)
        states = [model.cache] if captured.states else []
        other = torch.randn(4, 6)
        found = captured.graph(*(state.clone() for state in states), other)[-1]
        expected = function(model, other)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x[0].add_(1),
        lambda self, x: (y := x + 1).view(24)[3:].add_(1) + y.sum(),
        lambda self, x: (y := x + 1)[1:].uniform_() + y.sum(),
    ],
    ids=["an input", "through another shape", "random"],
)
def test_what_cannot_be_put_back_is_declined(function, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: object) -> None:
        raise Declined("it is exported")

    monkeypatch.setattr(trace, "_export", export)
    with torch.no_grad():
        found = capture(_Calls(function), (torch.randn(4, 6),), {})
    assert "it is exported" in found.reason


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize(
    "write",
    [
        lambda y: nn.functional.hardswish(y, inplace=True),
        lambda y: nn.functional.mish(y, inplace=True),
        lambda y: nn.functional.threshold(y, 0.1, 0.2, inplace=True),
        lambda y: y.abs_(),
        lambda y: y.masked_fill_(y > 0, torch.tensor(0.5)),
    ],
    ids=["hardswish", "mish", "threshold", "abs", "masked_fill"],
)
def test_activations_in_place_are_recorded(write) -> None:
    """PyTorch does not tag these as pointwise."""
    model, x = _Calls(lambda self, x: write(x + 1) * 2), torch.randn(4, 6)
    with torch.no_grad():
        captured = capture(model, (x,), {})
        assert isinstance(captured, Captured)
        torch.testing.assert_close(captured.graph(x)[-1], model(x), rtol=0, atol=0)


def _run(program: list[tuple[int, int, int, int]], self: _Calls, x: Tensor) -> list[Tensor]:
    """A random program over tensors, the buffer and views of them; writes to some, and at last reads all."""
    known = [x + 1, self.cache, (x * 2).t(), (x.unsqueeze(0) - 1)[0]]
    for kind, which, dim, number in program:
        tensor = known[which % len(known)]
        dim %= max(tensor.dim(), 1)
        match kind:
            case 0 | 1 if tensor.dim():
                start = number % tensor.shape[dim]
                known.append(
                    tensor.select(dim, start) if kind else tensor.narrow(dim, start, tensor.shape[dim] - start)
                )
            case 2 if tensor.dim():
                known.append(tensor[(slice(None),) * dim + (slice(number % 2, None, 2),)])
            case 3:
                tensor += number
            case 4:
                tensor.mul_(tensor.mean())
            case 5:
                tensor.copy_(torch.full_like(tensor, 0.5) + tensor.detach().clone())
            case 6 if len(known) > 3:
                del known[which % len(known)]
    return [each * 1 for each in known]


def test_random_writes_and_views_are_as_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: object) -> None:
        raise Declined("it is exported")

    monkeypatch.setattr(trace, "_export", export)
    random, recorded = Random(0), 0
    for _ in range(60):
        program = [tuple(map(random.randrange, (7, 9, 2, 4))) for _ in range(random.randint(2, 8))]
        model, x = _Calls(partial(_run, program)), torch.randn(4, 6)
        model.cache.normal_()
        with torch.no_grad():
            captured = capture(model, (torch.randn(4, 6),), {})
            if not isinstance(captured, Captured):
                assert "it is exported" in captured.reason, program
                continue
            given = [*(model.cache.clone() for _ in captured.states), x]
            found = captured.graph(*given)
            expected = model(x)
        recorded += 1
        for one, other in zip(found[-len(expected) :], expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=0, atol=0, msg=lambda text, program=program: f"{program}: {text}"
            )
            assert one.stride() == other.stride(), program
        if captured.mutated_states:
            torch.testing.assert_close(given[0], model.cache, rtol=0, atol=0)
    assert recorded > 30
