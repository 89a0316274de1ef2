"""Every model of the zoo computes the same when it is optimised, in both modes, and most of it is fused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils._pytree import tree_map_only

import fusepass
from fusepass.config import override
from fusepass.numerics.check import check
from tests.models.zoo import ZOO
from tests.support.interpreted import interpreted

pytestmark = pytest.mark.models


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.thinned(5)
def test_values_and_buffers(name: str, training: bool) -> None:
    entry = ZOO[name]
    model, inputs = entry.make().train(training), entry.inputs()
    with override(debug=True), warnings.catch_warnings(), interpreted():
        warnings.simplefilter("ignore")
        fused = fusepass.optimize(model)
        for call in ("first", "second"):
            outcome = check(model, fused, inputs)
            assert outcome.ok, f"{call} call: {outcome.explain()}\n{fused.report()}"
    report = fused.report()
    failed = [region.reason for region in report.regions if region.reason is not None]
    assert not failed
    if not training:
        assert report.fused_share >= entry.floor, str(report)


@pytest.mark.parametrize("name", ZOO)
def test_a_model_runs_where_its_inputs_are(name: str) -> None:
    """On any other device, operators refuse constants that a model leaves on the CPU; the meta device is everywhere."""
    entry = ZOO[name]
    entry.make().to("meta")(*tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), entry.inputs()))
