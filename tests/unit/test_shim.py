"""Capture declines results of a mode that forward enters."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.capture.trace import Captured, CaptureFailure, capture

MODES: dict[str, tuple[AbstractContextManager[Any], AbstractContextManager[Any], str]] = {
    "gradients": (torch.no_grad(), torch.enable_grad(), "records gradients"),
    "inference": (torch.no_grad(), torch.inference_mode(), "inference mode"),
    "no inference": (torch.inference_mode(), torch.inference_mode(False), "records gradients"),
}


class Enters(nn.Module):
    def __init__(self, mode: AbstractContextManager[Any], copies: bool) -> None:
        super().__init__()
        self.copies = copies
        self.layer = nn.Linear(4, 4)
        self.enter = lambda: mode

    def forward(self, x: Tensor) -> Tensor:
        x = copy.deepcopy(x) if self.copies else x  # which is not recorded, but exported
        with self.enter():
            return torch.tanh(self.layer(x)) * 2


@pytest.mark.parametrize(
    ("mode", "copies"),
    [("gradients", False), ("gradients", True), ("inference", False), ("inference", True), ("no inference", False)],
)
def test_results_of_another_mode_are_declined(mode: str, copies: bool) -> None:
    around, inside, text = MODES[mode]
    model, x = Enters(inside, copies), torch.randn(3, 4)
    optimised = fusepass.optimize(model, tune="off")
    with around:
        failure = capture(model, (x,), {})
        assert isinstance(failure, CaptureFailure)
        assert failure.reason.startswith("forward returns a tensor")
        assert text in failure.reason
        for _ in range(2):
            got, wanted = optimised(x), model(x)
            assert torch.equal(got, wanted)
            assert got.requires_grad == wanted.requires_grad
            assert got.is_inference() == wanted.is_inference()


@torch.no_grad()
def test_inputs_states_and_views_may_be_of_any_mode() -> None:
    class Gives(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return x, x[0], self.weight, self.weight.t(), x + 1

    with torch.inference_mode():
        inputs = torch.randn(4, 4)
    for x in (inputs, torch.randn(4, 4, requires_grad=True)):
        model = Gives(4, 4)
        assert isinstance(capture(model, (x,), {}), Captured)
        for got, wanted in zip(fusepass.optimize(model, tune="off")(x), model(x), strict=True):
            assert torch.equal(got, wanted)
            assert got.requires_grad == wanted.requires_grad
            assert got.is_inference() == wanted.is_inference()
