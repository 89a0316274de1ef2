"""Tensors as safetensors files: nothing but names, types, shapes and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusepass.errors import ArtifactError

WEIGHTS, CONSTANTS = "weights.safetensors", "constants.safetensors"


def packed(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A safetensors file of `tensors`, which lie without gaps in it."""
    apart = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    content: bytes = _library().save(apart)
    return content


def unpacked(content: bytes) -> dict[str, torch.Tensor]:
    """The tensors of the file that `packed` made, on the CPU."""
    tensors: dict[str, torch.Tensor] = _library().load(content)
    return tensors


def _library() -> Any:
    try:
        import safetensors.torch  # here: only artifacts need it
    except ImportError as error:
        raise ArtifactError("artifacts keep tensors in safetensors files: pip install safetensors") from error
    return safetensors.torch
