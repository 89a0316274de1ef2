"""Shorter ways to the same operators: an overload of `torch.ops` goes by its schema at each call.

The functions and methods that users call parse their arguments with code that was generated for them, in about half the
time, and end in the same overload of the same operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fusepass.codegen.lowering.dropout import draw

aten = torch.ops.aten
_methods = torch._C.TensorBase

SHORTER: dict[Any, Callable[..., Any]] = {
    aten._convolution.default: torch._convolution,
    aten._foreach_add_.Scalar: torch._foreach_add_,
    aten._foreach_copy_.default: torch._foreach_copy_,
    aten._softmax.default: torch._softmax,
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.amax.default: torch.amax,
    aten.baddbmm.default: torch.baddbmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.convolution.default: torch.convolution,
    aten.copy_.default: _methods.copy_,
    aten.expand.default: _methods.expand,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_group_norm.default: torch.native_group_norm,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.select.int: torch.select,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: _methods.view,
}


_OURS: dict[Any, Callable[..., Any]] = {torch.ops.fusepass.draw.default: draw}
"""Operators that nobody else sees where the dispatcher is left out."""


def shorter(target: Any) -> Any:
    """What to call instead of `target`, an operator's overload, with the same arguments; itself where nothing is known."""
    return SHORTER.get(target, target)


def shorten(graph_module: fx.GraphModule) -> None:
    """Let the graph's operators be called the shorter way, in place."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            node.target = _OURS.get(node.target) or shorter(node.target)
    graph_module.recompile()


def cast_all(sources: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Copies of `sources`, which are of one type, in another."""
    results = [torch.empty_like(source, dtype=dtype) for source in sources]
    torch._foreach_copy_(results, sources)
    return results
