"""Tells what Dynamo and AOTAutograd lose, which docs/limits.md names, from wrong results: aliases, and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusepass.numerics.check import Comparison, compare, exact, observe
from fusepass.report.report import CaptureRoute


def is_laid_out_otherwise(module: nn.Module, fused: Any, inputs: Sequence[Tensor], comparison: Comparison) -> bool:
    """Whether Dynamo traced the model, and nothing but strides is wrong: PyTorch's fake tensors have others than eager's."""
    problems = [leaf.problem for leaf in comparison.leaves if leaf.problem]
    if fused.report().capture is not CaptureRoute.DYNAMO or not all(each.startswith("strides ") for each in problems):
        return False
    actual, eager = (
        pytree.tree_map_only(Tensor, Tensor.contiguous, observe(call, inputs, state=module)) for call in (fused, module)
    )
    return compare(actual, eager, exact(module, inputs)).ok


def is_aliased_otherwise(module: nn.Module, fused: Any, shared: Callable[[Any], object]) -> bool:
    """Whether Dynamo traced the model, and `shared` says of it what it says of it under torch.compile without fusepass."""
    if fused.report().capture is not CaptureRoute.DYNAMO:
        return False
    torch._dynamo.reset()  # its limits on recompilation count for code that models share
    return shared(fused) == shared(torch.compile(module, backend="aot_eager"))
