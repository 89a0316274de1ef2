"""The search in random models that are trained: it finds a planted gradient, and cuts joint graphs as it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from fusepass.codegen.ir.program import Program
from fusepass.config import Algebra
from fusepass.training import backend
from fusepass.training.backend import Backend
from tests.fuzz import training
from tests.fuzz.chunk import Example
from tests.fuzz.training import draw_trained, run
from tests.property.script import Model
from tests.support import on_a_gpu
from tests.support.interpret import interpret

CHAIN = Model(
    torch.float32, 1, True, False,
    inputs=["torch.randn((4, 3)).to(torch.float32)"], layers={"l0": "nn.Linear(3, 4)"},
    lines=["v1 = self.l0(x0)", "v2 = v1.tanh() * 2"], results=["v2"],
)  # fmt: skip
EXAMPLE = Example(CHAIN, Algebra.SAFE)


def test_the_same_seed_draws_the_same_models() -> None:
    first, second = draw_trained(3, 4), draw_trained(3, 4)
    assert [example.model.text for example in first] == [example.model.text for example in second]
    assert len({example.model.text for example in first}) == 4


@pytest.mark.parametrize("partition", ["own", "gpu"])
def test_joint_graphs_are_cut_as_asked(partition: str) -> None:
    with mock.patch.object(backend, "partition_joint", wraps=backend.partition_joint) as own:
        assert run([EXAMPLE], "cpu", partition=partition) == []
    assert own.called == (partition == "own")


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1000, 1020))])
def test_steps_as_on_a_gpu(seed: int) -> None:
    """Regions and their programs are those of an H200; some of a few hundred models, a usual run tries fewer."""
    failures = run(draw_trained(seed, 4 if seed == 7 else 25), "cpu", partition="h200")
    assert not [failure for failure in failures if not failure.noise]


def test_a_wrong_region_of_a_gpu_is_found() -> None:
    def wrong(program: Program, memory: Mapping[str, Any]) -> dict[str, Any]:
        return {name: -result for name, result in interpret(program, memory).items()}

    with mock.patch.object(on_a_gpu, "interpret", wrong):
        (failure,) = run([replace(EXAMPLE, model=replace(CHAIN, seed=2))], "cpu", partition="h200")
    assert failure.problem.startswith("step: ")
    assert not failure.noise


def test_a_wrong_gradient_is_found() -> None:
    compiled = Backend._compile

    def wrong(self: Backend, graph: torch.fx.GraphModule, *arguments: object, **options: object) -> object:
        if any("tangents" in str(node.target) for node in graph.graph.find_nodes(op="placeholder")):
            for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
                node.target = torch.ops.aten.add.Tensor
        return compiled(self, graph, *arguments, **options)

    with mock.patch.object(Backend, "_compile", wrong):
        (failure,) = run([EXAMPLE], "cpu")
    assert "gradients" in failure.problem
    assert not failure.noise


def test_a_region_that_raises_is_a_failure() -> None:
    with mock.patch.object(training, "compare", side_effect=KeyError("planted")):
        (failure,) = run([EXAMPLE], "cpu")
    assert failure.kind == "KeyError"
