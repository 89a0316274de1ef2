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
from fusepass.patterns.arguments import bound

aten = torch.ops.aten

_REDUCTIONS = frozenset({aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.logsumexp, aten.prod})
_PRODUCTS = frozenset({aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot})
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
        RuntimeError, IndexError: the operator does not take these arguments, or the layout of its result is not known.
    """
    given = bound(target, *fx.map_arg((tuple(args), kwargs), lambda node: node.meta["val"]))
    layout = _plain(target, given)
    if layout is not None:
        shape, strides, dtype = layout
        return Spec.described(shape, strides, dtype, device)
    values = fx.map_arg((tuple(args), kwargs), lambda node: meta_like(node.meta["val"]))
    return pytree.tree_map_only(Tensor, lambda tensor: Spec.of(tensor, device), target(*values[0], **values[1]))


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def _plain(target: OpOverload, given: dict[str, Any]) -> _Layout | None:
    """Shape, strides and type of the one result; None where this is not one of the easy cases."""
    packet = target.overloadpacket
    operands = [value for value in given.values() if isinstance(value, Tensor)]
    types = {operand.dtype for operand in operands}
    if len(types) != 1 or not operands[0].is_floating_point() or given.get("dtype") is not None:
        return None
    (dtype,) = types
    if packet in _REDUCTIONS:
        return _contiguous(_reduced(operands[0], given), dtype)
    if packet in _PRODUCTS:
        return _contiguous(_multiplied(operands[-2:]), dtype)
    if packet is aten.convolution:
        if not all(map(is_plain, operands)):
            raise RuntimeError("a convolution's library decides how its result is laid out")  # the meta kernel guesses
        return _contiguous(_convolved(given), dtype)
    if torch.Tag.pointwise in target.tags and packet not in _OTHERWISE and len(target._schema.returns) == 1:
        return _elementwise(operands, torch.bool if packet in _TESTS else dtype)
    return None


def _elementwise(operands: Sequence[Tensor], dtype: torch.dtype) -> _Layout | None:
    """The layout that PyTorch's iterator gives, for operands that are all contiguous or all laid out in one other way."""
    ranks = max(operand.dim() for operand in operands)
    if all(map(is_plain, operands)):
        sizes = [(1,) * (ranks - operand.dim()) + tuple(operand.shape) for operand in operands]
        shape = tuple(next((size for size in column if size != 1), 1) for column in zip(*sizes, strict=True))
        fits = all(size in (1, extent) for each in sizes for size, extent in zip(each, shape, strict=True))
        return _contiguous(shape, dtype) if fits else None
    alike = {(tuple(operand.shape), operand.stride()) for operand in operands if operand.dim()}
    if len(alike) != 1:
        return None
    ((shape, strides),) = alike
    dense = sorted(zip(strides, shape, strict=True))
    packed = all(stride == prod(size for _, size in dense[:place]) for place, (stride, _) in enumerate(dense))
    return (shape, strides, dtype) if packed and 1 not in shape and 0 not in shape else None


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
