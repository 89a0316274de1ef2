"""ATen graphs for tests of what happens to graphs, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_module
from torch.fx.experimental.proxy_tensor import make_fx

from fusepass.compile.boundary_views import Edges
from fusepass.compile.splice import splice, subgraph
from fusepass.patterns.partition import Partition


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """The operators that `function` calls, as they are; nodes carry fake tensors."""
    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*inputs)


def exported(module: nn.Module, *inputs: torch.Tensor) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The functional graph of `module` as AOTAutograd makes it, and its arguments: parameters, buffers, `inputs`."""
    with torch.no_grad():
        graph, _ = aot_export_module(_Tuple(module), inputs, trace_joint=False, decompositions={})
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, [*module.parameters(), *module.buffers(), *inputs]


class _Tuple(nn.Module):
    """AOTAutograd wants a tuple of results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.module(*inputs)
        return result if isinstance(result, tuple) else (result,)


def run_regions(graph: fx.GraphModule, parts: Partition, arguments: Sequence[torch.Tensor]) -> Any:
    """The result of `graph` with each region run as one call of its own operators."""
    targets = {region.name: _single(subgraph(graph, region)) for region in parts.regions}
    ways = {region.name: Edges(region.inputs, region.outputs) for region in parts.regions}
    spliced = splice(graph, parts.regions, ways, targets)
    with torch.no_grad():
        return spliced(*arguments)


def _single(graph: fx.GraphModule) -> Callable[..., Any]:
    def call(*arguments: torch.Tensor) -> Any:
        results = graph(*arguments)
        return results if len(results) > 1 else results[0]

    return call


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether both have the same type, layout and elements; the sign of zero counts, that of NaN does not."""
    if (first.dtype, first.shape, first.stride()) != (second.dtype, second.shape, second.stride()):
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    known = ~first.isnan()
    signs = torch.equal(first.signbit()[known], second.signbit()[known])
    return signs and torch.equal(second.isnan(), ~known) and torch.equal(first[known], second[known])
