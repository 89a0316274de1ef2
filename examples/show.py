"""Runs a model as it is and optimised, and prints what fused, whether the results are right, and how long both take."""

from __future__ import annotations

from typing import Any

import torch
from demo import speed
from torch import nn

import fusepass
from fusepass.numerics import check


def show(name: str, model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Says whether the results were right."""
    device = next(model.parameters()).device.type
    with torch.no_grad():
        fused = fusepass.optimize(model, inputs)
        report = fused.report()
        verdict = check.check(model, fused, inputs)
        print(
            f"{name} on {device}: {report.ops_fused} of {report.ops_total} operators fused in {len(report.regions)} regions"
        )
        print(f"against eager and float64: {verdict.explain()}")
        print(speed(fused, model, inputs, device))
    return verdict.ok
