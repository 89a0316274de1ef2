"""Further chains behind a convolution or a matrix product, and blocks of well-known networks, at sizes of every day.

They are a group of their own, outside of the usual run: ``python benchmarks/run.py --group chains``. They show what a model
can expect that is not among the others.
"""

from __future__ import annotations

from operator import add, mul, sub, truediv

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.blocks import Attention, Beside, Gated, Residual, SqueezeExcite, feed_forward
from benchmarks.layers import Apply, Group, Size, With, Workload

_HALF, _BFLOAT16 = torch.float16, torch.bfloat16


def _most(dim: int) -> Apply:
    return Apply(lambda x: torch.max(x, dim=dim, keepdim=True).values)


def _least(dim: int) -> Apply:
    return Apply(lambda x: torch.min(x, dim=dim, keepdim=True).values)


def _times(factor: float) -> Apply:
    return Apply(lambda x: x * factor)


def _sum(*dims: int) -> Apply:
    return Apply(lambda x: x.sum(dim=dims, keepdim=True))


def _logsumexp(dim: int) -> Apply:
    return Apply(lambda x: torch.logsumexp(x, dim=dim, keepdim=True))


def _bottleneck(wide: int, narrow: int) -> nn.Module:
    return Residual(
        nn.Conv2d(wide, narrow, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU(),
        nn.Conv2d(narrow, narrow, 3, padding=1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU(),
        nn.Conv2d(narrow, wide, 1, bias=False), nn.BatchNorm2d(wide),
    )  # fmt: skip


def _transformer(width: int, heads: int) -> tuple[nn.Module, ...]:
    return (
        Residual(nn.LayerNorm(width), Attention(width, heads)),
        Residual(nn.LayerNorm(width), *feed_forward(width, 4 * width)),
    )


def _linear(s: Size, width: int) -> nn.Linear:
    return nn.Linear(s.of(width), s.of(width))


_IMAGES, _FEW = ((64, 64, 128, 128), (2, 64, 10, 11)), ((128, 3, 128, 128), (2, 3, 12, 10))
_VOLUMES = ((16, 32, 16, 32, 32), (1, 32, 3, 4, 4))
_ROWS = ((2048, 4096), (16, 128))

# A table, as in workloads.py.
# fmt: off
CHAINS = tuple(Workload(name, layers, *shapes, Group.CHAINS, *more) for name, layers, shapes, *more in (
    # Convolutions
    ("depthwise_conv1d_causal_silu", lambda s: (
        nn.Conv1d(s.of(1536), s.of(1536), 4, padding=3, groups=s.of(1536)), Apply(lambda x: x[..., :-3]), nn.SiLU()),
        ((8, 1536, 2048), (2, 48, 40))),
    ("depthwise_conv1d_batchnorm_silu", lambda s: (
        nn.Conv1d(256, 256, 31, padding=15, groups=256), nn.BatchNorm1d(256), nn.SiLU()), ((32, 256, 1000), (2, 256, 40))),
    ("bfloat16_depthwise_conv1d_of_tokens_silu", lambda s: (
        Apply(lambda x: x.transpose(1, 2)), nn.Conv1d(s.of(1536), s.of(1536), 4, padding=3, groups=s.of(1536)),
        Apply(lambda x: F.silu(x[..., :-3]).transpose(1, 2).contiguous())), ((8, 2048, 1536), (2, 40, 48)), _BFLOAT16),
    ("half_depthwise_conv2d_of_positions_gelu", lambda s: (
        Apply(lambda x: x.permute(0, 3, 1, 2)), nn.Conv2d(96, 96, 7, padding=3, groups=96), nn.GELU(),
        Apply(lambda x: x.permute(0, 2, 3, 1))), ((64, 56, 56, 96), (2, 8, 7, 96)), _HALF),
    ("depthwise_conv2d_wide_gelu", lambda s: (nn.Conv2d(128, 128, 13, padding=6, groups=128), nn.GELU()),
        ((32, 128, 56, 56), (1, 128, 16, 16))),
    ("depthwise_conv2d_batchnorm_relu6", lambda s: (
        nn.Conv2d(96, 96, 3, padding=1, groups=96, bias=False), nn.BatchNorm2d(96), nn.ReLU6()),
        ((32, 96, 112, 112), (2, 96, 8, 8))),
    ("depthwise_conv2d_groupnorm_gelu", lambda s: (
        nn.Conv2d(96, 96, 5, padding=2, groups=96), nn.GroupNorm(8, 96), nn.GELU()), ((64, 96, 56, 56), (1, 96, 8, 8))),
    ("half_depthwise_conv2d_silu_excite", lambda s: (
        nn.Conv2d(144, 144, 3, padding=1, groups=144), nn.SiLU(), SqueezeExcite(144, 6)),
        ((64, 144, 56, 56), (2, 144, 8, 8)), _HALF),
    ("depthwise_conv3d_batchnorm_relu", lambda s: (
        nn.Conv3d(96, 96, 3, padding=1, groups=96), nn.BatchNorm3d(96), nn.ReLU()), ((4, 96, 32, 56, 56), (2, 96, 4, 6, 8))),
    ("conv2d_few_relu_hardswish", lambda s: (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Hardswish()), _FEW),
    ("conv2d_few_scale_min", lambda s: (nn.Conv2d(3, 64, 3, padding=1), _times(2.0), _least(1)), _FEW),
    ("conv2d_few_div_leaky", lambda s: (nn.Conv2d(3, 32, 5), Apply(lambda x: x / 2.0), nn.LeakyReLU()), _FEW),
    ("conv2d_few_sub_tanh_sub_avgpool", lambda s: (
        nn.Conv2d(3, 24, 3), Apply(lambda x: x - 0.5), nn.Tanh(), Apply(lambda x: x - 0.2), nn.AvgPool2d(2)), _FEW),
    ("conv2d_few_groupnorm_tanh_residual", lambda s: (
        nn.Conv2d(3, 32, 3, padding=1), Residual(nn.GroupNorm(8, 32), nn.Tanh(), nn.Hardswish()), _logsumexp(1)), _FEW),
    ("conv2d_stem_batchnorm_relu_maxpool", lambda s: (
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        ((64, 3, 224, 224), (2, 3, 20, 20))),
    ("conv2d_tanh_scale_bias_maxpool", lambda s: (
        nn.Conv2d(64, 64, 3), nn.Tanh(), _times(1.5), With(add, 64, 1, 1), nn.MaxPool2d(2)), _IMAGES),
    ("conv2d_mul_leaky_gelu", lambda s: (
        nn.Conv2d(64, 96, 3, padding=1), With(mul, 96, 1, 1), nn.LeakyReLU(), nn.GELU()), _IMAGES),
    ("conv2d_softplus_tanh_batchnorm", lambda s: (
        nn.Conv2d(64, 64, 3), Apply(lambda x: torch.tanh(F.softplus(x)) * x), nn.BatchNorm2d(64)), _IMAGES),
    ("conv2d_strided_batchnorm_silu", lambda s: (
        nn.Conv2d(64, 128, 3, 2, 1, bias=False), nn.BatchNorm2d(128), nn.SiLU()), _IMAGES),
    ("conv2d_grouped_batchnorm_relu", lambda s: (
        nn.Conv2d(64, 64, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(64), nn.ReLU()), _IMAGES),
    ("conv2d_dilated_instancenorm_elu", lambda s: (
        nn.Conv2d(64, 64, 3, padding=2, dilation=2), nn.InstanceNorm2d(64, affine=True), nn.ELU()), _IMAGES),
    ("conv2d_pointwise_gelu_pointwise", lambda s: (
        nn.Conv2d(64, 256, 1), nn.GELU(), nn.Conv2d(256, 64, 1)), _IMAGES),
    ("conv2d_logsoftmax_of_channels", lambda s: (nn.Conv2d(64, 21, 1), nn.LogSoftmax(1)), _IMAGES),
    ("eval_conv2d_batchnorm_relu_twice", lambda s: (
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()), _IMAGES, torch.float32, False),
    ("conv1d_batchnorm_relu_maxpool", lambda s: (
        nn.Conv1d(64, 128, 9, padding=4), nn.BatchNorm1d(128), nn.ReLU(), nn.MaxPool1d(4)), ((64, 64, 8192), (2, 64, 64))),
    ("conv1d_few_gelu_groupnorm", lambda s: (
        nn.Conv1d(1, 64, 10, 5), nn.GELU(), nn.GroupNorm(64, 64)), ((32, 1, 160000), (2, 1, 200))),
    ("conv3d_few_div_maxpool_gap_bias_sum", lambda s: (
        nn.Conv3d(8, 16, 3), Apply(lambda x: x / 2.0), nn.MaxPool3d(2), nn.AdaptiveAvgPool3d(1), With(add, 16, 1, 1, 1),
        _sum(1)), ((128, 8, 16, 64, 64), (2, 8, 5, 6, 7))),
    ("conv3d_few_groupnorm_mean", lambda s: (
        nn.Conv3d(3, 24, 3), nn.GroupNorm(8, 24), Apply(lambda x: x.mean((1, 2, 3, 4)))),
        ((128, 3, 24, 32, 32), (2, 3, 5, 6, 7))),
    ("conv3d_few_min_softmax", lambda s: (
        nn.Conv3d(3, 24, 3), Apply(lambda x: torch.min(x, dim=2).values), nn.Softmax(1)),
        ((128, 3, 24, 32, 32), (2, 3, 5, 6, 7))),
    ("conv3d_scale_tanh_mul_sigmoid", lambda s: (
        nn.Conv3d(32, 48, 3), With(mul, 48, 1, 1, 1), nn.Tanh(), With(mul, 48, 1, 1, 1), nn.Sigmoid()), _VOLUMES),
    ("conv3d_softmax_maxpool_maxpool", lambda s: (
        nn.Conv3d(32, 16, 3, padding=1), nn.Softmax(1), nn.MaxPool3d(2), nn.MaxPool3d(2)),
        ((32, 32, 16, 32, 32), (1, 32, 4, 4, 4))),
    # Transposed convolutions
    ("convt2d_maxpool_hardtanh_mean_tanh", lambda s: (
        nn.ConvTranspose2d(64, 64, 3, padding=1), nn.MaxPool2d(2), nn.Hardtanh(-1, 1),
        Apply(lambda x: x.mean((2, 3), keepdim=True)), nn.Tanh()), _IMAGES),
    ("convt2d_mish_add_hardtanh_scale", lambda s: (
        nn.ConvTranspose2d(64, 64, 3, 2, 1, 1), nn.Mish(), Apply(lambda x: x + 0.5), nn.Hardtanh(-1, 1), _times(2.0)), _IMAGES),
    ("convt2d_min_sum_gelu_add", lambda s: (
        nn.ConvTranspose2d(64, 128, 3, 2, 1, 1), _least(1), _sum(2), nn.GELU(), With(add, 1, 1, 1)), _IMAGES),
    ("convt2d_gap_bias_logsumexp_sum", lambda s: (
        nn.ConvTranspose2d(64, 128, 3), nn.AdaptiveAvgPool2d(1), With(add, 128, 1, 1), _logsumexp(1), _sum(2, 3),
        _times(10.0)), _IMAGES),
    ("eval_convt2d_batchnorm_relu", lambda s: (
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()), _IMAGES, torch.float32, False),
    ("convt3d_residual_arithmetic", lambda s: (
        nn.ConvTranspose3d(32, 64, 3, 2, 1, 1), Apply(lambda x: ((x + 0.25 + x) * x) + x)), _VOLUMES),
    ("convt3d_avgpool_clamp_softmax_mul", lambda s: (
        nn.ConvTranspose3d(32, 64, 3, 2, 1, 1), nn.AvgPool3d(2), Apply(lambda x: x.clamp(0, 1)), nn.Softmax(1), _times(2.0)),
        _VOLUMES),
    ("convt3d_logsumexp_hardswish_sub_clamp", lambda s: (
        nn.ConvTranspose3d(3, 16, 3, 2, 1), _logsumexp(1), nn.Hardswish(), With(sub, 1, 1, 1, 1),
        Apply(lambda x: x.clamp(-1, 1))), ((128, 3, 16, 32, 32), (2, 3, 4, 5, 6))),
    ("convt3d_swish_groupnorm_hardswish", lambda s: (
        nn.ConvTranspose3d(3, 16, 3, 2, 1), nn.SiLU(), nn.GroupNorm(4, 16), nn.Hardswish()),
        ((128, 3, 16, 32, 32), (2, 3, 4, 5, 6))),
    ("convt3d_batchnorm_avgpool_avgpool", lambda s: (
        nn.ConvTranspose3d(3, 16, 3, 2, 1), nn.BatchNorm3d(16), nn.AvgPool3d(2), nn.AvgPool3d(2)),
        ((64, 3, 32, 32, 32), (2, 3, 6, 5, 7))),
    ("convt3d_leaky_mul_leaky_maxpool", lambda s: (
        nn.ConvTranspose3d(32, 64, 3, 2, 1, 1), nn.LeakyReLU(0.2), With(mul, 64, 1, 1, 1), nn.LeakyReLU(0.2),
        nn.MaxPool3d(2)), _VOLUMES),
    ("convt3d_maxpool_maxpool_sum", lambda s: (
        nn.ConvTranspose3d(32, 64, 5, 2, 2), nn.MaxPool3d(2), nn.MaxPool3d(3), _sum(1)), ((16, 32, 32, 32, 32), (1, 32, 7, 6, 7))),
    ("convt3d_scale_maxpool_gap_clamp", lambda s: (
        nn.ConvTranspose3d(3, 16, 3, 2, 1), _times(0.5), nn.MaxPool3d(2), nn.AdaptiveAvgPool3d(1),
        Apply(lambda x: x.clamp(0, 1))), ((128, 3, 16, 32, 32), (2, 3, 4, 5, 6))),
    ("convt3d_clamp_div", lambda s: (
        nn.ConvTranspose3d(64, 128, 3, 2, 1), Apply(lambda x: x.clamp(min=-1.0)), Apply(lambda x: x / 2.0)),
        ((16, 64, 24, 24, 24), (1, 64, 3, 4, 3))),
    # Matrix products
    ("linear_div_sum_scale", lambda s: (_linear(s, 4096), Apply(lambda x: x / 2.0), _sum(1), _times(1.5)), _ROWS),
    ("linear_max_sub_gelu", lambda s: (
        _linear(s, 4096), _most(1), Apply(lambda x: x - x.mean(1, keepdim=True)), nn.GELU()), _ROWS),
    ("linear_scale_residual", lambda s: (_linear(s, 4096), Apply(lambda x: x.clone().detach() + x * 0.5)), _ROWS),
    ("linear_swish_div_clamp_tanh_clamp", lambda s: (
        _linear(s, 4096), nn.SiLU(), Apply(lambda x: (x / 2).clamp(-1, 1)), nn.Tanh(), Apply(lambda x: x.clamp(-1, 1))), _ROWS),
    ("linear_logsumexp_leaky_gelu", lambda s: (
        _linear(s, 4096), _logsumexp(1), nn.LeakyReLU(), nn.LeakyReLU(), nn.GELU(), nn.GELU()), _ROWS),
    ("linear_groupnorm_leaky_sum", lambda s: (
        _linear(s, 4096), nn.GroupNorm(s.of(512), s.of(4096)), nn.LeakyReLU(), Apply(lambda x: x + x)), _ROWS),
    ("linear_groupnorm_swish_mul_swish", lambda s: (
        _linear(s, 4096), nn.GroupNorm(s.of(256), s.of(4096)), nn.SiLU(), With(mul, s.of(4096)), nn.SiLU()), _ROWS),
    ("linear_bias_hardtanh_mish_groupnorm", lambda s: (
        _linear(s, 4096), With(add, s.of(4096)), nn.Hardtanh(), nn.Mish(), nn.GroupNorm(s.of(256), s.of(4096))), _ROWS),
    ("linear_batchnorm_scale_softmax", lambda s: (
        _linear(s, 4096), nn.BatchNorm1d(s.of(4096)), With(mul, 1), nn.Softmax(1)), _ROWS),
    ("linear_avgpool_gelu_scale_max", lambda s: (
        _linear(s, 4096), Apply(lambda x: F.avg_pool1d(x.unsqueeze(1), 16).squeeze(1)), nn.GELU(), _times(2.0), _most(1)),
        ((2048, 4096), (16, 128))),
    ("linear_sigmoid_sum", lambda s: (_linear(s, 4096), nn.Sigmoid(), _sum(1)), _ROWS),
    ("linear_instancenorm_residual_mul", lambda s: (
        _linear(s, 4096), Apply(lambda x: F.instance_norm(x[:, None, None])[:, 0, 0]), With(add, s.of(4096)),
        With(truediv, s.of(4096))), _ROWS),
    ("linear_narrow_relu_linear", lambda s: (nn.Linear(s.of(512), s.of(128)), nn.ReLU(), nn.Linear(s.of(128), 10)),
        ((65536, 512), (16, 16))),
    # Last layers, to few channels
    ("last_conv2d_tanh", lambda s: (nn.Conv2d(64, 3, 3, padding=1), nn.Tanh()), ((32, 64, 128, 128), (2, 64, 10, 11))),
    ("last_groupnorm_silu_conv2d", lambda s: (nn.GroupNorm(32, 128), nn.SiLU(), nn.Conv2d(128, 3, 3, padding=1)),
        ((8, 128, 256, 256), (2, 128, 10, 11))),
    ("last_conv2d_7x7_tanh", lambda s: (nn.Conv2d(64, 3, 7, padding=3), nn.Tanh()), ((8, 64, 256, 256), (2, 64, 10, 11))),
    ("last_conv2d_odd", lambda s: (nn.Conv2d(96, 2, 3, padding=1), _times(20.0)), ((8, 96, 135, 241), (2, 96, 9, 7))),
    ("half_last_conv2d_sigmoid", lambda s: (nn.Conv2d(64, 1, 3, padding=1), nn.Sigmoid()),
        ((16, 64, 256, 256), (2, 64, 10, 11)), _HALF),
    ("last_convt2d_tanh", lambda s: (nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()), ((64, 64, 64, 64), (2, 64, 6, 5))),
    ("bfloat16_last_convt2d_sigmoid", lambda s: (nn.ConvTranspose2d(32, 1, 2, 2), nn.Sigmoid()),
        ((16, 32, 128, 128), (2, 32, 6, 5)), _BFLOAT16),
    ("last_conv1d_tanh", lambda s: (nn.Conv1d(64, 1, 7, padding=3), nn.Tanh()), ((16, 64, 32768), (2, 64, 33))),
    ("last_conv3d_sigmoid", lambda s: (nn.Conv3d(32, 4, 3, padding=1), nn.Sigmoid()),
        ((2, 32, 64, 96, 96), (1, 32, 5, 6, 7))),
    # What is stored and reduced
    ("residual_layernorm", lambda s: (Residual(nn.SiLU()), Beside(nn.LayerNorm(s.of(1024)))), ((16384, 1024), (5, 32))),
    ("bfloat16_residual_rmsnorm", lambda s: (Residual(nn.SiLU()), Beside(nn.RMSNorm(s.of(4096)))),
        ((8192, 4096), (3, 128)), _BFLOAT16),
    ("residual_groupnorm_silu", lambda s: (Residual(nn.Tanh()), Beside(nn.GroupNorm(16, 64), nn.SiLU())), _IMAGES),
    ("residual_relu_global_mean", lambda s: (Residual(nn.Tanh()), nn.ReLU(), Beside(nn.AdaptiveAvgPool2d(1))), _IMAGES),
    ("gelu_column_sums", lambda s: (nn.GELU(), Beside(_sum(0))), ((16384, 3072), (7, 9))),
    ("maxpool2d_global_mean", lambda s: (nn.MaxPool2d(3, 1, 1), nn.AdaptiveAvgPool2d(1)), _IMAGES),
    ("half_avgpool2d_instancenorm", lambda s: (nn.AvgPool2d(3, 1, 1), nn.InstanceNorm2d(64)), _IMAGES, _HALF),
    ("half_maxpool2d_batchnorm_relu", lambda s: (nn.MaxPool2d(3, 1, 1), nn.BatchNorm2d(64), nn.ReLU()), _IMAGES, _HALF),
    # Blocks of networks
    ("transformer_layer", lambda s: _transformer(s.of(1024), 16), ((16, 512, 1024), (2, 5, 32))),
    ("bfloat16_transformer_layer", lambda s: _transformer(s.of(1024), 16), ((16, 512, 1024), (2, 5, 32)), _BFLOAT16),
    ("bfloat16_gated_feed_forward", lambda s: (
        Residual(nn.RMSNorm(s.of(2048)), Gated(s.of(2048), s.of(5632))),), ((8, 1024, 2048), (2, 3, 64)), _BFLOAT16),
    ("bottleneck", lambda s: (_bottleneck(256, 64), nn.ReLU()), ((64, 256, 56, 56), (2, 256, 5, 6))),
    ("half_eval_bottleneck", lambda s: (_bottleneck(256, 64), nn.ReLU()), ((64, 256, 56, 56), (2, 256, 5, 6)), _HALF, False),
    ("inverted_bottleneck", lambda s: (Residual(
        nn.Conv2d(32, 192, 1, bias=False), nn.BatchNorm2d(192), nn.SiLU(),
        nn.Conv2d(192, 192, 3, padding=1, groups=192, bias=False), nn.BatchNorm2d(192), nn.SiLU(), SqueezeExcite(192, 8),
        nn.Conv2d(192, 32, 1, bias=False), nn.BatchNorm2d(32),
    ),), ((64, 32, 112, 112), (2, 32, 6, 5))),
    ("convnext_block", lambda s: (Residual(
        nn.Conv2d(96, 96, 7, padding=3, groups=96), Apply(lambda x: x.permute(0, 2, 3, 1)), nn.LayerNorm(96),
        nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96), With(mul, 96), Apply(lambda x: x.permute(0, 3, 1, 2)),
    ),), ((64, 96, 56, 56), (2, 96, 8, 7))),
    ("diffusion_residual_block", lambda s: (Residual(
        nn.GroupNorm(32, 128), nn.SiLU(), nn.Conv2d(128, 128, 3, padding=1), nn.GroupNorm(32, 128), nn.SiLU(),
        nn.Conv2d(128, 128, 3, padding=1),
    ),), ((16, 128, 64, 64), (2, 128, 6, 5))),
))
# fmt: on
