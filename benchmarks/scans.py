"""Running sums, products and others, alone and with what is usual around them: large, odd and of halves."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.layers import single


def _exclusive(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x], 1)[:, :-1].cumsum(1)


# A table, as in workloads.py.
# fmt: off
SCANS = (
    single("cumsum_large", lambda x: x.cumsum(1), (8192, 32768), (4, 50)),
    single("cumsum_odd", lambda x: x.cumsum(1), (16383, 8191), (5, 33)),
    single("cumsum_short_rows", lambda x: x.cumsum(1), (2 << 20, 64), (9, 16)),
    single("cumsum_masked", lambda x: (x * (x > 0.5)).cumsum(1), (8192, 16384), (4, 50)),
    single("cumsum_exclusive", _exclusive, (8192, 16384), (4, 50)),
    single("cumsum_reversed", lambda x: x.flip(1).cumsum(1).flip(1), (8192, 16384), (4, 50)),
    single("cumsum_of_columns", lambda x: x.cumsum(1), (64, 2048, 1024), (3, 20, 7)),
    single("cumprod", lambda x: (x * 0.02 + 0.99).cumprod(1), (8192, 16384), (4, 50)),
    single("half_cumsum", lambda x: x.cumsum(1), (16384, 16384), (4, 64), torch.float16),
    single("cumsum_of_softmax", lambda x: x.softmax(1).cumsum(1), (20000, 2000), (4, 50)),
    single("half_shares_so_far", lambda x: x.exp().cumsum(1) / x.exp().sum(1, keepdim=True), (8192, 8191), (5, 33), torch.float16),
    single("greatest_so_far", lambda x: x.cummax(1).values, (20000, 2000), (4, 50)),
    single("place_of_greatest_so_far", lambda x: x.cummax(1).indices, (8192, 4096), (4, 50)),
    single("logcumsumexp", lambda x: x.logcumsumexp(1), (8192, 4096), (4, 50)),
    single("logcumsumexp_of_columns", lambda x: x.logcumsumexp(1), (64, 512, 1024), (3, 20, 7)),
)
# fmt: on
