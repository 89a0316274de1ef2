"""Short functions as people write them with tensors: differences, distances, rotations, lookups, and reductions of what is pooled or enlarged."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layers import Input, single

_HALF = torch.float16


def _laplacian(x: Tensor) -> Tensor:
    inside = x[:, 1:-1, 1:-1]
    return x[:, 1:-1, 2:] + x[:, 1:-1, :-2] + x[:, 2:, 1:-1] + x[:, :-2, 1:-1] - 4 * inside


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), -1).flatten(-2)


def _rotated_halves(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def _normals(x: Tensor, y: Tensor) -> Tensor:
    return F.normalize(torch.linalg.cross(x, y), dim=-1)


def _relative(scores: Tensor, table: Tensor) -> Tensor:
    at = torch.arange(scores.shape[-1], device=scores.device)
    return (scores + table[:, at[:, None] - at + scores.shape[-1] - 1]).softmax(-1)


def _nearest(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y).square().sum(-1).argmin(1)


def _turned(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],)).transpose(1, 2).contiguous()


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, :, None] - y[:, None]).square().sum(-1)


def _pairs(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x[:, :, None] + y[:, None]).mean(1)


def _steps(time: Tensor) -> Tensor:
    angle = time[:, None] * torch.exp(torch.arange(160, device=time.device) * (-math.log(1e4) / 160))
    return torch.cat((angle.sin(), angle.cos()), -1)


def _enlarged_last(x: Tensor) -> Tensor:
    return F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2, mode="bilinear")


def _pooled_last(x: Tensor) -> Tensor:
    return F.avg_pool2d(x.permute(0, 3, 1, 2), 2)


def _means_and_maxima(x: Tensor) -> Tensor:
    return torch.cat((x.mean((2, 3)), x.amax((2, 3))), 1)


def _channel_means_and_maxima(x: Tensor) -> Tensor:
    return torch.stack((x.mean(1), x.amax(1)), 1)


def _weighted(scores: Tensor, values: Tensor) -> Tensor:
    return (scores.softmax(1)[..., None] * values).sum(1)


def _normalised_pool(x: Tensor) -> Tensor:
    return F.layer_norm(F.max_pool2d(x, 3, 2, 1).permute(0, 2, 3, 1), (x.shape[1],))


def _classes(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=4, mode="bilinear").argmax(1)


def _enlarged_shares(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest").softmax(1)


def _weighted_channels(x: Tensor, weights: Tensor) -> Tensor:
    return (x * weights).sum(-1)


def _bags(places: Tensor, table: Tensor) -> Tensor:
    return F.embedding(places, table).sum(1)


# A table, as in workloads.py.
# fmt: off
FUNCTIONS = (
    single("differences_of_neighbours", lambda x: x[:, 1:] - x[:, :-1], (512, 50_000), (3, 22)),
    single("laplacian", _laplacian, (64, 512, 512), (2, 7, 9)),
    single("rotated_pairs", _rotated, (Input((8, 32, 1024, 128)), Input((1024, 64)), Input((1024, 64))),
           (Input((2, 2, 5, 8)), Input((5, 4)), Input((5, 4)))),
    single("distances_each_with_each", _distances, (Input((64, 256, 16)),) * 2, (Input((2, 5, 3)),) * 2),
    single("mean_of_sums_of_pairs", _pairs, (Input((64, 2000)),) * 2, (Input((2, 9)),) * 2),
    single("each_looked_up", lambda x, i: x.gather(1, i), (Input((8192, 4096)), Input((8192, 4096), 4096)),
           (Input((3, 9)), Input((3, 9), 9))),
    single("bags_of_embeddings", _bags, (Input((4096, 32), 50_000), Input((50_000, 256))),
           (Input((3, 4), 7), Input((7, 8)))),
    single("sines_and_cosines_of_steps", _steps, (100_000,), (7,)),
    single("half_enlarged_channels_last", _enlarged_last, (32, 64, 64, 64), (2, 3, 5, 8), _HALF),
    single("half_avgpool_channels_last", _pooled_last, (64, 112, 112, 128), (2, 4, 6, 8), _HALF),
    single("means_and_maxima", _means_and_maxima, (64, 512, 28, 28), (2, 3, 5, 4)),
    single("means_and_maxima_of_channels", _channel_means_and_maxima, (64, 256, 56, 56), (2, 3, 5, 4)),
    single("attention_pool", _weighted, (Input((256, 512)), Input((256, 512, 512))), (Input((2, 5)), Input((2, 5, 4)))),
    single("means_of_frames", lambda x: x.unfold(-1, 16, 8).mean(-1), (256, 100_000), (2, 40)),
    single("maximum_and_place_of_rows", lambda x: x.argmax(-1), (20_000, 2500), (5, 9)),
    single("sum_of_rows", lambda x: x.sum(-1), (30_000, 2000), (5, 9)),
    single("sum_of_middle", lambda x: x.sum(1), (300, 512, 400), (3, 5, 4)),
    single("maxpool_layernorm_of_channels", _normalised_pool, (64, 64, 112, 112), (2, 3, 6, 6)),
    single("enlarged_shares_of_channels", _enlarged_shares, (16, 64, 128, 128), (2, 3, 4, 5)),
    single("enlarged_classes", _classes, (16, 21, 128, 128), (2, 3, 4, 5)),
    single("half_place_of_rows", lambda x: x.argmax(-1), (20_000, 5000), (5, 9), _HALF),
    single("half_place_of_columns", lambda x: x.argmax(1), (128, 1024, 1024), (3, 5, 9), _HALF),
    single("least_place_of_odd_rows", lambda x: x.argmin(-1), (256, 512, 511), (3, 5, 9)),
    single("grey", _weighted_channels, (Input((64, 512, 512, 3)), Input((3,))), (Input((2, 3, 3, 3)), Input((3,)))),
    single("half_sums_of_pairs", lambda x: x.sum(-1), (64_000_000, 2), (9, 2), _HALF),
    single("odd_rows_side_by_side", lambda x, y: torch.cat((x, y), -1), (Input((60_000, 100)), Input((60_000, 77))),
           (Input((5, 3)), Input((5, 4)))),
    single("sum_of_odd_middle_of_halves", lambda x: x.sum(1), (300, 512, 801), (3, 5, 7), _HALF),
    single("bfloat16_sum_of_tall_columns", lambda x: x.sum(0), (65_536, 3072), (40, 6), torch.bfloat16),
    single("cumsum_of_odd_middle", lambda x: x.cumsum(1), (256, 512, 511), (2, 9, 5)),
    single("cumsum_of_odd_rows", lambda x: x.cumsum(-1), (256, 512, 511), (2, 5, 9)),
    single("norm_of_cubes", lambda x: x.norm(3, -1), (100_000, 1000), (5, 9)),
    single("to_bytes", lambda x: (x * 255).round().to(torch.int8), (8192, 8192), (5, 9)),
    single("bfloat16_softplus", F.softplus, (8192, 16_384), (5, 9), torch.bfloat16),
    single("bfloat16_gelu", F.gelu, (8192, 16_384), (5, 9), torch.bfloat16),
    single("masked", lambda x, m: x.masked_fill(m == 0, -1e4), (Input((64, 1024, 1024)), Input((64, 1024, 1024), 2)),
           (Input((2, 5, 4)), Input((2, 5, 4), 2))),
    single("bfloat16_rotated_halves", _rotated_halves, (Input((4, 32, 2048, 128)), Input((2048, 128)), Input((2048, 128))),
           (Input((2, 2, 5, 8)), Input((5, 8)), Input((5, 8))), torch.bfloat16),
    single("normals", _normals, (Input((2_000_000, 3)),) * 2, (Input((9, 3)),) * 2),
    single("relative_positions", _relative, (Input((32, 16, 256, 256)), Input((16, 511))),
           (Input((2, 3, 5, 5)), Input((3, 9)))),
    single("nearest_points", _nearest, (Input((16_384, 16)), Input((1024, 16))), (Input((9, 5)), Input((7, 5)))),
    single("layernorm_turned", _turned, (64, 196, 512), (2, 5, 8)),
    single("bfloat16_layernorm_turned", _turned, (128, 196, 768), (2, 5, 8), torch.bfloat16),
    single("half_turned_round", lambda x: x.flip(-1) * 2, (8192, 8192), (5, 8), _HALF),
    single("rows_looked_up", lambda x, i: x.index_select(1, i), (Input((64, 1000, 256)), Input((500,), 1000)),
           (Input((2, 5, 4)), Input((3,), 5))),
)
# fmt: on
