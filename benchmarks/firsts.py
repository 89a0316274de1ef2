"""First layers of networks: convolutions of few channels, with large kernels or steps, of images in patches; and some in groups."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.layers import Apply, Group, Workload

_HALF, _BFLOAT16 = torch.float16, torch.bfloat16
_IMAGES, _FEW = (64, 3, 224, 224), (2, 3, 32, 32)


def _tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


# A table, as in workloads.py.
# fmt: off
FIRSTS = tuple(Workload(name, layers, *shapes, Group.CHAINS, *more) for name, layers, shapes, *more in (
    ("half_conv2d_stem_batchnorm_relu_maxpool", lambda s: (
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)), (_IMAGES, _FEW), _HALF),
    ("half_conv2d_strided_silu", lambda s: (nn.Conv2d(3, 32, 3, 2, 1), nn.SiLU()), (_IMAGES, _FEW), _HALF),
    ("conv2d_11x11_relu_maxpool", lambda s: (nn.Conv2d(3, 96, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)), (_IMAGES, _FEW)),
    ("half_conv2d_11x11_relu_maxpool", lambda s: (
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)), (_IMAGES, _FEW), _HALF),
    ("conv2d_patches_layernorm", lambda s: (
        nn.Conv2d(3, s.of(768), 16, 16), Apply(_tokens), nn.LayerNorm(s.of(768))), (_IMAGES, _FEW)),
    ("bfloat16_conv2d_patches_layernorm", lambda s: (
        nn.Conv2d(3, s.of(768), 16, 16), Apply(_tokens), nn.LayerNorm(s.of(768))), (_IMAGES, _FEW), _BFLOAT16),
    ("conv2d_patches_14", lambda s: (nn.Conv2d(3, s.of(1024), 14, 14), Apply(_tokens)), ((32, 3, 224, 224), (2, 3, 28, 28))),
    ("half_conv2d_patches_8_gelu", lambda s: (nn.Conv2d(3, s.of(384), 8, 8), nn.GELU()), (_IMAGES, _FEW), _HALF),
    ("conv3d_tubelets", lambda s: (
        nn.Conv3d(3, s.of(768), (2, 16, 16), (2, 16, 16)), Apply(_tokens)), ((8, 3, 16, 224, 224), (2, 3, 4, 32, 32))),
    ("half_conv1d_waves_groupnorm_gelu", lambda s: (
        nn.Conv1d(1, s.of(512), 10, 5), nn.GroupNorm(s.of(512), s.of(512)), nn.GELU()), ((16, 1, 80000), (2, 1, 400)), _HALF),
    ("half_conv2d_one_channel_relu", lambda s: (nn.Conv2d(1, 32, 3), nn.ReLU()), ((256, 1, 28, 28), (4, 1, 12, 12)), _HALF),
    ("half_conv2d_grouped_batchnorm_relu", lambda s: (
        nn.Conv2d(256, 256, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(256), nn.ReLU()),
        ((32, 256, 56, 56), (2, 256, 6, 6)), _HALF),
    ("half_conv2d_two_a_channel_relu", lambda s: (
        nn.Conv2d(64, 128, 3, padding=1, groups=64), nn.ReLU()), ((32, 64, 56, 56), (2, 64, 6, 6)), _HALF),
))
# fmt: on
