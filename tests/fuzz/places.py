"""Tells NaN and infinities that stand elsewhere than in eager's result for a reason that documents name from wrong ones.

- A rule that makes one product of several sums in another order: where elements are infinite, eager may have NaN for an
  infinity, and a function that forgets infinities, such as sigmoid, what is finite (ARCHITECTURE.md).
- On a GPU eager's kernels for one operator differ in this: RMSNorm of a row with an infinity is NaN throughout, or at
  that element alone, as the row's length, its type and its address at run time have it (README.md). On a CPU, and here, its
  definition says which. To tell such a row from one whose squares overflow, which eager makes zeros everywhere, would take
  another reduction.
- The mean of `var_mean` and `std_mean` on a GPU, where eager's kernel keeps an infinity at one place of a row (README.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusepass
from fusepass.config import override
from fusepass.numerics.check import Comparison, check, compare, exact, observe
from fusepass.patterns.rules import convolution, folding, linear, pooling, preceding
from tests.property.script import Model

REORDERING = frozenset(
    rule.name for module in (convolution, folding, linear, pooling, preceding) for rule in module.RULES
)


def is_elsewhere(model: Model, module: nn.Module, fused: Any, inputs: Sequence[Tensor], comparison: Comparison) -> bool:
    """Whether nothing but places is wrong, and right without these rules, or for the same model on a CPU."""
    problems = [leaf.problem for leaf in comparison.leaves if leaf.problem]
    if not all(problem.endswith("out of place") for problem in problems):
        return False
    reordered = {rewrite.rule for rewrite in fused.report().rewrites} & REORDERING
    if reordered:
        with override(disable=",".join(sorted(reordered))), torch.no_grad():
            return check(module, fusepass.optimize(module, example_inputs=tuple(inputs)), inputs).ok
    if inputs[0].is_cuda and any(name in model.text for name in ("var_mean", "std_mean")):
        return True
    return inputs[0].is_cuda and is_as_on_a_cpu(model, observe(fused, inputs, state=module))


def is_as_on_a_cpu(model: Model, observed: Any) -> bool:
    """Whether `observed` is what the policy accepts of the model on a CPU."""
    module, inputs = model.make()
    moved = pytree.tree_map_only(Tensor, _on_the_cpu, observed)
    return compare(moved, observe(module, inputs), exact(module, inputs)).ok


def _on_the_cpu(tensor: Tensor) -> Tensor:
    """`tensor` with its strides, which `Tensor.cpu` changes where elements overlap."""
    storage = tensor.untyped_storage().cpu()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
