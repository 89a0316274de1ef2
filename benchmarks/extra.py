"""Workloads of this project's own: odd sizes, tiny tensors, half precision, evaluation mode."""

from __future__ import annotations

from operator import add, mul

import torch
from torch import Tensor, nn

from benchmarks.layers import AddInput, Apply, Group, With, Workload


def _rms_normalise(x: Tensor) -> Tensor:
    """Root-mean-square normalisation as it is usually written by hand."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


# A table, as in workloads.py.
# fmt: off
EXTRA = (
    Workload("tiny_convt3d_layernorm_gelu_scale", lambda s: (
        nn.ConvTranspose3d(4, 4, 4, stride=2, padding=1), nn.LayerNorm(8), nn.GELU(),
        Apply(lambda x: x * 1.0),
    ), (1, 4, 2, 4, 4), (1, 4, 2, 4, 4), Group.EXTRA),
    Workload("odd_convt3d_batchnorm_tanh", lambda s: (
        nn.ConvTranspose3d(5, 7, 3, stride=2, padding=1), nn.BatchNorm3d(7), nn.Tanh(),
    ), (33, 5, 11, 31, 29), (2, 5, 3, 7, 5), Group.EXTRA),
    Workload("eval_convt3d_scale_batchnorm_gap", lambda s: (
        nn.ConvTranspose3d(64, 128, 5), Apply(lambda x: x * 2.0), nn.BatchNorm3d(128),
        nn.AdaptiveAvgPool3d(1),
    ), (16, 64, 16, 32, 32), (2, 64, 3, 4, 5), Group.EXTRA, training=False),
    Workload("half_conv2d_batchnorm_relu_add", lambda s: (AddInput(
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
    ),), (128, 64, 112, 112), (2, 64, 9, 11), Group.EXTRA, torch.float16, training=False),
    Workload("bfloat16_conv2d_gelu_groupnorm", lambda s: (
        nn.Conv2d(128, 128, 3, padding=1), nn.GELU(), nn.GroupNorm(8, 128),
    ), (64, 128, 56, 56), (2, 128, 7, 9), Group.EXTRA, torch.bfloat16),
    Workload("half_convt2d_tanh", lambda s: (
        nn.ConvTranspose2d(64, 64, 4, stride=2, padding=1), nn.Tanh(),
    ), (32, 64, 128, 128), (2, 64, 5, 6), Group.EXTRA, torch.float16),
    Workload("half_conv2d_batchnorm_relu_conv2d_silu", lambda s: (
        nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU(),
        nn.Conv2d(128, 128, 3, padding=1), nn.SiLU(),
    ), (64, 64, 112, 112), (2, 64, 9, 11), Group.EXTRA, torch.float16, training=False),
    Workload("bfloat16_linear_gelu_layernorm", lambda s: (
        nn.Linear(s.of(4096), s.of(4096)), nn.GELU(), nn.LayerNorm(s.of(4096)),
    ), (8192, 4096), (16, 128), Group.EXTRA, torch.bfloat16),
    Workload("bfloat16_rmsnorm_odd", lambda s: (
        Apply(_rms_normalise), With(mul, s.of(5120) + 1),
    ), (16384, 5121), (7, 161), Group.EXTRA, torch.bfloat16),
    Workload("depthwise_conv2d_silu_batchnorm", lambda s: (
        nn.Conv2d(96, 96, 5, padding=2, groups=96), nn.SiLU(), nn.BatchNorm2d(96),
    ), (64, 96, 112, 112), (2, 96, 9, 10), Group.EXTRA),
    Workload("conv1d_leaky_softmax", lambda s: (
        nn.Conv1d(40, 80, 7, padding=3, dilation=1), nn.LeakyReLU(0.2), nn.Softmax(dim=1),
    ), (256, 40, 4001), (2, 40, 37), Group.EXTRA),
    Workload("softmax_of_middle_axis", lambda s: (
        Apply(lambda x: x * 3.0), nn.Softmax(dim=1), Apply(torch.log1p),
    ), (128, 513, 2047), (3, 33, 31), Group.EXTRA),
    Workload("residual_layernorm_gelu", lambda s: (
        With(add, s.of(1536)), AddInput(nn.LayerNorm(s.of(1536)), nn.GELU()),
    ), (65536, 1536), (16, 48), Group.EXTRA),
)
# fmt: on
