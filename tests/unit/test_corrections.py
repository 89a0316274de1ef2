"""What normalisations on a CPU are said to save has the types that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusepass.compile.corrections import correct
from tests.support.aten import traced

aten = torch.ops.aten

X, ROW = torch.rand(4, 6, 5), torch.rand(6)
OPERATORS: dict[str, tuple[Callable[..., Any], int]] = {
    "layer norm": (lambda x, w, b: aten.native_layer_norm(x.mT, [6], w, b, 1e-5), 2),
    "group norm": (lambda x, w, b: aten.native_group_norm(x, w, b, 4, 6, 5, 2, 1e-5), 2),
    "without statistics": (lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5), 2),
    "training": (
        lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5), 4,
    ),
    "evaluation": (lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 1e-5), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow operands", "wide operands"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_types_are_those_of_a_real_run(name: str, dtype: torch.dtype, wide: bool) -> None:
    function, operands = OPERATORS[name]
    inputs = (X.to(dtype), *[ROW if wide else ROW.to(dtype)] * operands)
    graph = traced(function, *inputs)
    correct(graph.graph)
    (output,) = graph.graph.find_nodes(op="output")
    said = [node.meta["val"].dtype for node in output.args[0]]
    assert said == [result.dtype for result in function(*inputs)]


def test_what_is_right_already_stays() -> None:
    graph = traced(lambda x, w: aten.native_layer_norm(x, [5], w, w, 1e-5)[1], X.double(), torch.rand(5).double())
    before = {node: node.meta.get("val") for node in graph.graph.nodes}
    correct(graph.graph)
    values: dict[Any, Tensor] = {node: node.meta.get("val") for node in graph.graph.nodes}
    assert all(values[node] is before[node] for node in before)
