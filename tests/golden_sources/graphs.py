"""The ATen graphs of workloads as they are on a GPU, captured without one: tensors have no memory, and are described as CUDA's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from benchmarks.layers import Size, Workload
from fusepass.capture import trace
from fusepass.codegen.forms import Forms
from fusepass.codegen.lowering.tracer import Spec
from fusepass.compile import dropout
from fusepass.patterns.simplify import Application
from fusepass.training import backend, joint
from fusepass.training.backend import Backend
from fusepass.training.gradients import BENDS, DECOMPOSITIONS

CUDA, META = torch.device("cuda"), torch.device("meta")
DROPOUT = dropout.Rule(132 * 8 * 256, {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8})
"""What PyTorch's dropout does on an H200."""


def inference(workload: Workload, device: torch.device, batch: int | None = None) -> fx.GraphModule:
    """A call without gradients, at the full size, or with another number of samples than that."""
    on_meta = mock.patch.multiple(trace, DEVICES=(*trace.DEVICES, "meta"), unusual=lambda tensor: None)
    with torch.no_grad(), on_meta:
        captured = trace.capture(workload.model(Size.FULL, META), _inputs(workload, batch), {})
    assert isinstance(captured, trace.Captured), captured
    return _on(captured.graph, device)


def training(workload: Workload) -> Mapping[str, fx.GraphModule]:
    """Forward and backward of a step, cut as for a GPU."""
    return step(workload.model(Size.FULL, META), _inputs(workload))


def step(model: nn.Module, inputs: Sequence[Tensor]) -> Mapping[str, fx.GraphModule]:
    """Forward and backward of `model`, whose parameters and inputs have no memory."""
    found: list[fx.GraphModule] = []
    torch._dynamo.reset()
    for each in inputs:
        each.requires_grad_(each.is_floating_point())
    with _cut_as_for_a_gpu():
        result = torch.compile(model, backend=_Recording(found))(*inputs)
        result.float().square().mean().backward()
    return dict(zip(("forward", "backward"), (_on(graph, CUDA) for graph in found), strict=True))


class _Recording(Backend):
    """Keeps the graphs, and runs them as they are."""

    def __init__(self, found: list[fx.GraphModule]) -> None:
        super().__init__("graph", {"cuda_graphs": False})
        self._found = found

    def specialise(
        self,
        graph: fx.GraphModule,
        forms: Forms | None = None,
        applied: Sequence[Application] = (),
        *,
        parameters: Collection[int] = (),
        backward: bool = False,
        visible: int = 0,
    ) -> Any:
        self._found.append(graph)

        def call(arguments: Sequence[Any]) -> Any:
            return graph(*arguments)

        return SimpleNamespace(call=call, without_python=lambda: (call, ()))


@contextmanager
def _cut_as_for_a_gpu() -> Iterator[None]:
    with ExitStack() as patches:
        for owner, name, value in (
            (backend, "partition_joint", joint.minimum_cut),
            (backend, "DECOMPOSITIONS", DECOMPOSITIONS | BENDS),
            (joint, "split_dropout", lambda graph: dropout.split_by(DROPOUT, graph, META)),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


def _inputs(workload: Workload, batch: int | None = None) -> tuple[Tensor, ...]:
    given = workload.inputs(Size.FULL, META)
    return given if batch is None else tuple(each.new_empty((batch, *each.shape[1:])) for each in given)


def _on(graph: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(Tensor, partial(_described, device=device), node.meta["val"])
    return graph


def _described(tensor: Tensor, device: torch.device) -> Tensor:
    # A number that a model makes of Python's stays where it is, as its value is read.
    return Spec.of(tensor, device) if tensor.device == META else tensor


# fmt: off
DROPPING = (
    Workload("dropout", lambda s: (nn.LayerNorm(s.of(1024)), nn.GELU(), nn.Dropout(0.1), nn.Linear(s.of(1024), s.of(1024))), (8192, 1024), (6, 32)),
    Workload("bfloat16_dropout", lambda s: (nn.Dropout(0.2), nn.Softmax(-1), nn.Dropout(0.1)), (8192, 1024), (6, 32), dtype=torch.bfloat16),
)
# fmt: on
