"""Functions of elements of which some tensors lie otherwise than the result, and columns that are reduced; each alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layers import Input, single

_HALF = torch.float16
_IMAGES, _CHANNELS = Input((32, 64, 256, 256)), Input((64, 1, 1))
_FEW, _FEW_CHANNELS = Input((2, 8, 5, 6)), Input((8, 1, 1))
_COLUMNS, _FEW_COLUMNS = (32, 4096, 4095), (2, 33, 35)


def _sum(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def _product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def _slopes(x: Tensor, y: Tensor) -> Tensor:
    return F.prelu(x, y.flatten())


def _and_transpose(x: Tensor, y: Tensor) -> Tensor:
    return x + y.transpose(1, 2)


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    return torch.triu(x @ y)


_SQUARES = ((Input((4096, 4096)), Input((4096, 4096))), (Input((40, 40)), Input((40, 40))))

# A table, as in workloads.py.
# fmt: off
BROADCASTS = (
    single("bias_of_channels", _sum, (_IMAGES, _CHANNELS), (_FEW, _FEW_CHANNELS)),
    single("half_bias_of_channels", _sum, (_IMAGES, _CHANNELS), (_FEW, _FEW_CHANNELS), _HALF),
    single("prelu_of_channels", _slopes, (_IMAGES, _CHANNELS), (_FEW, _FEW_CHANNELS)),
    single("factor_of_rows", _product, (Input((32768, 4096)), Input((32768, 1))), (Input((9, 16)), Input((9, 1)))),
    single("half_positions", _sum, (Input((256, 197, 768)), Input((1, 197, 768))), (Input((2, 5, 8)), Input((1, 5, 8))), _HALF),
    single("half_and_transpose", _and_transpose, (Input((64, 1024, 1024)),) * 2, (Input((2, 9, 9)),) * 2, _HALF),
    single("half_each_with_each", _product, (Input((8192, 1)), Input((16384,))), (Input((9, 1)), Input((7,))), _HALF),
    single("half_to_float", lambda x: x.float(), (8192, 8192), (9, 8), _HALF),
    single("sum_of_columns", lambda x: x.sum(1), _COLUMNS, _FEW_COLUMNS),
    single("maximum_of_columns", lambda x: x.amax(1), _COLUMNS, _FEW_COLUMNS),
    single("logsumexp_of_columns", lambda x: x.logsumexp(1), _COLUMNS, _FEW_COLUMNS),
    single("half_logsumexp_of_few_columns", lambda x: x.logsumexp(0), (4096, 8191), (33, 35), _HALF),
    single("upper_triangle_of_product", _triangle, *_SQUARES),
)
# fmt: on
