"""What a fused call expects of a tensor, or gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusepass.codegen.ir.program import Buffer
from fusepass.codegen.lowering.tensor import DTYPES

_TORCH = {ours: theirs for theirs, ours in DTYPES.items()}


@dataclass(frozen=True)
class Meta:
    """What a fused call expects of an argument, or gives as a result."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @classmethod
    def of_buffer(cls, buffer: Buffer) -> Meta:
        return cls(buffer.shape, buffer.strides, _TORCH[buffer.dtype])


def with_strides(tensor: torch.Tensor, expected: Meta) -> torch.Tensor:
    """`tensor` itself, its memory seen with the expected strides where these lead to the same elements, or else a copy with them.

    Strides of dimensions of one element lead nowhere. Where several elements are to share memory, as in what ``expand`` gives, they are equal.
    """
    if tensor.stride() == expected.strides:
        return tensor
    steps = zip(expected.shape, tensor.stride(), expected.strides, strict=True)
    if all(size == 1 or own == other for size, own, other in steps):
        return tensor.as_strided(expected.shape, expected.strides)
    for dim, stride in enumerate(expected.strides):
        if stride == 0 and expected.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    copy = torch.empty_strided(tensor.shape, expected.strides, dtype=expected.dtype, device=tensor.device)
    return copy.copy_(tensor).as_strided(expected.shape, expected.strides)


def laid(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """`with_strides` for a graph's code, where all arguments are written out."""
    return tensor if tensor.stride() == strides else with_strides(tensor, Meta(shape, strides, tensor.dtype))


def as_seen(tensor: torch.Tensor, expected: Meta) -> torch.Tensor:
    """The memory of `tensor`, which has no gaps, with the expected shape and strides."""
    if tuple(tensor.shape) == expected.shape and tensor.stride() == expected.strides:
        return tensor
    return tensor.as_strided(expected.shape, expected.strides)
