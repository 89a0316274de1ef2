"""Tells results that are nothing but rounding errors from wrong ones.

Where large values cancel, what is left of them depends on the order of a sum, and eager may be nearer to zero by luck or
because it sums in double. The numeric policy, which knows only the result, cannot judge that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusepass.numerics import Comparison, in_float64, observe

ULPS = {torch.float16: 4.0, torch.bfloat16: 4.0, torch.float32: 4.0, torch.float64: 1024.0}
"""The policy's, of float64 or else of float32: in that half types are computed, and only its errors are forgiven."""
CANCELLED = 0.05


class _Largest(TorchDispatchMode):
    """The largest finite number that any operator gives."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                self.value = max(self.value, float(leaf.abs().nan_to_num(0, 0, 0).amax()))
        return result


def is_noise(module: nn.Module, inputs: Sequence[Any], comparison: Comparison, dtype: torch.dtype) -> bool:
    """Whether every leaf that the policy rejects is small beside the values it came from, and its error is theirs.

    A twentieth is small, and the error of those values is what the policy allows for results of their size.
    """
    if dtype not in ULPS:
        return False
    with _Largest() as largest:
        truth = observe(*in_float64(module, inputs))
    oracle = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(truth)[0]}
    computed = torch.promote_types(dtype, torch.float32)
    allowed = ULPS[dtype] * torch.finfo(computed).eps * largest.value
    for leaf in comparison.leaves:
        if not leaf.problem:
            continue
        if not leaf.problem.startswith("max error") or leaf.actual.maximum > allowed:
            return False
        if float(oracle[leaf.path].abs().nan_to_num(0, 0, 0).amax()) > CANCELLED * largest.value:
            return False
    return True
