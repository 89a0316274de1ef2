"""Tells results that are nothing but rounding errors from wrong ones.

Where large values cancel, what is left of them depends on the order of a sum, and eager may be nearer to zero by luck or
because it sums in double. The numeric policy, which knows only the result, cannot judge that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusepass.numerics.check import Comparison, exact

ULPS = {torch.float16: 4.0, torch.bfloat16: 4.0, torch.float32: 4.0, torch.float64: 1024.0}
"""The policy's, of float64 or else of float32: in that half types are computed, and only its errors are forgiven."""
CANCELLED = 0.05
_ROUGH_RUNS = 3


class _Largest(TorchDispatchMode):
    """The largest finite number that any operator gives, and the most elements that one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0.0
        self.elements = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _has_no_values(func):
            return result
        self.value = max(self.value, _largest(result))
        read = [leaf.numel() for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *read])
        return result


class _Rough(TorchDispatchMode):
    """Each operator errs by a rounding of the largest number that it reads or gives, up or down at random.

    What it makes of equal numbers is rounded alike.
    """

    def __init__(self, eps: float, seed: int) -> None:
        super().__init__()
        self.eps = eps
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            _has_no_values(func)
            or func._schema.is_mutable
            or any(each.alias_info is not None for each in func._schema.returns)
        ):
            return result
        step = self.eps * _largest((args, kwargs, result))
        alike = all(map(_is_constant, pytree.tree_leaves((args, kwargs))))
        return pytree.tree_map_only(
            Tensor, lambda leaf: self._rough(leaf, step, alike) if _is_real(leaf) else leaf, result
        )

    def _rough(self, leaf: Tensor, step: float, alike: bool) -> Tensor:
        up = torch.rand(() if alike else leaf.shape, generator=self.generator, dtype=torch.float64) < 0.5
        signs = torch.where(up, 1.0, -1.0).to(leaf)
        return leaf + signs * min(step, torch.finfo(leaf.dtype).max)


def _has_no_values(func: Any) -> bool:
    """Whether memory is only allocated: what lies there is of no meaning."""
    return "empty" in func._schema.name


def _largest(values: Any) -> float:
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and _is_real(leaf)]
    return max((float(leaf.detach().abs().nan_to_num(0, 0, 0).amax()) for leaf in leaves), default=0.0)


def _is_real(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.numel() > 0


def _is_constant(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or not leaf.numel() or bool((leaf == leaf.flatten()[0]).all())


def is_noise(module: nn.Module, inputs: Sequence[Any], comparison: Comparison, dtype: torch.dtype) -> bool:
    """Whether every leaf that the policy rejects is small beside the values it came from, and its error is theirs.

    A twentieth is small. The error of those values is what the policy allows for results of their size, or a few times
    what comes out where each operator errs by one rounding: what cancels to zero may be normalised afterwards, or asked for
    its sign. A result that is not small may be off by twice that, as the policy has it.

    For float64 eager is the oracle, whose sums are off by as many roundings as they have terms where it adds one after the
    other, as in norms along an outer dimension. That much is forgiven whatever the size of the result.
    """
    if dtype not in ULPS:
        return False
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    with _Largest() as largest:
        truth = _leaves(exact(module, inputs))
    rough = []
    for seed in range(_ROUGH_RUNS):
        rough.append(_leaves(exact(module, inputs, functools.partial(_Rough, eps, seed))))
    for leaf in comparison.leaves:
        if not leaf.problem:
            continue
        expected = truth[leaf.path]
        if dtype is torch.float64 and leaf.actual.maximum <= eps * largest.elements * _largest(expected):
            continue
        off = max(_largest(run[leaf.path] - expected) for run in rough)
        allowed = ULPS[dtype] * max(eps * largest.value, off)
        if not leaf.problem.startswith("max error") or leaf.actual.maximum > allowed:
            return False
        if _largest(expected) > CANCELLED * largest.value and leaf.actual.maximum > 2 * off:
            return False
    return True


def _leaves(observed: Any) -> dict[str, Any]:
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(observed)[0]}
