"""The work for an operator does not grow with the number of operators around it. Calls are counted, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fusepass.capture.trace import Captured, capture
from fusepass.compile.pipeline import compile_graph
from fusepass.config import override
from fusepass.patterns import arguments, copies, dataflow, legality, region_legality, traffic
from fusepass.patterns.partition import partition
from fusepass.patterns.simplify import simplify

Function = Callable[[Tensor, int], Tensor | Sequence[Tensor]]


class _Many(nn.Module):
    def __init__(self, function: Function, count: int) -> None:
        super().__init__()
        self.function, self.count = function, count

    def forward(self, x: Tensor) -> Tensor | Sequence[Tensor]:
        return self.function(x, self.count)


def _chain(x: Tensor, count: int) -> Tensor:
    for number in range(count // 2):
        x = (x * (1 + 1 / (number + 2))).sin()
    return x


def _wide(x: Tensor, count: int) -> Tensor:
    return sum(((x * (number + 2)).sin() for number in range(count // 3)), x)


def _outputs(x: Tensor, count: int) -> Sequence[Tensor]:
    return tuple((x * (number + 2)).sin() for number in range(count // 2))


def _regions_in_turn(x: Tensor, count: int) -> Tensor:
    for _ in range(count // 3):
        x = torch.sort((x * 2).sin(), -1).values
    return x


def _pieces(x: Tensor, count: int) -> Tensor:
    return torch.cat([part * 2 for part in x.repeat(1, count // 2).split(8, 1)], 1)


COUNTED = (
    arguments.key_of, copies._is_tagged, dataflow.Candidate.plus, dataflow.bits, legality.supported_device, traffic.nbytes,
)  # fmt: skip
"""Functions that each step of simplification or partition comes to."""


def _calls(function: Function, count: int) -> dict[str, int]:
    """How often the package's own functions are called for a graph of some `count` operators."""
    with torch.no_grad():
        captured = capture(_Many(function, count), (torch.rand(8, 8),), {})
    assert isinstance(captured, Captured)
    made: dict[CodeType, int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            made[frame.f_code] = made.get(frame.f_code, 0) + 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        simplify(captured.graph)
        partition(captured.graph)
    finally:
        sys.setprofile(before)
    return {each.__qualname__: made.get(each.__code__, 0) for each in COUNTED}


@pytest.mark.parametrize("function", [_chain, _wide, _outputs, _regions_in_turn, _pieces])
@pytest.mark.invariant(53)
def test_work_for_an_operator_does_not_grow(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_legality, "MOST_OPS", 20)  # both graphs have many regions of the largest size
    monkeypatch.setattr(region_legality, "MOST_ARGUMENTS", 12)
    few, many = _calls(function, 240), _calls(function, 960)
    grown = {name: round(many[name] / few[name] / 4, 2) for name in few if many[name] > 1000}
    assert max(grown.values()) <= 1.6, grown


@pytest.mark.parametrize("emptying", [False, True], ids=["plain", "emptying"])
@pytest.mark.invariant(53)
def test_the_function_of_a_graph_is_generated_once(emptying: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, written = torch.rand(8, 8), list[fx.Graph]()
    with torch.no_grad():
        captured = capture(_Many(_regions_in_turn, 9), (x,), {})
    assert isinstance(captured, Captured)
    generate = fx.Graph.python_code
    monkeypatch.setattr(
        fx.Graph,
        "python_code",
        lambda graph, *args, **kwargs: (written.append(graph), generate(graph, *args, **kwargs))[1],
    )
    with override(tune="off"):
        compiled = compile_graph(captured.graph, name="Once", emptying=emptying)
    regions = len(compiled.works)
    assert regions == 3
    assert len(written) == 1  # that of a region is asked for by trials alone
    given = [x]
    (found,) = compiled.call(given) if emptying else compiled.call(*given)
    torch.testing.assert_close(found, _regions_in_turn(x, 9))
    assert bool(given) is not emptying
