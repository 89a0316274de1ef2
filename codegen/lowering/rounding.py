"""Where a region rounds a 16-bit value as eager does: in between, halves are computed in float32, and round where they are stored.

What follows may decide by the value, as a comparison does, and then its last bits are all that counts. `ROUNDED` in a node's
``meta`` says that the result of its operator has the bits that memory would hold, for whoever reads it. The patterns set it.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Tensor

ROUNDED = "fusepass_rounded"

_HALVES = (torch.float16, torch.bfloat16)

_library = torch.library.Library("fusepass", "FRAGMENT")
_library.define("rounded(Tensor value) -> Tensor")
_library.impl("rounded", torch.clone, "CompositeExplicitAutograd")
ROUNDING = torch.ops.fusepass.rounded.default


def is_half(value: object) -> bool:
    """Whether `value` is a tensor of 16-bit floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.dtype in _HALVES


def with_roundings(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph` with an operator that rounds behind each one whose result is to be; `graph` itself is not changed."""
    if not any(ROUNDED in node.meta for node in graph.graph.nodes):
        return graph
    copied, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        copies[node] = copied.node_copy(node, copies.__getitem__)
        if ROUNDED in node.meta and node.op == "call_function" and is_half(node.meta["val"]):
            exact = copied.call_function(ROUNDING, (copies[node],))
            exact.meta = dict(node.meta)
            copies[node] = exact
    return _LazyGraphModule(graph, copied)


def unrounded(node: fx.Node) -> fx.Node:
    """The operator whose result `node` is, or rounds."""
    return node.args[0] if node.target is ROUNDING else node  # type: ignore[return-value]


@lowers(ROUNDING)
def _rounded(call: Call, a: Tensor) -> Tensor:
    return a if a in call.context.stored else call.context.rounded(a)
