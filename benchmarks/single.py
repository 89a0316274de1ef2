"""Single operators and losses that memory bounds, one kind after another: small, large and odd shapes, and halves.

They are a group of their own, outside of the usual run: ``python benchmarks/run.py --group single``.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.broadcasts import BROADCASTS
from benchmarks.copies import COPIES
from benchmarks.functions import FUNCTIONS
from benchmarks.layers import Group, Workload
from benchmarks.losses import LOSSES
from benchmarks.scans import SCANS

_HALF, _BFLOAT16 = torch.float16, torch.bfloat16


# A table, as in workloads.py.
# fmt: off
SINGLE = (
    Workload("gelu_small", lambda s: (nn.GELU(),), (64, 1000), (4, 10), Group.SINGLE),
    Workload("gelu_large", lambda s: (nn.GELU(),), (8192, 16384), (4, 16), Group.SINGLE),
    Workload("silu_odd", lambda s: (nn.SiLU(),), ((1 << 27) + 3,), (67,), Group.SINGLE),
    Workload("half_hardswish_large", lambda s: (nn.Hardswish(),), (16384, 16384), (4, 16), Group.SINGLE, _HALF),
    Workload("bfloat16_tanh_odd", lambda s: (nn.Tanh(),), (8191, 16381), (5, 13), Group.SINGLE, _BFLOAT16),
    *COPIES,
    *SCANS,
    Workload("softmax_small", lambda s: (nn.Softmax(1),), (128, 1000), (4, 10), Group.SINGLE),
    Workload("softmax_large", lambda s: (nn.Softmax(1),), (131072, 1000), (4, 10), Group.SINGLE),
    Workload("softmax_odd", lambda s: (nn.Softmax(1),), (4099, 50257), (3, 57), Group.SINGLE),
    Workload("half_softmax_large", lambda s: (nn.Softmax(1),), (8192, 32768), (4, 32), Group.SINGLE, _HALF),
    Workload("log_softmax_of_channels", lambda s: (nn.LogSoftmax(1),), (16, 21, 512, 512), (2, 21, 5, 4), Group.SINGLE),
    Workload("layernorm_small", lambda s: (nn.LayerNorm(s.of(768)),), (2048, 768), (4, 24), Group.SINGLE),
    Workload("layernorm_large", lambda s: (nn.LayerNorm(s.of(8192)),), (16384, 8192), (4, 256), Group.SINGLE),
    Workload("layernorm_long", lambda s: (nn.LayerNorm(s.of(49152)),), (2640, 49152), (3, 1536), Group.SINGLE),
    Workload("layernorm_odd", lambda s: (nn.LayerNorm(s.of(4992) + 9),), (9999, 5001), (3, 165), Group.SINGLE),
    Workload("half_layernorm_large", lambda s: (nn.LayerNorm(s.of(4096)),), (65536, 4096), (4, 128), Group.SINGLE, _HALF),
    Workload("half_layernorm_3d_shape", lambda s: (nn.LayerNorm((64, s.of(256), s.of(256))),),
             (32, 64, 256, 256), (3, 64, 8, 8), Group.SINGLE, _HALF),
    Workload("rmsnorm_large", lambda s: (nn.RMSNorm(s.of(8192)),), (16384, 8192), (4, 256), Group.SINGLE),
    Workload("batchnorm_small", lambda s: (nn.BatchNorm2d(64),), (32, 64, 28, 28), (2, 64, 3, 3), Group.SINGLE),
    Workload("batchnorm_large", lambda s: (nn.BatchNorm2d(64),), (64, 64, 128, 256), (2, 64, 4, 4), Group.SINGLE),
    Workload("batchnorm_odd", lambda s: (nn.BatchNorm2d(67),), (65, 67, 113, 111), (2, 67, 3, 5), Group.SINGLE),
    Workload("half_batchnorm_large", lambda s: (nn.BatchNorm2d(64),), (64, 64, 256, 256), (4, 64, 4, 4), Group.SINGLE, _HALF),
    Workload("batchnorm_of_columns", lambda s: (nn.BatchNorm1d(s.of(8192)),), (16384, 8192), (9, 256), Group.SINGLE),
    Workload("instancenorm_large", lambda s: (nn.InstanceNorm2d(64),), (32, 64, 256, 256), (2, 64, 4, 4), Group.SINGLE),
    Workload("groupnorm_odd", lambda s: (nn.GroupNorm(6, 48),), (33, 48, 255, 257), (2, 48, 3, 5), Group.SINGLE),
    Workload("groupnorm_of_one", lambda s: (nn.GroupNorm(1, 192),), (64, 192, 56, 56), (2, 192, 3, 5), Group.SINGLE),
    Workload("bfloat16_groupnorm_large", lambda s: (nn.GroupNorm(8, 64),), (28, 64, 512, 512), (2, 64, 4, 4), Group.SINGLE,
             _BFLOAT16),
    Workload("maxpool_small", lambda s: (nn.MaxPool2d(2),), (8, 64, 56, 56), (2, 3, 6, 6), Group.SINGLE),
    Workload("maxpool_large", lambda s: (nn.MaxPool2d(2),), (64, 32, 256, 256), (2, 3, 6, 6), Group.SINGLE),
    Workload("maxpool_odd", lambda s: (nn.MaxPool2d(3, 2, 1),), (65, 63, 127, 129), (2, 3, 7, 9), Group.SINGLE),
    Workload("half_maxpool_large", lambda s: (nn.MaxPool2d(2),), (64, 64, 256, 256), (2, 3, 6, 6), Group.SINGLE, _HALF),
    Workload("avgpool1d_overlapping", lambda s: (nn.AvgPool1d(5, 1, 2),), (64, 256, 8192), (2, 3, 64), Group.SINGLE),
    Workload("avgpool2d_overlapping", lambda s: (nn.AvgPool2d(3, 1, 1),), (64, 96, 112, 112), (2, 3, 9, 7), Group.SINGLE),
    Workload("half_avgpool1d_wide", lambda s: (nn.AvgPool1d(25, 1, 12),), (64, 321, 1440), (2, 3, 40), Group.SINGLE, _HALF),
    Workload("maxpool_wide", lambda s: (nn.MaxPool2d(13, 1, 6),), (64, 512, 20, 20), (2, 3, 16, 15), Group.SINGLE),
    Workload("maxpool_odd_images", lambda s: (nn.MaxPool2d(5, 1, 2),), (64, 512, 13, 13), (2, 3, 7, 9), Group.SINGLE),
    Workload("half_maxpool_small_images", lambda s: (nn.MaxPool2d(3, 1, 1),), (256, 832, 7, 7), (2, 3, 7, 7), Group.SINGLE, _HALF),
    Workload("half_avgpool_odd_images", lambda s: (nn.AvgPool2d(3, 1, 1),), (64, 192, 35, 35), (2, 3, 9, 5), Group.SINGLE, _HALF),
    Workload("avgpool1d_odd_rows", lambda s: (nn.AvgPool1d(25, 1, 12),), (64, 321, 721), (2, 3, 37), Group.SINGLE),
    Workload("avgpool3d_overlapping", lambda s: (nn.AvgPool3d(3, 1, 1),), (8, 32, 64, 64, 64), (2, 3, 4, 5, 8), Group.SINGLE),
    Workload("half_maxpool3d_overlapping", lambda s: (nn.MaxPool3d(3, 1, 1),), (8, 192, 16, 56, 56), (2, 3, 4, 5, 7), Group.SINGLE, _HALF),
    Workload("maxpool3d_odd", lambda s: (nn.MaxPool3d(2),), (17, 31, 33, 127, 65), (2, 3, 5, 4, 7), Group.SINGLE),
    Workload("global_average_pool", lambda s: (nn.AdaptiveAvgPool2d(1),), (128, 256, 112, 112), (2, 3, 5, 4), Group.SINGLE),
    *LOSSES,
    *BROADCASTS,
    *FUNCTIONS,
)
# fmt: on
