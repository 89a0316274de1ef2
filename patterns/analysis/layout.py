"""Shapes and strides of what elementwise operators give, without running them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that elementwise operators give operands of `shapes`, which must be compatible."""
    rank = max(map(len, shapes))
    aligned = [(*(1,) * (rank - len(shape)), *shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*aligned, strict=True))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a row-major tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def elementwise_strides(*operands: torch.Tensor) -> tuple[int, ...]:
    """The strides that PyTorch gives the result of an elementwise operator.

    Dimensions keep the order that the first operand with an opinion on two of them has: `TensorIterator`'s rule
    (``reorder_dimensions`` in ATen/TensorIterator.cpp).
    """
    shape = broadcast(*(tuple(operand.shape) for operand in operands))
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
    result, step = [0] * rank, 1
    for dim in order:
        result[dim], step = step, step * shape[dim]
    return tuple(result)


def _broadcast_strides(operand: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    missing = len(shape) - operand.dim()
    own = zip(operand.shape, operand.stride(), shape[missing:], strict=True)
    return (*(0,) * missing, *(0 if size == 1 and wanted != 1 else step for size, step, wanted in own))
