"""Shorter ways to the same operators: an overload of `torch.ops` goes by its schema at each call.

The functions and methods that users call parse their arguments with code that was generated for them, in about half the
time, and end in the same overload of the same operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    aten._scaled_dot_product_efficient_attention.default: torch._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_flash_attention_for_cpu.default: torch._scaled_dot_product_flash_attention_for_cpu,
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
    aten.cudnn_batch_norm.default: torch.cudnn_batch_norm,
    aten.embedding.default: torch.embedding,
    aten.expand.default: _methods.expand,
    aten.gelu.default: torch._C._nn.gelu,
    aten.max_pool2d_with_indices.default: torch._C._nn.max_pool2d_with_indices,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_batch_norm.default: torch.native_batch_norm,
    aten.native_dropout.default: torch.native_dropout,
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

_CONTIGUOUS = frozenset({aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.mm.default})

_OURS: dict[Any, Callable[..., Any]] = {torch.ops.fusepass.draw.default: draw}
"""Operators that nobody else sees where the dispatcher is left out."""


def shorter(target: Any) -> Any:
    """What to call instead of `target`, an operator's overload, with the same arguments; itself where nothing is known."""
    return SHORTER.get(target) or _OURS.get(target, target)


def gives_contiguous(target: Any) -> bool:
    """Whether an operator's overload gives a contiguous tensor whatever it reads, on every device."""
    return target in _CONTIGUOUS


reinterpret: Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...], int], torch.Tensor] = (
    torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
)
"""The memory of a plain tensor under another shape and other strides, so many elements behind its beginning; to autograd it is no view."""


def plain_cast(node: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """What to call, and with what, in place of an operator that copies a tensor to another type and changes nothing else; None for others."""
    if node.target is not aten._to_copy.default:
        return None
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    plain = {*node.kwargs} <= {"dtype", "layout", "device", "pin_memory"} and not node.kwargs.get("pin_memory")
    same = before.device == after.device and before.layout is after.layout
    if not (plain and same and before.dtype is not after.dtype and "dtype" in node.kwargs):
        return None
    return _methods.to, (node.args[0], node.kwargs["dtype"]), {}


def shorten(graph_module: fx.GraphModule) -> None:
    """Let the graph's operators be called the shorter way, in place."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            node.target, node.args, node.kwargs = plain_cast(node) or (node.target, node.args, node.kwargs)
            node.target = shorter(node.target)
    graph_module.recompile()


_allocators: Any = torch._C._dynamo.guards
EMPTY = {"cpu": _allocators._empty_strided_cpu, "cuda": _allocators._empty_strided_cuda}
"""As `torch.empty_strided`, on the current device and without the dispatcher."""


def cast_all(
    sources: list[torch.Tensor], dtype: torch.dtype, layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[torch.Tensor]:
    """Copies of `sources`, which are of one type and device, in another type, with these shapes and strides."""
    device = sources[0].device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return cast_all(sources, dtype, layouts)
    empty = EMPTY[device.type]
    results = [empty(shape, strides, dtype) for shape, strides in layouts]
    torch._foreach_copy_(results, sources)
    return results
