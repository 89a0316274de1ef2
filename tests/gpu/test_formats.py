"""Convolutions made to run channels last on a CUDA device: values, strides, live parameters, one region after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fusepass
import fusepass.codegen.search.space
from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.numerics.check import check
from fusepass.report.report import RegionState
from tests.support.precision import exact_products
from tests.unit.test_anchor_formats import MODELS, Chain

pytestmark = [pytest.mark.gpu, pytest.mark.models]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _channels_last(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products in full precision, because results are held against float64."""
    monkeypatch.setattr(
        fusepass.codegen.search.space, "anchor_formats", lambda graph, facts: (AnchorFormat.CHANNELS_LAST,)
    )
    with exact_products(), torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_values_and_strides(name: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[name]
    model = make().to("cuda", dtype).eval()
    optimised = fusepass.optimize(model)
    for space in (shape[2:], tuple(size * 3 + 1 for size in shape[2:]) if name != "layer norm" else shape[2:]):
        x = torch.rand((*shape[:2], *space), device="cuda").to(dtype)
        outcome = check(model, optimised, (x,))
        assert outcome.ok, outcome.explain()
        got, wanted = optimised(x), model(x)
        for mine, eager in zip(*((y if isinstance(y, tuple) else (y,)) for y in (got, wanted)), strict=True):
            assert mine.stride() == eager.stride()
    assert {region.state for region in optimised.report().regions} == {RegionState.FUSED}
    assert not optimised.report().fallbacks


def test_parameters_are_live_in_either_layout() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.GELU()).cuda()
    optimised = fusepass.optimize(model)
    x = torch.rand(4, 8, 20, 20, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(optimised(x), model(x), rtol=1e-4, atol=1e-4)
        model[0].weight.data.mul_(-1.5)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(optimised(x), model(x).contiguous(), rtol=1e-4, atol=1e-4)


def test_two_convolutions_have_one_conversion() -> None:
    model = Chain(lambda y: torch.zeros(1, device="cuda")).cuda()
    x = torch.rand(2, 4, 30, 31, device="cuda")
    optimised = fusepass.optimize(model)
    for mine, eager in zip(optimised(x), model(x), strict=True):
        assert mine.stride() == eager.stride()
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)
    kernels = [kernel.name for region in optimised.report().regions for kernel in region.kernels]
    assert sum("channels_last" in name for name in kernels) == 1


def test_capture_in_a_graph() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU()).cuda()
    optimised = fusepass.optimize(model)
    x = torch.rand(4, 8, 20, 20, device="cuda")
    optimised(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = optimised(x)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-4)
