"""Rows that teams of blocks share, on a GPU: as far from float64 as eager is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusepass
from fusepass.numerics.check import check

pytestmark = pytest.mark.gpu

Case = tuple[nn.Module, tuple[int, ...], torch.dtype]

CIRCULAR_BUFFERS: dict[str, Case] = {
    "weights of channels": (nn.GroupNorm(1, 192), (64, 192, 56, 56), torch.float32),
    "of halves": (nn.GroupNorm(1, 192), (64, 192, 56, 56), torch.float16),
    "rows that begin anywhere": (nn.Sequential(nn.GroupNorm(1, 97), nn.ReLU()), (96, 97, 57, 57), torch.float32),
    "one team": (nn.GroupNorm(1, 64), (16, 64, 256, 256), torch.float32),
}
"""Normalisations whose blocks keep a ring."""


@pytest.mark.parametrize("name", CIRCULAR_BUFFERS)
@torch.no_grad()
def test_rings(name: str) -> None:
    module, shape, dtype = CIRCULAR_BUFFERS[name]
    model = module.to("cuda", dtype)
    for parameter in model.parameters():
        parameter.normal_()
    fused = fusepass.optimize(model, tune="off")
    for _ in range(2):
        outcome = check(model, fused, (torch.randn(shape, device="cuda", dtype=dtype) + 3,))
        assert outcome.ok, outcome.explain()
    (region,) = fused.report().regions
    assert "a ring of " in region.kernels[0].schedule
