"""The memory format in which the library runs a convolution: the caller's, or channels last."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import fx

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.source import Target


class AnchorFormat(enum.Enum):
    """How a convolution's input and result lie in memory."""

    CALLER = "as the caller has it"
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


def anchor_formats(graph: fx.GraphModule, facts: DeviceFacts) -> tuple[AnchorFormat, ...]:
    """The formats that the convolution of a region may run in, the one to choose without a measurement first.

    There is a choice where a region has one two- or three-dimensional convolution of a dense input that does not lie
    channels last. The rule for the first, after TorchInductor's ``decide_layout_opt``: on CUDA, cuDNN's fastest kernels
    for tensor cores work channels last and surround themselves with conversions otherwise, so two-dimensional
    convolutions go channels last. They stay where

    - they have groups (cuDNN's grouped kernels are slower channels last);
    - the input has fewer than four channels, so that an access of 16 bytes does not lie in one pixel;
    - the result has one pixel per channel, where both formats are the same;
    - numbers are float32 and TF32 is not allowed: no tensor core, hence no conversion to avoid. float64 has no
      channels-last kernels at all.

    Three-dimensional ones stay, too: which format wins there differs from case to case.
    """
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    if len(nodes) != 1:
        return (AnchorFormat.CALLER,)
    (node,) = nodes
    x, weight, result = node.args[0].meta["val"], node.args[1].meta["val"], node.meta["val"]
    if x.dim() not in MEMORY_FORMATS or x.dtype is torch.float64 or not _has_choice(x, result):
        return (AnchorFormat.CALLER,)
    if facts.target is Target.CUDA and _prefers_channels_last(x, weight, result, groups=node.args[8]):
        return (AnchorFormat.CHANNELS_LAST, AnchorFormat.CALLER)
    return (AnchorFormat.CALLER, AnchorFormat.CHANNELS_LAST)


def _has_choice(x: torch.Tensor, result: torch.Tensor) -> bool:
    if x.numel() == 0 or result.numel() == 0:
        return False
    return not is_channels_last(x.shape, x.stride()) and not is_channels_last(result.shape, result.stride())


def _prefers_channels_last(x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, *, groups: int) -> bool:
    if x.dim() != 4 or groups != 1 or x.shape[1] < 4:
        return False
    return x.dtype is not torch.float32 or torch.backends.cudnn.allow_tf32
