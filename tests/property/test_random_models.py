"""Random models mean the same when they are optimised: values, metadata, buffers, inputs, and no fallback."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fusepass
from fusepass.config import Algebra, override
from fusepass.numerics.check import check
from tests.fuzz.chunk import KNOWN
from tests.fuzz.noise import is_noise
from tests.property.random_models import models
from tests.property.script import Model
from tests.support.interpreted import interpreted

pytestmark = pytest.mark.models

quickly = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
)


def run(drawn: Model) -> None:
    """Hold an optimised model against PyTorch, twice: the second call takes the short way."""
    model, inputs = drawn.make()
    with override(debug=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = fusepass.optimize(model)
        for call in ("first", "second"):
            outcome = check(model, fused, inputs)
            right = outcome.ok or is_noise(model, inputs, outcome, drawn.coarsest)
            assert right, f"{call} call: {outcome.explain()}\n{fused.report()}"
    report = fused.report()
    failed = [region.reason for region in report.regions if region.reason is not None]
    assert not [reason for reason in failed if reason not in KNOWN], failed


@settings(quickly, max_examples=28)
@given(drawn=models())
def test_interpreted_like_eager(drawn: Model) -> None:
    with interpreted():
        run(drawn)


@settings(quickly, max_examples=18)
@given(drawn=models(), level=st.sampled_from(list(Algebra)))
def test_every_level_of_algebra_like_eager(drawn: Model, level: Algebra) -> None:
    """All rules together; the level that assumes finite numbers gets no others."""
    assume(level is not Algebra.FINITE or "inf" not in drawn.text)
    with interpreted(), override(algebra=level):
        run(drawn)


@settings(quickly, max_examples=12)
@given(drawn=models(most_steps=8))
def test_compiled_like_eager(drawn: Model) -> None:
    run(drawn)


class Idle(torch.nn.Module):
    """Writes through a dropout that is switched off, which gives its input back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x, 0.3, training=False)
        y.add_(1)
        return F.gelu(y)


class ExtremeOfSeveralResults(torch.nn.Module):
    """A rule for one result meets an operator with two."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x.abs() + 0.1) ** 0.5
        return y.min(0, keepdim=True)[0], y.max()


class SplitUnderConcatenation(torch.nn.Module):
    """Parts of a tensor, read beyond their ends where another part of the result stands."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = x.chunk(3, -1)
        return torch.stack([a.sigmoid() * b, (c + a).tanh()], 1)


class WritesToParts(torch.nn.Module):
    """Writes to slices, which tracing turns into scatters; one leaves gaps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sigmoid()
        y[..., 0:2] = y[..., 0:2] * 2 - 0.5
        y[..., 1::3] = y[..., 1::3] ** 2
        y[:, -1] = 0.25
        return F.pad(y, (1, 1), mode="circular") * 2


class OverlappingWindows(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.unfold(2, 3, 2), (3,), eps=1e-2)


@pytest.mark.parametrize(
    "kind", [Idle, ExtremeOfSeveralResults, SplitUnderConcatenation, WritesToParts, OverlappingWindows]
)
def test_found_before(kind: type[torch.nn.Module]) -> None:
    model, x = kind(), torch.randn(2, 4, 18)[..., ::2]
    with interpreted(), override(debug=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    report = fused.report()
    assert report.fused_share > 0.6, str(report)
    assert not report.fallbacks


def test_rms_norm_in_half_precision_is_decomposed() -> None:
    """PyTorch's decomposition adds the number eps with a positional alpha."""
    model, x = torch.nn.RMSNorm((5, 7), eps=1e-2), torch.randn(3, 5, 7)
    with interpreted(), override(debug=True):
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert fused.report().fused_share == 1


def test_a_constant_number_survives_dynamo() -> None:
    """AOTAutograd compiles under a fake tensor mode, in which a number cannot be read."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.tensor(0.5)).tanh().sigmoid()

    x = torch.randn(4, 6)
    with interpreted():
        result = torch.compile(function, backend="fusepass")(x)
    torch.testing.assert_close(result, function(x))
