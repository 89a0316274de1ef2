"""Multiply-adds that Dynamo writes for ``addcmul_`` and ``add_`` with a factor, as PyTorch's operators again, which have generated code.

From PyTorch 2.13 on Dynamo has them as an operator of Inductor's, which is there only once Inductor was loaded.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten


def spell_out(graph: fx.Graph) -> None:
    """Let sums say ``self + product`` where `graph` has ``prims.fma``, in place; both round to within one unit of the last place.

    Args:
        graph: flat; every node that stands for a tensor has it in ``meta["val"]``.
    """
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or node.target._schema.name != "prims::fma" or node.kwargs:
            continue
        left, right, other = node.args
        if isinstance(left, fx.Node) and isinstance(right, fx.Node) and isinstance(other, fx.Node):
            node.target, node.args = aten.addcmul.default, (other, left, right)
        elif isinstance(left, fx.Node) and isinstance(right, int | float) and isinstance(other, fx.Node):
            node.target, node.args, node.kwargs = aten.add.Tensor, (other, left), {"alpha": right}
