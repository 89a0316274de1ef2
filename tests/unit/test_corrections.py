"""What normalisations are said to save has the types that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fusepass.codegen.lowering.tracer import Spec
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_norms_of_weights_have_the_type_in_which_backward_takes_them(dtype: torch.dtype) -> None:
    """Wherever they come from, PyTorch's kernel or a region; fake kernels say that they are float16 where weights are."""
    inputs = (torch.rand(3, 5, dtype=dtype), torch.rand(3, 1, dtype=dtype))
    graph = traced(lambda v, g: aten._weight_norm_interface(v, g, 0)[1].detach(), *inputs)
    wide = torch.promote_types(dtype, torch.float32)
    for device in (torch.device("cpu"), torch.device("cuda")):
        for node in graph.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map_only(Tensor, lambda value: Spec.of(value, device), node.meta["val"])  # noqa: B023
        correct(graph.graph)
        *_, norms, detached, _ = graph.graph.nodes
        assert (norms.meta["val"].dtype, detached.meta["val"].dtype) == (wide, wide)
    assert aten._weight_norm_interface(*inputs, 0)[1].dtype is wide


def test_what_is_right_already_stays() -> None:
    graph = traced(lambda x, w: aten.native_layer_norm(x, [5], w, w, 1e-5)[1], X.double(), torch.rand(5).double())
    before = {node: node.meta.get("val") for node in graph.graph.nodes}
    correct(graph.graph)
    values: dict[Any, Tensor] = {node: node.meta.get("val") for node in graph.graph.nodes}
    assert all(values[node] is before[node] for node in before)
