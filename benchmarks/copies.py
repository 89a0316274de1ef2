"""Single operators that only move elements: the largest of what a GPU holds comfortably, small ones, odd sizes and halves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layers import single

_HALF = torch.float16


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _first(x: Tensor) -> Tensor:
    return x.movedim(-1, 1).contiguous()


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 64)).transpose(1, 2).contiguous()


# A table, as in workloads.py.
# fmt: off
COPIES = (
    single("to_channels_last", _last, (64, 64, 181, 181), (2, 4, 7, 7)),
    single("to_channels_last_small", _last, (8, 64, 28, 28), (2, 4, 7, 7)),
    single("to_channels_last_images", _last, (256, 3, 224, 224), (2, 3, 8, 8)),
    single("to_channels_last_images_odd", _last, (256, 3, 223, 223), (2, 3, 7, 7)),
    single("half_to_channels_last", _last, (64, 128, 256, 128), (2, 8, 8, 8), _HALF),
    single("half_to_channels_last_odd", _last, (128, 64, 181, 181), (2, 4, 7, 7), _HALF),
    single("half_to_channels_last_images", _last, (512, 3, 224, 224), (2, 3, 8, 8), _HALF),
    single("to_channels_first", _first, (64, 181, 181, 64), (2, 7, 7, 4)),
    single("to_channels_first_images", _first, (256, 224, 224, 3), (2, 8, 8, 3)),
    single("half_to_channels_first_odd", _first, (128, 181, 181, 64), (2, 7, 7, 4), _HALF),
    single("transpose_small", lambda x: x.t().contiguous(), (1024, 512), (8, 12)),
    single("transpose_large", lambda x: x.t().contiguous(), (16384, 8192), (12, 8)),
    single("transpose_odd", lambda x: x.t().contiguous(), (16383, 8191), (13, 7)),
    single("heads", _heads, (32, 2048, 1024), (2, 4, 128)),
    single("half_heads", _heads, (32, 4096, 1024), (2, 4, 128), _HALF),
    single("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (32, 256, 128, 128), (2, 8, 4, 4)),
    single("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (32, 64, 256, 256), (2, 3, 4, 4)),
    single("channel_shuffle", lambda x: F.channel_shuffle(x, 4), (64, 128, 128, 128), (2, 8, 4, 4)),
    single("cat_odd", lambda x: torch.cat([x, x], 1), (65536, 1001), (4, 11)),
    single("stack_last", lambda x: torch.stack([x, x], -1), (64, 1 << 20), (4, 8)),
    single("roll", lambda x: x.roll((3, 5), (2, 3)), (64, 64, 128, 256), (2, 3, 4, 8)),
    single("flip", lambda x: x.flip(3), (64, 64, 128, 256), (2, 3, 4, 8)),
    single("repeat", lambda x: x.repeat(1, 4), (8192, 4096), (4, 8)),
    single("pad", lambda x: F.pad(x, (1, 1, 1, 1)), (64, 64, 128, 256), (2, 3, 4, 8)),
    single("pad_reflected", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (64, 64, 128, 256), (2, 3, 4, 8)),
    single("windows", lambda x: F.unfold(x, 3, padding=1), (32, 16, 128, 128), (2, 3, 4, 8)),
    single("patches", lambda x: x.unflatten(3, (-1, 16)).unflatten(2, (-1, 16)).permute(0, 2, 4, 1, 3, 5).flatten(3),
          (256, 3, 224, 224), (2, 3, 32, 32)),
    single("part", lambda x: x[:, 1:].contiguous(), (8192, 16384), (4, 9)),
    single("every_second", lambda x: x[:, ::2].contiguous(), (8192, 16384), (4, 8)),
)
# fmt: on
