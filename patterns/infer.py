"""What the result of an operator looks like, found without running anything where that is easy.

PyTorch's kernels for the meta device know every case, but the first call of one loads SymPy and often Dynamo: seconds
that the first call of a model would wait for. Here are the cases that rewrites make: floats of one type, plain layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass.codegen.lowering.tracer import Spec, meta_like
from fusepass.patterns.analysis.layout import broadcast, elementwise_strides, looks_channels_last
from fusepass.patterns.arguments import bound

aten = torch.ops.aten

_REDUCTIONS = frozenset({aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.logsumexp, aten.prod})
_PRODUCTS = frozenset({aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot})
_AVERAGES = frozenset({aten.avg_pool2d, aten.avg_pool3d})
_TESTS = frozenset(
    {
        aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.isfinite, aten.isposinf,
        aten.isneginf, aten.signbit, aten.logical_and, aten.logical_or, aten.logical_xor, aten.logical_not,
    }
)  # fmt: skip
_OTHERWISE = frozenset({aten.where, aten._to_copy, aten.clone, aten.copy, aten.polar, aten.complex, aten.fill})
"""Operators tagged as pointwise whose result has a type or a layout of its own."""


def infer(target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
    """The result of a call on `device` as `Spec`s, given nodes, whose ``meta["val"]`` is looked at, and plain values.

    Raises:
        RuntimeError, IndexError, ValueError: the operator does not take these arguments, or the layout of its result is not known.
    """
    given = bound(target, *fx.map_arg((tuple(args), kwargs), lambda node: node.meta["val"]))
    layout = _plain(target, given)
    if layout is not None:
        shape, strides, dtype = layout
        return Spec.described(shape, strides, dtype, device)
    placed = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
    values = fx.map_arg((tuple(args), kwargs | placed), lambda node: meta_like(node.meta["val"]))
    return pytree.tree_map_only(Tensor, lambda tensor: Spec.of(tensor, device), target(*values[0], **values[1]))


def called(
    graph: fx.Graph, target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device
) -> fx.Node:
    """A new node of `graph` for a call, described as `infer` does."""
    made = graph.call_function(target, tuple(args), kwargs)
    made.meta["val"] = infer(target, args, kwargs, device)
    return made


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def _plain(target: OpOverload, given: dict[str, Any]) -> _Layout | None:
    """Shape, strides and type of the one result; None where this is not one of the easy cases."""
    packet = target.overloadpacket
    operands: list[Tensor] = []
    for value in given.values():
        parts = value if isinstance(value, tuple | list) else (value,)
        operands += [part for part in parts if isinstance(part, Tensor)]
    if packet is aten.full and given["dtype"] is not None:
        return _contiguous(tuple(given["size"]), given["dtype"])
    if target is aten.masked_fill.Scalar:
        return _contiguous(broadcast(*(tuple(operand.shape) for operand in operands)), operands[0].dtype)
    if packet is aten.logical_not:
        return _elementwise(operands, torch.bool)
    types = {operand.dtype for operand in operands}
    if len(types) != 1 or not operands[0].is_floating_point() or given.get("dtype") is not None:
        return None
    (dtype,) = types
    if packet is aten.view:
        return _contiguous(_viewed(operands[0], given["size"]), dtype)
    if packet is aten.permute:
        return _permuted(operands[0], given["dims"], dtype)
    if packet in _REDUCTIONS:
        return _contiguous(_reduced(operands[0], given), dtype)
    if packet in _PRODUCTS:
        return _contiguous(_multiplied(operands[-2:]), dtype)
    if packet in (aten.convolution, aten._convolution):
        if not all(map(is_plain, operands)):
            raise RuntimeError("a convolution's library decides how its result is laid out")  # the meta kernel guesses
        return _contiguous(_convolved(given), dtype)
    if packet in _AVERAGES and is_plain(operands[0]) and not given["ceil_mode"]:
        return _contiguous(_pooled(operands[0].shape, given), dtype)
    if packet is aten.cat and not any(map(looks_channels_last, operands)):
        return _contiguous(_joined(operands, given["dim"]), dtype)
    if torch.Tag.pointwise in target.tags and packet not in _OTHERWISE and len(target._schema.returns) == 1:
        number = () if isinstance(given.get("other", operands[0]), Tensor) else (torch.empty((), device="meta"),)
        return _elementwise((*operands, *number), torch.bool if packet in _TESTS else dtype)
    return None


def _elementwise(operands: Sequence[Tensor], dtype: torch.dtype) -> _Layout | None:
    """The layout that PyTorch's iterator gives."""
    shape = broadcast(*(tuple(operand.shape) for operand in operands))
    return None if shape is None or 0 in shape else (shape, elementwise_strides(shape, *operands), dtype)


def _viewed(operand: Tensor, size: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a view of what lies at the beginning of memory as a new tensor does."""
    known = [extent for extent in size if extent != -1]
    if not is_plain(operand) or operand.storage_offset() or min(known, default=1) < 1 or len(size) > len(known) + 1:
        return None
    shape = tuple(operand.numel() // prod(known) if extent == -1 else extent for extent in size)
    return shape if prod(shape) == operand.numel() else None


def _permuted(operand: Tensor, order: Sequence[int], dtype: torch.dtype) -> _Layout | None:
    """What lies at the beginning of memory, with its dimensions in another order."""
    rank = operand.dim()
    if operand.storage_offset() or sorted(dim + rank * (dim < 0) for dim in order) != list(range(rank)):
        return None
    strides = operand.stride()
    return tuple(operand.shape[dim] for dim in order), tuple(strides[dim] for dim in order), dtype


def _pooled(shape: Sequence[int], given: dict[str, Any]) -> tuple[int, ...] | None:
    window = given["kernel_size"]
    settings = (window, given["stride"] or window, given["padding"])
    if any(len(setting) != len(window) for setting in settings) or len(window) not in (2, 3):
        return None
    first = len(shape) - len(window)
    extents = [
        (extent + 2 * padding - size) // stride + 1
        for extent, size, stride, padding in zip(shape[first:], *settings, strict=True)
    ]
    return (*shape[:first], *extents) if min(extents) > 0 else None


def _joined(parts: Sequence[Tensor], dim: int) -> tuple[int, ...] | None:
    """The shape of parts behind each other along `dim`."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    fits = all(len(part.shape) == len(shape) and prod(part.shape) for part in parts)
    alike = {tuple(size for at, size in enumerate(part.shape) if at != dim % len(shape)) for part in parts}
    return tuple(shape) if fits and len(alike) == 1 else None


def _reduced(operand: Tensor, given: dict[str, Any]) -> tuple[int, ...]:
    rank = operand.dim()
    chosen = given.get("dim")
    dims = range(rank) if chosen in (None, []) else (chosen,) if isinstance(chosen, int) else chosen
    if not all(-rank <= dim < rank for dim in dims):
        raise IndexError(f"{rank} dimensions have none of {list(dims)}")
    dims = {dim % rank for dim in dims}
    if not given.get("keepdim"):
        return tuple(size for dim, size in enumerate(operand.shape) if dim not in dims)
    return tuple(1 if dim in dims else size for dim, size in enumerate(operand.shape))


def _multiplied(operands: Sequence[Tensor]) -> tuple[int, ...] | None:
    left, right = operands
    inner = right.shape[-2] if right.dim() > 1 else right.shape[0]
    if left.shape[-1] != inner or left.shape[:-2] != right.shape[:-2]:
        return None
    return (*left.shape[:-1], *right.shape[-1:]) if right.dim() > 1 else tuple(left.shape[:-1])


def _convolved(given: dict[str, Any]) -> tuple[int, ...] | None:
    data, weight = given["input"].shape, given["weight"].shape
    settings = zip(*(given[name] for name in ("stride", "padding", "dilation", "output_padding")), strict=True)
    extents = []
    for size, taps, (stride, padding, dilation, extra) in zip(data[2:], weight[2:], settings, strict=True):
        reach = dilation * (taps - 1)
        if given["transposed"]:
            extents.append((size - 1) * stride - 2 * padding + reach + extra + 1)
        else:
            extents.append((size + 2 * padding - reach - 1) // stride + 1)
    if given["transposed"]:
        fits, channels = data[1] == weight[0], weight[1] * given["groups"]
    else:
        fits, channels = data[1] == weight[1] * given["groups"], weight[0]
    return (data[0], channels, *extents) if fits and min(extents) > 0 else None


def _contiguous(shape: tuple[int, ...] | None, dtype: torch.dtype) -> _Layout | None:
    return None if shape is None else (shape, contiguous_strides(shape), dtype)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of that shape."""
    return tuple(prod(max(size, 1) for size in shape[place + 1 :]) for place in range(len(shape)))


def is_plain(tensor: Tensor) -> bool:
    """Whether `tensor` has the strides of a new one, in dimensions of size 1, too."""
    return tensor.stride() == contiguous_strides(tensor.shape)
