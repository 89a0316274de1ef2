"""Decompositions for operators of which PyTorch's own are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import pw_cast_for_opmath
from torch._ops import OpOverload

aten = torch.ops.aten

_NONE, _MEAN = 0, 1


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The loss, and which classes are targets. A row's targets end at its first -1; PyTorch's counts class 0 for each place behind that."""
    rows, wanted = torch.atleast_2d(x), torch.atleast_2d(target)
    count = rows.shape[1]
    classes = torch.arange(count, device=x.device)
    end = torch.where(wanted == -1, classes, count).amin(1, keepdim=True)
    given = classes < end
    chosen = rows.gather(1, torch.where(given, wanted, 0))
    is_target = (torch.where(given, wanted, -1).unsqueeze(2) == classes).any(1)
    margins = (1 - chosen.unsqueeze(2) + rows.unsqueeze(1)).clamp_min(0) / count  # row, target, class
    losses = torch.where(given.unsqueeze(2) & ~is_target.unsqueeze(1), margins, 0).sum((1, 2))
    if reduction == _NONE:
        loss = losses.reshape(x.shape[:-1])
    else:
        loss = losses.mean() if reduction == _MEAN else losses.sum()
    return loss, is_target.to(x.dtype).reshape(target.shape)


FLOAT32_SIXTH, _FLOAT32_LEAST = torch.tensor([1 / 6, 1e-12], dtype=torch.float32).tolist()
"""Numbers that PyTorch's kernels round to float32, for float64, too; its decompositions do not."""


@pw_cast_for_opmath
def _hardsigmoid_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.where((x > -3.0) & (x < 3.0), gradient * FLOAT32_SIXTH, 0.0)


@pw_cast_for_opmath
def _binary_cross_entropy_backward(
    gradient: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    result = gradient * (x - target) / torch.clamp(x * (1 - x), min=_FLOAT32_LEAST)
    if weight is not None:
        result = result * weight
    return result / x.numel() if reduction == _MEAN else result


CORRECTED: Mapping[OpOverload, Callable[..., Any]] = {
    aten.binary_cross_entropy_backward.default: _binary_cross_entropy_backward,
    aten.hardsigmoid_backward.default: _hardsigmoid_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
}
