"""Shapes and strides of what elementwise operators give, without running them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BATCH_NORMALISATIONS = frozenset(
    {
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit_functional.default,
        torch.ops.aten._native_batch_norm_legit_no_training.default,
        torch.ops.aten._native_batch_norm_legit.no_stats,
    }
)
"""On a CPU their first result is channels last where the input is, and contiguous otherwise."""


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that elementwise operators give operands of `shapes`; None where these do not fit."""
    rank = max(map(len, shapes))
    aligned = [(*(1,) * (rank - len(shape)), *shape) for shape in shapes]
    columns = [{size for size in sizes if size != 1} or {1} for sizes in zip(*aligned, strict=True)]
    return None if any(len(sizes) > 1 for sizes in columns) else tuple(min(sizes) for sizes in columns)


def elementwise_strides(shape: Sequence[int], *operands: torch.Tensor) -> tuple[int, ...]:
    """The strides that PyTorch gives the result of an elementwise operator, which has that shape.

    Operands that are all laid out alike keep their layout. Otherwise dimensions keep the order that the first operand
    with an opinion on two of them has. These are `TensorIterator`'s rules (``compute_fast_setup_type`` and
    ``reorder_dimensions`` in ATen/TensorIterator.cpp).
    """
    if all(tuple(operand.shape) == tuple(shape) for operand in operands):
        if all(operand.is_contiguous() for operand in operands):
            return packed(shape, range(len(shape)))
        if len(shape) == 4 and all(operand.is_contiguous(memory_format=torch.channels_last) for operand in operands):
            return packed(shape, (0, 2, 3, 1))
        (strides, *others) = {operand.stride() for operand in operands}
        if not others and strides == _ordered(shape, strides):
            return strides
    return _merged(shape, operands)


def looks_channels_last(tensor: torch.Tensor) -> bool:
    """Whether operators that choose a layout take this one for channels last.

    ``is_channels_last_strides_2d`` and ``3d`` in c10/core/MemoryFormat.h.
    """
    if tensor.dim() not in (4, 5) or tensor.stride(1) == 0:
        return False
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(size, 1)
    return True


def packed(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides without gaps; `order` is the dimensions, outermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(shape[dim], 1)
    return tuple(strides)


def _ordered(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides without gaps of dimensions in the order of `strides`; those of size 1 keep theirs."""
    long = sorted((dim for dim in range(len(shape)) if shape[dim] != 1), key=lambda dim: -strides[dim])
    steps = packed([shape[dim] for dim in long], range(len(long)))
    found = dict(zip(long, steps, strict=True))
    return tuple(found.get(dim, strides[dim]) for dim in range(len(shape)))


def _merged(shape: Sequence[int], operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    rank = len(shape)
    strides = [_broadcast_strides(operand, shape) for operand in operands]

    def goes_after(first: int, second: int) -> int:
        """1 where `first` has the larger stride, -1 where the smaller, 0 where no operand says."""
        for steps in strides:
            a, b = steps[first], steps[second]
            if a == 0 or b == 0:
                continue
            if a != b:
                return 1 if a > b else -1
            if shape[first] > shape[second]:
                return 1
        return 0

    order = list(reversed(range(rank)))  # innermost first
    for place in range(1, rank):
        current = place
        for other in range(place - 1, -1, -1):
            comparison = goes_after(order[other], order[current])
            if comparison > 0:
                order[other], order[current] = order[current], order[other]
                current = other
            elif comparison < 0:
                break
    return packed(shape, order[::-1])


def _broadcast_strides(operand: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    missing = len(shape) - operand.dim()
    own = zip(operand.shape, operand.stride(), shape[missing:], strict=True)
    return (*(0,) * missing, *(0 if size == 1 and wanted != 1 else step for size, step, wanted in own))
