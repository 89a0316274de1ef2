"""The networks and losses of the benchmarks compute the same when they are optimised, at their small size."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import fusepass
from benchmarks.layers import Size, Workload
from benchmarks.losses import LOSSES
from benchmarks.networks import NETWORKS
from benchmarks.workloads import by_name
from fusepass.config import override
from fusepass.numerics.check import check
from fusepass.report.report import CaptureRoute
from tests.support.interpreted import interpreted

pytestmark = pytest.mark.models

ALL = NETWORKS + LOSSES


LONG = {"densenet_block", "mobilenet", "unet", "vgg16"}
"""What takes longest, and is much like a model of `tests.models.zoo` or another one here."""


def _names() -> list[Any]:
    """Every workload; a usual run tries one of those that have the same layers."""
    first = {*{workload.layers: workload.name for workload in reversed(ALL)}.values()} - LONG
    return [name if name in first else pytest.param(name, marks=pytest.mark.slow) for name in map(_name, ALL)]


def _name(workload: Workload) -> str:
    return workload.name


def _check(workload: Workload) -> None:
    """Two calls, everything captured in one run, generated, and nothing said of it."""
    model, inputs = workload.model(Size.REDUCED, "cpu"), workload.inputs(Size.REDUCED, "cpu")
    with override(debug=True), warnings.catch_warnings(), interpreted():
        warnings.simplefilter("error")
        fused = fusepass.optimize(model)
        for call in ("first", "second"):
            outcome = check(model, fused, inputs)
            assert outcome.ok, f"{call} call: {outcome.explain()}\n{fused.report()}"
    report = fused.report()
    assert report.capture is CaptureRoute.TRACED
    assert not report.fallbacks
    assert not [region.reason for region in report.regions if region.reason is not None]


@pytest.mark.parametrize("name", _names())
@pytest.mark.thinned(5)
def test_values_and_buffers(name: str) -> None:
    _check(by_name(name))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("workload", ALL, ids=_name)
def test_values_and_buffers_in_the_other_mode_and_other_types(workload: Workload, dtype: torch.dtype) -> None:
    _check(replace(workload, dtype=dtype, training=not workload.training))
