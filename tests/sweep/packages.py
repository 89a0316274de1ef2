"""The packages that a sweep knows, and which of them are installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from tests.sweep.entry import Entry

NAMES = ("torchvision", "timm", "transformers")
TRAINED = ("torchvision_losses", "transformers_losses")
"""Models of these packages that compute their own losses."""


def installed() -> list[str]:
    """Those that can be imported."""
    return [name for name in NAMES if importlib.util.find_spec(name) is not None]


def entries(package: str) -> list[Entry]:
    """The models of `package`, which must be installed."""
    _declare_torchvision_operators()
    found: list[Entry] = importlib.import_module(f"tests.sweep.{package}_models").entries()
    return found


@functools.cache
def _declare_torchvision_operators() -> torch.library.Library:
    """Declare the operators that importing torchvision describes; timm and transformers import it, too.

    Its wheel is built for CUDA, so that beside a CPU build of torch they are missing. They live as long as the result.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
