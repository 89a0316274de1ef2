"""Submodules, parameters and buffers of any name are traced: a name may be that of a method, a keyword, or none at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.report.report import CaptureRoute
from tests.support.interpreted import original_operators

NAMES = [
    "float",
    "",
    "self",
    "class",
    "a-b",
    "1",
    "forward",
    "é",
    "None",
    "a.b",
    "__init__",
    "double",
    '"',
    "\\n",
    "\n",
    "T",
    "model",
]


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._modules[name] = nn.Sequential(nn.LayerNorm(4), nn.Tanh())
        self.inner = nn.Module()
        self.inner._parameters[name] = nn.Parameter(torch.rand(4))
        self.more = nn.Module()
        self.more._buffers[name] = torch.rand(4)

    def forward(self, x: Tensor) -> Tensor:
        first, factor, added = (
            self._modules[self.name],
            self.inner._parameters[self.name],
            self.more._buffers[self.name],
        )
        assert first is not None
        return torch.sigmoid(first(x) * factor + added)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
@pytest.mark.invariant(45)
def test_any_name_is_traced(name: str) -> None:
    model, x = Named(name), torch.randn(3, 4)
    with original_operators():
        optimised = fusepass.optimize(model)
        for _ in range(2):
            torch.testing.assert_close(optimised(x), model(x))
            model.inner._parameters[name] = nn.Parameter(torch.rand(4))
        assert optimised.report().capture is CaptureRoute.TRACED
        assert optimised.report().regions
        torch.testing.assert_close(optimised.graph_module(x)(x), model(x))
