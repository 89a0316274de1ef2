"""What of PyTorch an artifact was made with, compared with the PyTorch of this process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from fusepass.errors import ArtifactError


def release() -> str:
    """PyTorch's version without what it was built for, such as ``2.13.0``: its operators are the same in ``+cpu`` and ``+cu130``."""
    return torch.__version__.partition("+")[0]


def settings() -> dict[str, str]:
    """Settings of the process that count for what was generated, by what they are called."""
    return {
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn.conv.fp32_precision": str(torch._C._get_fp32_precision_getter("cuda", "conv")),
    }


def autocast() -> dict[str, str]:
    """The types that autocast casts to now, by kind of device; empty where it is off."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return {kind: str(torch.get_autocast_dtype(kind)).removeprefix("torch.") for kind in kinds}


def described(devices: Collection[str]) -> dict[str, Any]:
    """What `check` compares, for the manifest of an artifact that runs on `devices`."""
    return {"torch": release(), "devices": sorted(devices), "settings": settings()}


def check(manifest: Mapping[str, Any], path: object) -> None:
    """Compare an artifact's surroundings with those of this process.

    Raises:
        ArtifactError: it was saved by another release of PyTorch, or under other settings.
    """
    if manifest["torch"] != release():
        raise ArtifactError(
            f"{path} was saved with PyTorch {manifest['torch']}, and this is {release()}, whose operators may differ; save it anew"
        )
    for name, value in settings().items() if any(each.startswith("cuda") for each in manifest["devices"]) else ():
        if manifest["settings"].get(name) != value:
            raise ArtifactError(
                f"{path} was saved where {name} was {manifest['settings'].get(name)!r}, and here it is {value!r}; set it as it was"
            )
