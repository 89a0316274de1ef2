"""Facts of a torch device; apart from `device`, because what makes kernels knows nothing of torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from fusepass.codegen.device import DeviceFacts

_taken_for: ContextVar[DeviceFacts | None] = ContextVar("fusepass_device", default=None)


@contextlib.contextmanager
def taken_for(facts: DeviceFacts) -> Iterator[None]:
    """Generate code for the device that `facts` describe, in place of those of its kind at hand, until the block ends."""
    token = _taken_for.set(facts)
    try:
        yield
    finally:
        _taken_for.reset(token)


def device_facts(device: torch.device) -> DeviceFacts:
    """What schedules need to know of `device`; asked of the driver once for each device.

    Raises:
        ValueError: `device` is neither a CPU nor a CUDA device.
    """
    other = _taken_for.get()
    if other is not None and other.target.value == device.type:
        return other
    if device.type == "cpu":
        return DeviceFacts.cpu()
    if device.type == "cuda":
        return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)
    raise ValueError(f"no kernels can be generated for device {device}; allowed are cpu and cuda")


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks some of what it has
    return DeviceFacts.cuda(properties)
