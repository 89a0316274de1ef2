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
    """`tensor` itself, or a copy of it with the expected strides."""
    if tensor.stride() == expected.strides:
        return tensor
    copy = torch.empty_strided(expected.shape, expected.strides, dtype=expected.dtype, device=tensor.device)
    return copy.copy_(tensor)


def as_seen(tensor: torch.Tensor, expected: Meta) -> torch.Tensor:
    """The memory of `tensor`, which has no gaps, with the expected shape and strides."""
    if tuple(tensor.shape) == expected.shape and tensor.stride() == expected.strides:
        return tensor
    return tensor.as_strided(expected.shape, expected.strides)
