"""What a sweep runs: a model of a package, its inputs, and what to call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


@dataclass(frozen=True)
class Entry:
    """A model with random weights.

    Attributes:
        package: where it comes from.
        name: what the package calls it.
        make: builds it; seeds nothing.
        inputs: the arguments of a call, a batch of two.
    """

    package: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]


def images(pixels: int, channels: int = 3) -> Inputs:
    """Two square images of normally distributed float32."""
    return (torch.randn(2, channels, pixels, pixels),), {}
