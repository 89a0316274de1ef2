"""Facts of a torch device; apart from `device`, because what makes kernels knows nothing of torch."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusepass.codegen.device import DeviceFacts


def device_facts(device: torch.device) -> DeviceFacts:
    """What schedules need to know of `device`; asked of the driver once for each device.

    Raises:
        ValueError: `device` is neither a CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return DeviceFacts.cpu()
    if device.type == "cuda":
        return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)
    raise ValueError(f"no kernels can be generated for device {device}; allowed are cpu and cuda")


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks some of what it has
    return DeviceFacts.cuda(properties)
