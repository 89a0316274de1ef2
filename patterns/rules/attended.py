"""PyTorch's kernels for attention: which of them serves tensors that are laid out so, and how it lays out its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import fx
from torch._C import _SDPBackend as SDPBackend  # torch.nn.attention takes 80 ms to import
from torch._ops import OpOverload

from fusepass.codegen.lowering.tracer import Spec
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.rules.builder import shape_of

aten = torch.ops.aten

_HEAD_ALIGNMENT = 8
"""Elements of a head whose multiples the library has kernels for; it pads others in a pass of its own."""

_Rest = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Kernel:
    """An operator of the library for ``queries, keys, values, *args, scale=..., **kwargs``.

    Attributes:
        target: the operator; the first of its results is what is wanted.
        rest: `args` and `kwargs`, given what is added to the scores and whether what lies ahead is hidden.
    """

    target: OpOverload
    rest: Callable[[Any, bool], _Rest]


def _flash(bias: Any, causal: bool) -> _Rest:
    if bias is not None:
        raise Declined("the library adds nothing to the scores in this kernel")
    return (0.0, causal), {}


_ON_CPU = Kernel(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda bias, causal: ((0.0, causal), {} if bias is None else {"attn_mask": bias}),
)
_ON_CUDA = {
    SDPBackend.FLASH_ATTENTION: Kernel(aten._scaled_dot_product_flash_attention.default, _flash),
    SDPBackend.EFFICIENT_ATTENTION: Kernel(
        aten._scaled_dot_product_efficient_attention.default, lambda bias, causal: ((bias, False, 0.0, causal), {})
    ),
    SDPBackend.CUDNN_ATTENTION: Kernel(
        aten._scaled_dot_product_cudnn_attention.default, lambda bias, causal: ((bias, False, 0.0, causal), {})
    ),
}

LIBRARY = frozenset(kernel.target for kernel in (_ON_CPU, *_ON_CUDA.values()))
"""Operators that attend."""


@dataclass(frozen=True)
class Operands:
    """What the library gets: ``[B, H, L, D]``, twice ``[B, H, S, D]``, and what is added as ``[B, H, L, S]``."""

    queries: fx.Node
    keys: fx.Node
    values: fx.Node
    bias: fx.Node | None
    causal: bool
    scale: float

    def kernel(self) -> Kernel:
        """The kernel that PyTorch takes for tensors that are laid out like these, under the settings in force.

        Raises:
            Declined: it has none, or pads the heads for it.
        """
        queries, keys, values = (_empty(node.meta["val"]) for node in (self.queries, self.keys, self.values))
        mask = None if self.bias is None else _empty(self.bias.meta["val"])
        choice = torch._fused_sdp_choice(queries, keys, values, mask, 0.0, self.causal, scale=self.scale)
        if queries.is_cpu and choice == SDPBackend.FLASH_ATTENTION.value:
            return _ON_CPU
        kernel = _ON_CUDA.get(SDPBackend(choice)) if queries.is_cuda else None
        if kernel is None or queries.shape[-1] % _HEAD_ALIGNMENT:
            raise Declined("the library has no kernel for it")
        return kernel


def _empty(value: torch.Tensor) -> torch.Tensor:
    """A tensor that is laid out like `value`."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return torch.empty(extent, dtype=value.dtype, device=value.device).as_strided(value.shape, value.stride())


def attended(found: Match, given: Operands) -> fx.Node:
    """The library's call, and its first result."""
    try:
        kernel = given.kernel()
        result = _laid_out(kernel, given)
    except (RuntimeError, AssertionError) as error:
        raise Declined(str(error)) from error
    args, kwargs = kernel.rest(given.bias, given.causal)
    operands = (given.queries, given.keys, given.values, *args)
    return found.item(found.described((result,), kernel.target, *operands, scale=given.scale, **kwargs), 0)


_FEW = (11, 13, 17)
"""Sizes of which a stride is the product in one way only."""


def _laid_out(kernel: Kernel, given: Operands) -> torch.Tensor:
    """What the result of `kernel` looks like: it is asked how it lays out the result for few elements that are laid out alike.

    Kernels, and versions of PyTorch, differ in that.
    """
    value, sizes = given.queries.meta["val"], shape_of(given.queries)
    if shape_of(given.values)[-1] != sizes[-1]:
        raise Declined("values are longer or shorter than keys")
    small = (*(few if size > 1 else 1 for size, few in zip(sizes, _FEW, strict=False)), sizes[-1])
    operands = tuple(_ordered(node.meta["val"], small) for node in (given.queries, given.keys, given.values))
    made = _strides_given(kernel, operands, given.causal, given.scale)
    return Spec.described(sizes, [_stride(each, small, sizes) for each in made], value.dtype, value.device)


_Laid = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]
"""Sizes, strides, elements, type and device of a tensor."""


@lru_cache(maxsize=256)
def _strides_given(kernel: Kernel, operands: tuple[_Laid, ...], causal: bool, scale: float) -> tuple[int, ...]:
    """The strides of what `kernel` makes of `operands`: layers that differ in sizes alone ask once."""
    given = [
        torch.zeros(extent, dtype=dtype, device=device).as_strided(sizes, strides)
        for sizes, strides, extent, dtype, device in operands
    ]
    args, kwargs = kernel.rest(None, causal)
    strides: tuple[int, ...] = kernel.target(*given, *args, scale=scale, **kwargs)[0].stride()
    return strides


def _ordered(value: torch.Tensor, sizes: tuple[int, ...]) -> _Laid:
    """How a tensor of other sizes lies whose dimensions are in memory in the order of those of `value`, ones where it has ones."""
    order = sorted((dim for dim in range(value.dim()) if sizes[dim] != 1), key=lambda dim: value.stride(dim))
    strides, step, steps = [1] * value.dim(), 1, {1: 1}
    for dim in order:
        strides[dim], step = step, step * sizes[dim]
        steps[value.stride(dim)] = strides[dim]
        steps[value.stride(dim) * value.shape[dim]] = step
    for dim in range(value.dim()):
        if sizes[dim] == 1:
            strides[dim] = steps.get(value.stride(dim), step)
    return sizes, tuple(strides), step, value.dtype, value.device


def _stride(stride: int, small: Sequence[int], sizes: Sequence[int]) -> int:
    """What corresponds to a stride of a dense tensor of the sizes `small` in one of other sizes."""
    dims = [dim for dim, size in enumerate(small) if size != 1]
    chosen = [some for count in range(len(dims) + 1) for some in combinations(dims, count)]
    found = {prod(sizes[dim] for dim in some) for some in chosen if prod(small[dim] for dim in some) == stride}
    if len(found) != 1:
        raise Declined("it is not known how the library lays out its result")
    return found.pop()
