"""The memory format in which a convolution runs: the caller's, channels last, or channel by channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusepass.codegen.ir.anchor_format import AnchorFormat as AnchorFormat
from fusepass.codegen.ir.index import contiguous_strides

MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""PyTorch's channels-last format by number of dimensions."""


def channels_last_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor of `shape` (batch, channels, space) whose channels are neighbours."""
    channels, *space = shape[1:]
    strides, step = [0] * len(shape), channels
    for dimension in reversed(range(2, len(shape))):
        strides[dimension] = step
        step *= space[dimension - 2]
    strides[0], strides[1] = step, 1
    return tuple(strides)


def strides_of(anchor_format: AnchorFormat, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor of `shape` that lies in a format other than the caller's."""
    last = anchor_format is AnchorFormat.CHANNELS_LAST
    return channels_last_strides(shape) if last else contiguous_strides(shape)


def memory_format(anchor_format: AnchorFormat, dimensions: int) -> torch.memory_format:
    """PyTorch's name for that format."""
    return MEMORY_FORMATS[dimensions] if anchor_format is AnchorFormat.CHANNELS_LAST else torch.contiguous_format


def lies(anchor_format: AnchorFormat, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a dense tensor lies in a format other than the caller's, dimensions of one element aside."""
    wanted = strides_of(anchor_format, shape)
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, wanted, strict=True))


def is_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a dense tensor lies channels last, dimensions of one element aside."""
    return lies(AnchorFormat.CHANNELS_LAST, shape, strides)
