"""Python state of modules: what counts as changed, and what is put back."""

from __future__ import annotations

import array
import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.capture.snapshot import _count_as_told
from fusepass.capture.trace import Captured, CaptureFailure, capture
from fusepass.guards.pystate import PythonState
from fusepass.report.report import CaptureRoute


@dataclass(slots=True)
class Slots:
    scale: float = 2.0


class Bag:
    def __init__(self, **entries: Any) -> None:
        vars(self).update(entries)


class Holds(nn.Module):
    """Does `step` to what it holds, then computes with what `read` says of it."""

    def __init__(self, held: Any, read: Callable[[Any], float], step: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.held = held
        self.read = read
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        if self.step is not None:
            self.step(self.held)
        return x.tanh() * self.read(self.held) + 1


def _first(held: Any) -> float:
    return float(held[0])


def _first_value(held: dict[str, float]) -> float:
    return next(iter(held.values()))


def _deep(held: Any) -> float:
    return float(held.a.b.scale)


def _iteration(held: Any) -> None:
    held.move_to_end(next(iter(held)))


def _append(held: Any) -> None:
    held.append(int(held[-1]) + 1)


def _increase(held: Any) -> None:
    held[0] += 1


def _grow(held: Slots) -> None:
    held.scale += 1


def _grow_deep(held: Any) -> None:
    held.a.b.scale += 1


class Registry(dict[str, float]):
    """Its methods take other keys, and fewer arguments, than a dict's."""

    def __setitem__(self, key: str, value: float) -> None:
        super().__setitem__(f"{key}!", value)

    def get(self, key: str) -> float:  # type: ignore[override]
        return self[f"{key}!"]


def _register(held: Registry) -> None:
    held["scale"] = held.get("scale") + 1


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "slots": (Slots, lambda held: held.scale, _grow),
    "third object": (lambda: Bag(a=Bag(b=Bag(scale=2.0))), _deep, _grow_deep),
    "order": (lambda: collections.OrderedDict(a=1.0, b=2.0), _first_value, _iteration),
    "methods of its own": (lambda: Registry({"scale!": 2.0}), lambda held: held.get("scale"), _register),
    "array of NumPy": (lambda: numpy.array([2.0, 3.0]), _first, _increase),
    "array": (lambda: array.array("d", [2.0, 3.0]), _first, _increase),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), _first, _append),
    "bytes": (lambda: bytearray(b"\x01\x02"), _first, _increase),
}


@pytest.mark.parametrize("state", STATES)
@torch.no_grad()
@pytest.mark.invariant(3)
def test_a_change_between_calls_is_noticed(state: str) -> None:
    make, read, step = STATES[state]
    model, x = Holds(make(), read), torch.ones(3)
    optimised = fusepass.optimize(model, tune="off")
    for _ in range(3):
        torch.testing.assert_close(optimised(x), model(x))
        assert optimised.report().capture is CaptureRoute.TRACED
        seen = PythonState(model)
        assert seen.unchanged()
        step(model.held)
        assert not seen.unchanged()


@pytest.mark.parametrize("state", STATES)
@torch.no_grad()
@pytest.mark.invariant(2)
def test_what_forward_changes_is_put_back_and_changed_at_each_call(state: str) -> None:
    make, read, step = STATES[state]
    model, alike, x = Holds(make(), read, step), Holds(make(), read, step), torch.ones(3)
    held, text = model.held, repr(model.held)
    failure = capture(model, (x,), {})
    assert isinstance(failure, CaptureFailure)
    assert failure.reason.startswith("forward changes Python state: self.held")
    assert model.held is held
    assert repr(held) == text
    assert read(held) == read(make())
    optimised = fusepass.optimize(model, tune="off")
    for _ in range(4):
        torch.testing.assert_close(optimised(x), alike(x))
    assert read(model.held) == read(alike.held)


@pytest.mark.parametrize("make", [lambda: itertools.count(1), lambda: iter([1, 2, 3, 4, 5])])
@torch.no_grad()
def test_iterators_that_forward_takes_from_are_put_back(make: Callable[[], Any]) -> None:
    model, x = Holds(make(), next), torch.ones(3)
    held = model.held
    failure = capture(model, (x,), {})
    assert isinstance(failure, CaptureFailure)
    assert failure.reason == "forward changes Python state: self.held"
    assert model.held is held
    optimised = fusepass.optimize(model, tune="off")
    for step in range(1, 5):
        torch.testing.assert_close(optimised(x), x.tanh() * step + 1)


@torch.no_grad()
def test_a_count_says_how_it_goes_on() -> None:
    """From Python 3.14 on that is all that there is of it."""
    for count in (itertools.count(5), itertools.count(5, 2), itertools.count(-1.5, 0.25), itertools.count(2**70, -1)):
        next(count)
        told = _count_as_told(repr(count))
        assert [next(told) for _ in range(3)] == [next(count) for _ in range(3)]
    with pytest.raises(TypeError, match="cannot be copied"):
        _count_as_told(repr(itertools.count(Fraction(1, 3))))


def test_an_iterator_that_is_only_held_is_in_no_way() -> None:
    model = Holds(itertools.count(1), lambda held: 2.0)
    held = model.held
    assert isinstance(capture(model, (torch.ones(3),), {}), Captured)
    assert model.held is held
    assert next(held) == 1


@torch.no_grad()
def test_large_arrays_are_data() -> None:
    model = Holds(numpy.zeros(10_000), lambda held: 2.0)
    seen = PythonState(model)
    model.held[0] = 1
    assert seen.unchanged()
