"""Regions of pointwise operators that do not depend on each other and walk the same elements: one kernel does for both."""

from __future__ import annotations

import torch

from fusepass.codegen.ir.program import FEW_POINTS
from fusepass.patterns.region import Region

Elements = tuple[str, torch.Size, tuple[int, ...]]


def elements(region: Region) -> Elements | None:
    """What a region of pointwise operators walks: device, shape and strides of its results, if all have the same."""
    if region.pattern != "pointwise":
        return None
    results = [node.meta["val"] for node in region.outputs]
    kinds = {(str(result.device), result.shape, result.stride()) for result in results}
    return kinds.pop() if len(kinds) == 1 else None


def pays(first: Region, second: Region) -> bool:
    """Whether two regions over the same elements are better as one: they read a value of that shape, or have few elements."""
    shape = first.outputs[0].meta["val"].shape
    both = set(first.inputs) & set(second.inputs)
    return shape.numel() <= FEW_POINTS or any(node.meta["val"].shape == shape for node in both)
