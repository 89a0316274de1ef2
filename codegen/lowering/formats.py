"""The memory format in which the library runs a convolution: the caller's, or channels last."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch


class AnchorFormat(enum.Enum):
    """How a convolution's input and result lie in memory."""

    CALLER = "as is"
    CHANNELS_LAST = "channels last"


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


def is_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a dense tensor lies channels last, dimensions of one element aside."""
    wanted = channels_last_strides(shape)
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, wanted, strict=True))
