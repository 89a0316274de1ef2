"""The mission models keep to the numeric policy whatever their shapes, dtypes, parameters and formats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import fusepass
from fusepass.numerics.check import check, reference
from fusepass.report.report import CaptureRoute
from tests.property.strategies import Chain, cases

pytestmark = pytest.mark.models


@pytest.mark.parametrize("chain", Chain, ids=lambda chain: chain.value)
@settings(
    max_examples=6,
    phases=[Phase.explicit, Phase.generate],  # shrinking would build code for every smaller case it tries
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(data=st.data())
def test_fused_like_eager(chain: Chain, data: st.DataObject) -> None:
    case = data.draw(cases(chain))
    spread = chain is Chain.SCALE_BATCH_NORM_POOL
    x = _unlike_samples(case.input) if spread else case.input
    # Where batch norm and pool average over the same numbers the result is 0 but for rounding: nothing to compare.
    assume(not spread or _exceeds(reference(case.model, (x,)), 0.1))
    fused = fusepass.optimize(case.model)
    first = check(case.model, fused, (x,))
    assert first.ok, first.explain()
    other = torch.rand_like(case.input)
    second = check(case.model, fused, (_unlike_samples(other) if spread else other - 0.5,))
    assert second.ok, f"second call: {second.explain()}"
    report = fused.report()
    assert report.fallbacks == ()
    if case.dtype == torch.float32 and report.capture is CaptureRoute.TRACED:
        assert report.regions, "nothing was fused"


def _exceeds(values: torch.Tensor, bound: float) -> bool:
    return values.numel() == 0 or bool(values.abs().amax() > bound)


def _unlike_samples(x: torch.Tensor) -> torch.Tensor:
    """`x` with samples of growing size, so that their means differ by more than rounding."""
    scale = torch.linspace(1.0, 4.0, len(x), dtype=x.dtype).reshape(-1, *[1] * (x.dim() - 1))
    return x.mul_(scale)


def test_equal_numbers_have_exactly_their_mean() -> None:
    model, rows = torch.nn.LayerNorm(9, elementwise_affine=False), torch.linspace(0.1, 1.0, 64)[:, None].repeat(1, 9)
    with torch.no_grad():
        assert torch.equal(fusepass.optimize(model)(rows), model(rows))
