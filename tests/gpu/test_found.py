"""Programs that the search in random models found wrong on a GPU alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.numerics.check import check
from fusepass.report.records import SourceFile
from fusepass.training.backend import fusepass_backend

pytestmark = pytest.mark.gpu


class MasksBetweenConvolutions(nn.Module):
    """What ``torch.where`` gives is an input of a region of several kernels, which are replayed; its buffer is called so, too."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(5, 3, 3, padding=1), nn.ConvTranspose2d(3, 1, 3, padding=1)
        self.norm = nn.GroupNorm(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.after(torch.where(x[:, :1] > 0, self.before(x), 0.5)))


def test_what_where_gives_goes_to_several_kernels() -> None:
    model, x = MasksBetweenConvolutions().cuda(), torch.randn(8, 5, 4, 7, device="cuda")
    fused = fusepass.optimize(model, tune="off")
    for _ in range(4):
        outcome = check(model, fused, (x,))
        assert outcome.ok, outcome.explain()
    assert any("replay_" in source.text and "void* where," in source.text for source in _sources(fused))


def _sources(fused: Any) -> list[SourceFile]:
    return [source for region in fused.report().regions for source in region.sources]


class NormalisesAfterPadding(nn.Module):
    """Circular padding writes to views, so AOTAutograd traces it, which leaves RMSNorm whole on a GPU."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm((8,), eps=1e-2)
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(F.pad(x, [1, 1], mode="circular"))
        return y.relu() if self.branches and x.flatten()[0] > 100 else y.tanh()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rms_norm_of_traced_models_is_fused(dtype: torch.dtype) -> None:
    """By Dynamo, for sizes that change, and by export, in turn: what one remembers serves the other."""
    for branches, rows in ((True, 5), (True, 6), (False, 5), (True, 7), (False, 7)):
        model, x = NormalisesAfterPadding(branches).cuda().to(dtype), torch.randn(rows, 6, device="cuda").to(dtype)
        fused = fusepass.optimize(model, tune="off")
        outcome = check(model, fused, (x,))
        assert outcome.ok, outcome.explain()
        report = fused.report()
        assert not [region.reason for region in report.regions if region.reason]
        assert not any("rms_norm" in refused.target for refused in report.refusals)


def test_rms_norm_is_trained_as_eager_trains_it() -> None:
    layer = nn.Sequential(nn.RMSNorm(24, eps=1e-5), nn.GELU()).cuda()
    compiled = torch.compile(layer, backend=fusepass_backend)
    x = torch.randn(16, 24, device="cuda", requires_grad=True)
    gradients = []
    for call in (layer, compiled):
        found = torch.autograd.grad(call(x).square().sum(), [x, *layer.parameters()])
        gradients.append(found)
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected)


def test_pools_of_halves_behind_what_lies_channels_last() -> None:
    """The second convolution's input is handed over so, without its border; windows take its positions in an order of their own."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU()]
    model, x = nn.Sequential(*layers, nn.MaxPool2d(2)).half().cuda(), torch.rand(16, 64, 56, 56, device="cuda").half()
    fused = fusepass.optimize(model, tune="max")
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert not fused.report().fallbacks


@torch.no_grad()
def test_rows_that_are_fetched_ahead() -> None:
    """The hint that a copy leaves the cache first came from the wrong register, where its place was a sum: an illegal instruction."""
    model, x = nn.LayerNorm((192, 56, 56)).cuda(), torch.randn(64, 192, 56, 56, device="cuda")
    fused = fusepass.optimize(model, tune="off")
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert any("fetched ahead" in kernel.schedule for region in fused.report().regions for kernel in region.kernels)
