"""torchvision's models of detection, video and optical flow in training: targets are lists of dicts, results dicts of losses or lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torchvision import models

from tests.sweep.entry import Entry, Inputs

_DETECTION = {"weights_backbone": None, "num_classes": 4}


def entries() -> list[Entry]:
    """One entry per model."""
    return [Entry("torchvision_losses", name, make, inputs) for name, make, inputs in _models()]


def _models() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Inputs]]]:
    for name in models.list_models(module=models.detection):
        sizes = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 64}
        yield name, partial(models.get_model, name, weights=None, **_DETECTION, **sizes), partial(_boxes, name)
    for name in models.list_models(module=models.video):
        video = partial(_video, 16 if name.startswith("mvit") else 8, 224 if name.startswith("mvit") else 64)
        yield name, partial(models.get_model, name, weights=None, num_classes=4), video
    for name in models.list_models(module=models.optical_flow):
        yield name, partial(models.get_model, name, weights=None), _pair


def _boxes(name: str) -> Inputs:
    targets = []
    for count in (2, 1):
        corner = torch.rand(count, 2) * 25
        target = {"boxes": torch.cat([corner, corner + 10 + torch.rand(count, 2) * 25], 1)}
        target["labels"] = torch.randint(1, 2 if name.startswith("keypoint") else 4, (count,))
        target["masks"] = torch.randint(0, 2, (count, 64, 64), dtype=torch.uint8)
        target["keypoints"] = torch.cat([torch.rand(count, 17, 2) * 60, torch.ones(count, 17, 1)], -1)
        targets.append(target)
    return ([torch.rand(3, 64, 64), torch.rand(3, 56, 64)], targets), {}


def _video(frames: int, pixels: int) -> Inputs:
    return (torch.randn(2, 3, frames, pixels, pixels),), {}


def _pair() -> Inputs:
    return (torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)), {"num_flow_updates": 2}
