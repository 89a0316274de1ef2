"""How many bytes the generated kernels of a function move on a GPU, beside those that must move; nothing is built or run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fusepass.capture.record import Recorder
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import Generated, anchor_traffic, generate, traffic
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.lowering.tracer import Spec
from fusepass.compile.splice import subgraph
from fusepass.patterns.partition import Partition, Region, partition
from fusepass.patterns.simplify import simplify
from fusepass.patterns.traffic import nbytes


@dataclass(frozen=True)
class Given:
    """A contiguous tensor that a function takes, without elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Step:
    """One launch: a kernel, a region's library calls, or an operator that is left to PyTorch."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Moved:
    """What a function moves.

    Attributes:
        least: bytes of the tensors that it reads and of those that it returns, each once, as the function is written.
        steps: what runs, region by region, then what is left to PyTorch.
    """

    least: int
    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that all steps move."""
        return sum(step.nbytes for step in self.steps)

    @property
    def ratio(self) -> float:
        """How many times the least that is."""
        return self.nbytes / self.least

    def __str__(self) -> str:
        steps = ", ".join(f"{step.name} {step.nbytes / self.least:.3f}" for step in self.steps)
        return f"{self.ratio:.3f} times the least, {self.least / 2**20:.1f} MiB: {steps}"


def moved(function: Callable[..., Any], *inputs: Given) -> Moved:
    """What `function` moves on an H200: captured, simplified and partitioned as a model is, with the kernels that are tried first.

    A kernel counts by `fusepass.codegen.generate.traffic`: each buffer once, of one that it reads in part no more than that; one
    from which it gathers as a whole. Rows that it reads again, as they do not stay on the chip between two reduction loops, count once. An
    operator that is left to PyTorch moves its inputs and its results once.

    Args:
        function: takes the tensors and gives one or several; it may write to them where it returns what it wrote.
        inputs: what it takes. They should be larger than the cache, or bytes are not what takes the time.
    """
    graph = _recorded(function, inputs)
    least = _least(graph.graph)
    simplify(graph)
    parts = partition(graph)
    generated = (step for region in parts.regions for step in _generated(graph, region))
    return Moved(least, (*generated, *_left(graph.graph, parts)))


def generated(function: Callable[..., Any], *inputs: Given) -> Iterator[Generated]:
    """The regions of `function`, captured as by `moved`, as they are generated for an H200."""
    graph = _recorded(function, inputs)
    simplify(graph)
    return (_made(graph, region) for region in partition(graph).regions)


def _recorded(function: Callable[..., Any], inputs: Sequence[Given]) -> fx.GraphModule:
    """The graph of `function` as a model's is captured, as if its tensors were on a GPU."""
    recorder = Recorder(nn.Module())
    tensors = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in inputs]
    for number, tensor in enumerate(tensors):
        recorder.placeholder(f"x{number}", tensor)
    with torch.no_grad(), recorder:
        results = pytree.tree_leaves(function(*tensors))
    recorder.graph.output(tuple(map(recorder.node_of, results)))
    for node in recorder.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, _on_cuda, node.meta["val"])
    return recorder.module()


def _on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    return Spec.of(tensor, torch.device("cuda"))


def _least(graph: fx.Graph) -> int:
    read = [node for node in graph.find_nodes(op="placeholder") if node.users]
    returned = graph.output_node().all_input_nodes
    return sum(nbytes(node.meta["val"]) for node in dict.fromkeys((*read, *returned)))


def _made(graph: fx.GraphModule, region: Region) -> Generated:
    lowered = lower(subgraph(graph, region), region.name, [node.name for node in region.inputs])
    return generate(*lowered, DeviceFacts.h200())


def _generated(graph: fx.GraphModule, region: Region) -> Iterator[Step]:
    program = _made(graph, region).program
    if program.calls:
        yield Step(f"{region.name}, library", anchor_traffic(program))
    for kernel in program.kernels:
        yield Step(kernel.name, sum(traffic(program, kernel)))


def _left(graph: fx.Graph, parts: Partition) -> Iterator[Step]:
    refused = {refusal.node for refusal in parts.refusals}
    for node in graph.nodes:
        if node.name in refused:
            values = [*node.all_input_nodes, node]
            tensors = pytree.tree_leaves([value.meta["val"] for value in values])
            yield Step(node.name, sum(nbytes(each) for each in tensors if isinstance(each, torch.Tensor)))
