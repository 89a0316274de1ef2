"""torchvision's classification and segmentation models, all of them, with 64 by 64 pixels where they allow it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torchvision import models

from tests.sweep.entry import Entry, images

_PIXELS = 64
_OTHER_PIXELS = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 70}
"""The first has too many windows for 64, the second a grid of 7 by 7, and the third patches of 14."""


def entries() -> list[Entry]:
    """One entry per model."""
    segmentation = models.list_models(module=models.segmentation)
    names = models.list_models(module=models) + segmentation
    return [
        Entry(
            "torchvision",
            name,
            partial(models.get_model, name, weights=None, **_options(name, name in segmentation)),
            partial(images, _OTHER_PIXELS.get(name, _PIXELS)),
        )
        for name in names
    ]


def _options(name: str, segments: bool) -> dict[str, Any]:
    if segments:
        return {"weights_backbone": None}
    if name.startswith("vit_"):
        return {"image_size": _OTHER_PIXELS.get(name, _PIXELS)}
    if name in ("googlenet", "inception_v3"):
        return {"init_weights": False}  # True draws from a truncated normal distribution, for minutes
    return {}
