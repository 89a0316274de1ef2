"""Anchors: convolutions and matrix products, run by the library without their bias, which joins the chain behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusepass.codegen.ir.expr import Op
from fusepass.codegen.ir.program import CONVERSION_TARGET, LibraryCall, Ref, Role
from fusepass.codegen.lowering.formats import AnchorFormat, lies, memory_format, strides_of
from fusepass.codegen.lowering.registry import Call, lowers
from fusepass.codegen.lowering.tensor import Tensor, Unsupported, dtype_of

aten = torch.ops.aten

PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})
"""Anchors that read a transposed operand, which the library makes for them. Convolutions read what a region is given."""


def _library(
    call: Call,
    target: str,
    *args: Any,
    strides: Sequence[int] | None = None,
    tf32: bool = False,
    item: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """The result of an ATen call on tensors that exist in memory, or that `item` of several; its strides are by default the fake result's.

    `tf32` says that the library rounds float32 operands.
    """
    context, value = call.context, call.value
    strides = value.stride() if strides is None else strides
    buffer = context.add_buffer(f"{call.origin}_out", dtype_of(value.dtype), value.shape, strides, Role.ANCHOR)
    given = tuple((name, value) for name, value in kwargs.items() if value != 1)
    tf32 = tf32 and value.dtype is torch.float32
    arguments = tuple(_argument(call, arg) for arg in args)
    context.calls.append(LibraryCall(buffer.name, target, arguments, given, tf32, item))
    return context.read(buffer)


def allows_tf32() -> bool:
    """Whether float32 matrices may be rounded to TF32; a signature compares the setting, with all of PyTorch's."""
    return bool(torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32")


def _argument(call: Call, value: Any) -> object:
    if isinstance(value, Tensor):
        return Ref(_stored(call, value))
    if isinstance(value, list | tuple):
        return tuple(_argument(call, item) for item in value)
    return value


def _stored(call: Call, tensor: Tensor) -> str:
    """The buffer that holds `tensor`: an argument of the region, or a transpose of one by a library call."""
    buffer = call.context.stored.get(tensor)
    if buffer is None:
        raise Unsupported(f"{call.origin} of a value computed inside the region")
    return buffer


def library_view(call: Call, base: str) -> str:
    """The buffer of the view `call` of the stored buffer `base`, made by the library for an anchor that reads it."""
    context, value = call.context, call.value
    buffer = context.add_buffer(
        f"{base}_{call.origin}", dtype_of(value.dtype), value.shape, value.stride(), Role.ANCHOR
    )
    rest = tuple(_argument(call, arg) for arg in call.node.args[1:])
    context.calls.append(LibraryCall(buffer.name, str(call.node.target), (Ref(base), *rest)))
    return buffer.name


@lowers(aten.convolution.default)
def _convolution(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    # The library lays the weight as its input, if it is not yet: it is small, and the parameter may change between calls.
    x, strides = _in_format(call, x), _strides(call, call.value.shape)
    tf32 = call.context.tf32
    result = _library(call, "aten.convolution.default", x, weight, None, *geometry, strides=strides, tf32=tf32)
    if bias is None:
        return result
    spatial = len(result.shape) - 2
    return _plus(call, result, call.context.reshape(bias, (*bias.shape, *(1,) * spatial)))


@lowers(aten._convolution.default)
def _convolution_with_flags(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """As `aten.convolution`, with cuDNN's settings given: rewrites call it for full precision, without a bias."""
    if bias is not None:
        raise Unsupported(f"{call.origin} with a bias")
    return _library(call, "aten._convolution.default", x, weight, None, *rest)


@lowers(aten.convolution_backward.default)
def _weight_gradient(
    call: Call, gradient: Tensor, x: Tensor, weight: Tensor, sizes: Any, *geometry: Any
) -> tuple[Tensor | None, ...]:
    """The gradient of the weight; `fusepass.training.gradients` leaves no other to this operator."""
    if not asks_for_weight(geometry[-1]):
        raise Unsupported(f"{call.origin} of several gradients")
    gradient, x = _in_format(call, gradient), _in_format(call, x)
    target = "aten.convolution_backward.default"
    return (
        None,
        _library(call, target, gradient, x, weight, None, *geometry, strides=_strides(call, weight.shape), item=1),
        None,
    )


def asks_for_weight(mask: Sequence[bool]) -> bool:
    """Whether an `aten.convolution_backward` with this ``output_mask`` gives the gradient of the weight, and nothing else."""
    return tuple(mask) == (False, True, False)


def _strides(call: Call, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a result of the library that lies as the anchor's format says; None for the caller's."""
    chosen = call.context.anchor_format
    return None if chosen is AnchorFormat.CALLER else strides_of(chosen, shape)


def _in_format(call: Call, x: Tensor) -> Tensor:
    """The stored `x` as the anchor's format says: itself, or a copy."""
    context, source, chosen = call.context, _stored(call, x), call.context.anchor_format
    (stored,) = (buffer for buffer in context.buffers if buffer.name == source)
    if chosen is AnchorFormat.CALLER or lies(chosen, stored.shape, stored.strides):
        return x
    name = f"{source}_{chosen.value.replace(' ', '_')}"
    buffer = context.add_buffer(name, x.dtype, x.shape, strides_of(chosen, x.shape), Role.ANCHOR)
    layout = (("memory_format", memory_format(chosen, len(x.shape))),)
    context.calls.append(LibraryCall(buffer.name, CONVERSION_TARGET, (Ref(source),), layout))
    copy = context.read(buffer)
    context.stored[copy] = buffer.name
    return copy


@lowers(aten.mm.default, aten.bmm.default)
def _product(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return _library(call, f"aten.{call.origin}.default", a, b, tf32=allows_tf32())


@lowers(aten.addmm.default, aten.baddbmm.default)
def _add_product(call: Call, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * bias + alpha * (a @ b)``; with a beta of 0 the bias may be NaN and does not count."""
    if a.dtype.compute is not a.dtype:
        # The library adds the bias before it rounds to half; a separate addition would round twice.
        return _library(call, f"aten.{call.origin}.default", bias, a, b, beta=beta, alpha=alpha)
    target = "aten.mm.default" if call.origin == "addmm" else "aten.bmm.default"
    product = _library(call, target, a, b, tf32=allows_tf32())
    scaled = _times(call, product, alpha)
    return _plus(call, scaled, _times(call, bias, beta)) if beta else scaled


def _times(call: Call, value: Tensor, factor: float) -> Tensor:
    if factor == 1:
        return value
    return call.context.pointwise(Op.MUL, (value, call.context.constant(factor, (), value.dtype)), value.dtype)


def _plus(call: Call, result: Tensor, bias: Tensor) -> Tensor:
    return call.context.pointwise(Op.ADD, (result, call.context.cast(bias, result.dtype)), result.dtype)
