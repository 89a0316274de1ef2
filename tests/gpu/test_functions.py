"""Short functions as people write them, on a GPU: as far from float64 as eager is, small and large."""

from __future__ import annotations

import pytest
import torch

import fusepass
from benchmarks.functions import FUNCTIONS
from benchmarks.layers import Size, Workload
from fusepass.numerics.check import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", Size, ids=str)
@pytest.mark.parametrize("workload", FUNCTIONS, ids=lambda workload: workload.name)
@torch.no_grad()
def test_values(workload: Workload, size: Size) -> None:
    model = workload.model(size, "cuda")
    fused = fusepass.optimize(model, tune="off")
    inputs = workload.inputs(size, "cuda")
    outcome = check(model, fused, inputs)
    assert outcome.ok, outcome.explain()
    if size is Size.FULL:
        assert fused.report().regions
