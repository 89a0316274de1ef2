"""The black-box suites: a few cases of each table in a usual run, all of them with ``pytest -m blackbox``; faults that are planted are found."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from tests.blackbox import ways
from tests.blackbox.__main__ import summary
from tests.blackbox.case import Case
from tests.blackbox.run import PIECE, judged, tried
from tests.blackbox.suites import SUITES
from tests.blackbox.ways import WAYS, problem
from tests.support.interpreted import interpreted

CASES = [case for suite in SUITES.values() for case in suite]
JOBS = [(suite, way, start) for suite in SUITES for way in WAYS for start in range(0, len(SUITES[suite]), PIECE)]
SAMPLE = 60
"""In a usual run one case of so many is tried, each in another way."""


def test_names_tell_cases_apart_and_make_what_they_say() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 1500
    for case in CASES[::7]:
        (first, given), (second, same) = case.make(), case.make()
        assert isinstance(first, nn.Module)
        assert list(map(str, first.state_dict())) == list(map(str, second.state_dict()))
        for one, other in zip(given, same, strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_some_cases_pass() -> None:
    with interpreted():
        found = [judged(case, WAYS[n % 3]) | {"case": case.name} for n, case in enumerate(CASES[:: 3 * SAMPLE])]
    assert not [each for each in found if each["verdict"] == "failed"]
    assert sum(each["verdict"] == "passed" for each in found) >= len(found) - 1


@pytest.mark.blackbox
@pytest.mark.parametrize(("suite", "way", "start"), JOBS)
def test_all_cases_pass(suite: str, way: str, start: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    left = tmp_path_factory.mktemp("left") / "case"
    told = tried(suite, way, start, only="", kernels="interpreted", left=left)
    assert not [each for each in told["runs"] if each["verdict"] == "failed"]


class _Planted(nn.Module):
    """As a model, but for one kind of fault."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        super().__init__()
        self.module, self.kind = module, kind

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(*inputs)
        match self.kind:
            case "value":
                return result * 1.01
            case "type":
                return result.double()
            case "strides":
                return result.t().contiguous().t()
            case "write":
                inputs[0].add_(1)
                return result
            case "alias":
                return inputs[0]
            case "error":
                raise KeyError("planted")
        return result


CASE = Case("planted", "r(3, 4)", "a.relu() * 2")


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("value", "max error"),
        ("type", "dtype"),
        ("strides", "strides"),
        ("write", "error"),
        ("error", "raises KeyError"),
    ],
)
def test_a_planted_fault_is_found(kind: str, word: str) -> None:
    with mock.patch.object(ways.fusepass, "optimize", lambda module: _Planted(module, kind)):
        assert word in problem(CASE, "optimize")


def test_memory_that_is_shared_otherwise_is_found() -> None:
    same = Case("planted", "r(3, 4)", "a.clone()")
    with mock.patch.object(ways.fusepass, "optimize", lambda module: _Planted(module, "alias")):
        assert "memory is shared otherwise" in problem(same, "optimize")


def test_another_error_than_eager_s_is_found() -> None:
    refused = Case("planted", "r(3, 4)", "a.view(5, 5)")
    assert problem(refused, "optimize") == ""
    with mock.patch.object(ways.fusepass, "optimize", return_value=_Planted(nn.Identity(), "error")):
        assert "KeyError" in problem(refused, "optimize")
    with mock.patch.object(ways.fusepass, "optimize", return_value=nn.Identity()):
        assert "raises nothing" in problem(refused, "optimize")


@pytest.mark.parametrize("way", ["compile", "backward"])
def test_a_planted_fault_of_a_compiled_graph_is_found(way: str) -> None:
    def wrong(graph: torch.fx.GraphModule, inputs: object) -> object:
        for node in graph.graph.find_nodes(op="call_method", target="relu"):
            node.target = "tanh"
        graph.recompile()
        return graph

    with mock.patch.object(ways, "Backend", return_value=wrong):
        assert "max error" in problem(CASE, way)


def test_gradients_are_compared() -> None:
    """A graph whose results are right and whose gradients are not."""

    def wrong(graph: torch.fx.GraphModule, inputs: object) -> object:
        return lambda *given: [each.detach() * 1 + 0 * each for each in graph(*given)]

    with mock.patch.object(ways, "Backend", return_value=wrong):
        assert problem(CASE, "compile") == ""
        assert "gradients" in problem(CASE, "backward")


def test_a_record_counts_by_suite_and_way() -> None:
    runs = [
        {"suite": "s", "way": "compile", "case": name, "verdict": verdict, "problem": told}
        for name, verdict, told in (("a", "passed", ""), ("b", "failed", "wrong"), ("c", "as aot_eager", "theirs"))
    ]
    told = summary(runs)
    assert told["counts"] == {"s": {"compile": {"passed": 1, "failed": 1, "as aot_eager": 1}}}
    assert [each["case"] for each in told["failed"]] == ["b"]
    assert [each["case"] for each in told["as aot_eager"]] == ["c"]
