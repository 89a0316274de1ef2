"""Losses, alone: what compares a model's results with what they should be, and gives one number."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layers import Input, single

_HALF = torch.float16


def _smoothed(x: Tensor, kinds: Tensor) -> Tensor:
    return F.cross_entropy(x, kinds, label_smoothing=0.1)


def _of_distributions(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")


def _of_angles(x: Tensor, y: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(x, y, dim=1)).mean()


def _hinge(x: Tensor, y: Tensor) -> Tensor:
    return (1 - x * y).clamp(min=0).mean()


def _kinds(*shape: int) -> tuple[Input, Input]:
    """Scores (N, C, ...) and of each the right one of C kinds."""
    return Input(shape), Input(shape[:1] + shape[2:], below=shape[1])


_PAIRS, _FEW = (Input((16384, 4096)),) * 2, (Input((4, 12)),) * 2

# A table, as in workloads.py.
# fmt: off
LOSSES = (
    single("cross_entropy", F.cross_entropy, _kinds(65536, 1000), _kinds(4, 10)),
    single("cross_entropy_odd", F.cross_entropy, _kinds(8192, 50257), _kinds(3, 57)),
    single("half_cross_entropy", F.cross_entropy, _kinds(8192, 32768), _kinds(4, 32), _HALF),
    single("cross_entropy_of_pixels", F.cross_entropy, _kinds(16, 21, 256, 256), _kinds(2, 21, 4, 5)),
    single("cross_entropy_smoothed", _smoothed, _kinds(65536, 1000), _kinds(4, 10)),
    single("binary_cross_entropy", F.binary_cross_entropy_with_logits, _PAIRS, _FEW),
    single("mean_squared_error", F.mse_loss, _PAIRS, _FEW),
    single("mean_absolute_error", F.l1_loss, _PAIRS, _FEW),
    single("huber_loss", F.huber_loss, _PAIRS, _FEW),
    single("kl_divergence", _of_distributions, _PAIRS, _FEW),
    single("cosine_loss", _of_angles, _PAIRS, _FEW),
    single("triplet_margin", F.triplet_margin_loss, (Input((16384, 4096)),) * 3, (Input((4, 12)),) * 3),
    single("hinge_loss", _hinge, (Input((32768, 4096)), Input((4096,))), (Input((4, 12)), Input((12,)))),
)
# fmt: on
