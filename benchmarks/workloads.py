"""The workloads that fusepass is measured on: lists of layers, each with a full and a reduced input shape."""

from __future__ import annotations

from operator import add, mul, sub

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.chains import CHAINS
from benchmarks.drawn import called
from benchmarks.extra import EXTRA
from benchmarks.firsts import FIRSTS
from benchmarks.layers import AddInput, Apply, Group, Size, With, Workload
from benchmarks.networks import NETWORKS
from benchmarks.single import SINGLE


def _scaled_twice(_: Size) -> tuple[nn.Module, ...]:
    """The same parameter multiplies before and after the normalisation."""
    scale = With(mul, 16, 1, 1, 1)
    clamp, largest = Apply(lambda x: torch.clamp(x, -1.0, 1.0)), Apply(lambda x: torch.max(x, dim=1).values)
    return nn.Conv3d(3, 16, 3), scale, nn.InstanceNorm3d(16), clamp, scale, largest


# A table: one layer after the other, two shapes at the end.
# fmt: off
MISSION = (
    Workload("convt3d_layernorm_gelu_scale", lambda s: (
        nn.ConvTranspose3d(32, 64, 4, stride=2, padding=1), nn.LayerNorm(64), nn.GELU(),
        Apply(lambda x: x * 1.0),
    ), (32, 32, 16, 32, 32), (1, 32, 2, 3, 32), Group.MISSION),
    Workload("convt3d_batchnorm_submean", lambda s: (
        nn.ConvTranspose3d(16, 32, 3, stride=2, padding=1), nn.BatchNorm3d(32),
        Apply(lambda x: x - torch.mean(x, dim=(2, 3, 4), keepdim=True)),
    ), (16, 16, 16, 32, 32), (2, 16, 3, 5, 6), Group.MISSION),
    Workload("convt2d_gelu_groupnorm", lambda s: (
        nn.ConvTranspose2d(64, 64, 3), nn.GELU(), nn.GroupNorm(8, 64),
    ), (128, 64, 256, 256), (2, 64, 9, 10), Group.MISSION),
    Workload("convt3d_scale_batchnorm_gap", lambda s: (
        nn.ConvTranspose3d(64, 128, 5), Apply(lambda x: x * 2.0), nn.BatchNorm3d(128),
        nn.AdaptiveAvgPool3d(1),
    ), (16, 64, 16, 32, 32), (2, 64, 3, 4, 5), Group.MISSION),
    Workload("layernorm_3d_shape", lambda s: (
        nn.LayerNorm((64, s.of(256), s.of(256))),
    ), (16, 64, 256, 256), (3, 64, 8, 8), Group.MISSION),
)

VISIBLE = (
    Workload("conv2d_relu_bias", lambda s: (
        nn.Conv2d(64, 128, 3), nn.ReLU(), With(add, 128, 1, 1),
    ), (128, 64, 128, 128), (2, 64, 10, 11)),
    Workload("convt3d_add_layernorm_avgpool_gelu", lambda s: (
        nn.ConvTranspose3d(32, 64, 3, stride=2, padding=1, output_padding=1), With(add), nn.LayerNorm(64),
        nn.AvgPool3d(2), nn.GELU(),
    ), (32, 32, 16, 32, 32), (1, 32, 2, 3, 32)),
    Workload("convt2d_sub_tanh", lambda s: (
        nn.ConvTranspose2d(64, 64, 4, stride=2, padding=1, output_padding=1), With(sub, 64, 1, 1), nn.Tanh(),
    ), (32, 64, 256, 256), (2, 64, 7, 9)),
    Workload("conv3d_relu_leaky_gelu_sigmoid_bias", lambda s: (
        nn.Conv3d(8, 32, 3), nn.ReLU(), nn.LeakyReLU(0.01), nn.GELU(), nn.Sigmoid(), With(add, 32, 1, 1, 1),
    ), (64, 8, 32, 64, 64), (2, 8, 5, 7, 9)),
    Workload("linear_sub_mul_relu", lambda s: (
        nn.Linear(s.of(8192), s.of(8192)), Apply(lambda x: x - 2.0), Apply(lambda x: x * 1.5), nn.ReLU(),
    ), (1024, 8192), (8, 256)),
    Workload("convt2d_batchnorm_tanh_maxpool_groupnorm", lambda s: (
        nn.ConvTranspose2d(64, 128, 5, padding=1), nn.BatchNorm2d(128), nn.Tanh(), nn.MaxPool2d(2),
        nn.GroupNorm(8, 128),
    ), (512, 64, 32, 32), (3, 64, 6, 7)),
    Workload("convt3d_depthmean_add_softmax_tanh_scale", lambda s: (
        nn.ConvTranspose3d(16, 64, 3, padding=1), Apply(lambda x: x.mean(dim=2, keepdim=True)),
        With(add, 1, 64, 1, 1, 1), nn.Softmax(dim=1), nn.Tanh(), Apply(lambda x: x * 2.0),
    ), (16, 16, 32, 128, 128), (2, 16, 5, 6, 7)),
    Workload("conv2d_instancenorm_div", lambda s: (
        nn.Conv2d(64, 128, 3), nn.InstanceNorm2d(128), Apply(lambda x: x / 2.0),
    ), (128, 64, 128, 128), (2, 64, 9, 10)),
    Workload("conv2d_add_scale_sigmoid_groupnorm", lambda s: (
        nn.Conv2d(8, 32, 3), With(add, 32, 1, 1), With(mul, 32, 1, 1), nn.Sigmoid(), nn.GroupNorm(8, 32),
    ), (128, 8, 256, 256), (2, 8, 12, 13)),
    Workload("conv2d_channelmin_tanh_tanh", lambda s: (
        nn.Conv2d(16, 64, 3), Apply(lambda x: torch.min(x, dim=1, keepdim=True).values), nn.Tanh(), nn.Tanh(),
    ), (128, 16, 256, 256), (2, 16, 12, 13)),
    Workload("conv3d_hardswish_groupnorm_mean", lambda s: (
        nn.Conv3d(3, 16, 4), nn.Hardswish(), nn.GroupNorm(4, 16),
        Apply(lambda x: torch.mean(x, dim=(2, 3, 4))),
    ), (1024, 3, 16, 32, 32), (3, 3, 6, 7, 8)),
    Workload("linear_mish_mish", lambda s: (
        nn.Linear(s.of(8192), s.of(8192)), nn.Mish(), nn.Mish(),
    ), (1024, 8192), (8, 256)),
    Workload("conv2d_minconst_add_mul", lambda s: (
        nn.Conv2d(64, 128, 3), Apply(lambda x: torch.min(x, torch.tensor(0.5))), With(add, 128, 1, 1),
        Apply(lambda x: x * 2.0),
    ), (128, 64, 128, 128), (2, 64, 9, 10)),
    Workload("linear_scale_batchnorm", lambda s: (
        nn.Linear(s.of(8192), s.of(8192)), With(mul, s.of(8192)), nn.BatchNorm1d(s.of(8192)),
    ), (1024, 8192), (8, 256)),
    Workload("conv2d_sub_hardswish_maxpool_mish", lambda s: (
        nn.Conv2d(64, 128, 3), Apply(lambda x: x - 0.5), nn.Hardswish(), nn.MaxPool2d(2), nn.Mish(),
    ), (128, 64, 128, 128), (2, 64, 10, 11)),
    Workload("linear_swish_add_groupnorm", lambda s: (
        nn.Linear(s.of(1024), s.of(4096)), Apply(lambda x: torch.sigmoid(x) * x), With(add, s.of(4096)),
        nn.GroupNorm(s.of(64), s.of(4096)),
    ), (32768, 1024), (16, 32)),
    Workload("linear_batchnorm_gelu_relu", lambda s: (
        nn.Linear(s.of(4096), s.of(4096)), nn.BatchNorm1d(s.of(4096)), nn.GELU(), nn.ReLU(),
    ), (16384, 4096), (16, 128)),
    Workload("conv3d_maxpool_logsumexp_relu", lambda s: (
        nn.Conv3d(32, 64, 3, padding=1), nn.MaxPool3d(2),
        Apply(lambda x: torch.logsumexp(x, dim=1, keepdim=True)), nn.ReLU(),
    ), (4, 32, 32, 128, 128), (2, 32, 4, 6, 8)),
    Workload("linear_sigmoid_linear_logsumexp", lambda s: (
        nn.Linear(s.of(2048), s.of(4096)), nn.Sigmoid(), nn.Linear(s.of(4096), s.of(1024)),
        Apply(lambda x: torch.logsumexp(x, dim=1)),
    ), (16384, 2048), (16, 64)),
    Workload("conv3d_mish_tanh", lambda s: (
        nn.Conv3d(32, 64, 3), nn.Mish(), nn.Tanh(),
    ), (16, 32, 32, 64, 64), (2, 32, 4, 6, 7)),
    Workload("convt3d_softmax_sigmoid", lambda s: (
        nn.ConvTranspose3d(32, 64, 3, stride=2, padding=1, output_padding=1), nn.Softmax(dim=1), nn.Sigmoid(),
    ), (16, 32, 16, 32, 32), (2, 32, 3, 4, 5)),
    Workload("linear_sub_mean_logsumexp_gelu_residual", lambda s: (AddInput(
        nn.Linear(s.of(8192), s.of(8192)), With(sub, s.of(8192)),
        Apply(lambda x: x.mean(dim=1, keepdim=True)),
        Apply(lambda x: torch.logsumexp(x, dim=1, keepdim=True)), nn.GELU(),
    ),), (2048, 8192), (8, 256)),
    Workload("linear_scale_hardtanh_gelu", lambda s: (
        nn.Linear(s.of(8192), s.of(8192)), Apply(lambda x: x * 0.5), nn.Hardtanh(-2, 2), nn.GELU(),
    ), (2048, 8192), (8, 256)),
    Workload("linear_maxpool1d_sum_scale", lambda s: (
        nn.Linear(s.of(32768), s.of(32768)), Apply(lambda x: F.max_pool1d(x.unsqueeze(1), 2).squeeze(1)),
        Apply(lambda x: torch.sum(x, dim=1)), Apply(lambda x: x * 0.5),
    ), (128, 32768), (8, 1024)),
    Workload("conv2d_relu_handwritten_hardswish", lambda s: (
        nn.Conv2d(8, 64, 3), nn.ReLU(), Apply(lambda x: x * torch.clamp((x + 3) / 6, 0, 1)),
    ), (128, 8, 128, 128), (2, 8, 12, 13)),
    Workload("convt3d_relu_groupnorm", lambda s: (
        nn.ConvTranspose3d(64, 128, 3, bias=False), nn.ReLU(), nn.GroupNorm(8, 128),
    ), (16, 64, 32, 32, 32), (2, 64, 3, 4, 5)),
    Workload("conv2d_avgpool_sigmoid_sum", lambda s: (
        nn.Conv2d(8, 64, 3), nn.AvgPool2d(4), nn.Sigmoid(), Apply(lambda x: torch.sum(x, dim=(1, 2, 3))),
    ), (128, 8, 384, 384), (2, 8, 14, 18)),
    Workload("conv2d_gelu_gap_squeeze", lambda s: (
        nn.Conv2d(8, 64, 3), nn.GELU(), Apply(lambda x: F.adaptive_avg_pool2d(x, 1)),
        Apply(lambda x: x.squeeze(-1).squeeze(-1)),
    ), (128, 8, 256, 256), (2, 8, 12, 13)),
    Workload("conv2d_batchnorm_scale", lambda s: (
        nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64), Apply(lambda x: x * 2.0),
    ), (128, 8, 128, 128), (2, 8, 12, 13)),
    Workload("linear_groupnorm_min_bias", lambda s: (
        nn.Linear(s.of(8192), s.of(8192)), nn.GroupNorm(s.of(512), s.of(8192)),
        Apply(lambda x: torch.min(x, dim=1, keepdim=True).values), With(add, 1, s.of(8192), 1, 1),
    ), (1024, 8192), (8, 256)),
    Workload("conv3d_mul_instancenorm_clamp_mul_max", _scaled_twice, (128, 3, 16, 32, 32), (2, 3, 5, 7, 8)),
    Workload("conv2d_groupnorm_scale_maxpool_clamp", lambda s: (
        nn.Conv2d(8, 64, 3), nn.GroupNorm(16, 64), With(mul, 64, 1, 1), nn.MaxPool2d(4),
        Apply(lambda x: torch.clamp(x, 0.0, 1.0)),
    ), (128, 8, 128, 128), (2, 8, 14, 18)),
    Workload("conv2d_sub_sub_mish", lambda s: (
        nn.Conv2d(8, 64, 3), Apply(lambda x: x - 0.5), Apply(lambda x: x - 0.2), nn.Mish(),
    ), (128, 8, 256, 256), (2, 8, 12, 13)),
    Workload("convt3d_maxpool_softmax_sub_swish_max", lambda s: (
        nn.ConvTranspose3d(3, 16, 3, stride=2, padding=1, output_padding=1), nn.MaxPool3d(2),
        nn.Softmax(dim=1), With(lambda x, shift: x - shift.view(1, -1, 1, 1, 1), 16),
        Apply(lambda x: torch.sigmoid(x) * x), Apply(lambda x: torch.max(x, dim=1).values),
    ), (128, 3, 16, 32, 32), (2, 3, 4, 5, 6)),
    Workload("convt2d_softmax_bias_scale_sigmoid", lambda s: (
        nn.ConvTranspose2d(64, 128, 4, stride=2, padding=1, output_padding=1), nn.Softmax(dim=1),
        With(add, 128, 1, 1), Apply(lambda x: x * 2.0), nn.Sigmoid(),
    ), (128, 64, 64, 64), (2, 64, 6, 7)),
    Workload("convt2d_add_min_gelu_mul", lambda s: (
        nn.ConvTranspose2d(64, 128, 4, stride=2), Apply(lambda x: x + 0.5),
        Apply(lambda x: torch.min(x, torch.tensor(0.0))), nn.GELU(), Apply(lambda x: x * 2.0),
    ), (128, 64, 64, 64), (2, 64, 6, 7)),
    Workload("linear_batchnorm_bias_div_swish", lambda s: (
        nn.Linear(s.of(8192), s.of(8192)), nn.BatchNorm1d(s.of(8192)), With(add, 1), Apply(lambda x: x / 1.0),
        Apply(lambda x: x * torch.sigmoid(x)),
    ), (1024, 8192), (8, 256)),
    Workload("linear_gelu_softmax", lambda s: (
        nn.Linear(s.of(8192), s.of(8192)), nn.GELU(), nn.Softmax(dim=1),
    ), (1024, 8192), (8, 256)),
    Workload("softmax_wide", lambda s: (nn.Softmax(dim=1),), (4096, 393216), (4, 12288)),
    Workload("groupnorm_large", lambda s: (nn.GroupNorm(8, 64),), (112, 64, 512, 512), (2, 64, 16, 16)),
    Workload("avgpool3d", lambda s: (
        nn.AvgPool3d(3, stride=2, padding=1),
    ), (16, 32, 128, 128, 256), (2, 8, 8, 9, 16)),
    Workload("batchnorm_train", lambda s: (nn.BatchNorm2d(64),), (64, 64, 512, 512), (3, 64, 12, 16)),
)
# fmt: on

WORKLOADS = MISSION + VISIBLE + EXTRA
"""In the order in which they are measured: what the mission names comes first."""

ALL = WORKLOADS + SINGLE + CHAINS + FIRSTS + NETWORKS
"""Also those which are measured when their group is asked for."""


def by_name(name: str) -> Workload:
    """The workload called `name`. Raises KeyError where there is none."""
    if name.startswith("drawn_"):
        return called(name)
    return {workload.name: workload for workload in ALL}[name]
