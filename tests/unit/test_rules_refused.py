"""What rules must leave alone, found by comparing their results with eager: types that wrap, dimensions that differ, digits that cancel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.config import override
from tests.support.interpreted import interpreted
from tests.support.regions import Functional

X = torch.tensor([[0.5, 0.5, 1.7], [2.6, 0.9, 0.8]])
BYTES = torch.tensor([1, 2, 3, 0], dtype=torch.uint8)
IMAGES, FILTERS = torch.randn(8, 32, 64), torch.randn(32, 32, 1)

CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a pool over channels": (lambda x, w: F.avg_pool2d(F.conv1d(x, w), 3, (1, 2), 1), (IMAGES, FILTERS)),
    "a pool over samples": (
        lambda x, w: F.avg_pool3d(F.conv2d(x, w), 3, (1, 2, 2), 1),
        (IMAGES.view(2, 32, 16, 16), FILTERS[..., None]),
    ),
    "minus a byte, added": (lambda x, y: (x + (-y)).tanh(), (torch.arange(1.0, 5.0), BYTES)),
    "minus a byte, subtracted": (lambda x, y: (x - (-y)).tanh(), (torch.arange(1.0, 5.0), BYTES)),
    "a product with minus a byte": (lambda x, y: (-x) * (-y), (torch.arange(1.0, 5.0), BYTES)),
    "a pool that divides by less": (
        lambda x: F.avg_pool2d(torch.sigmoid(x), 2, divisor_override=1).clamp(max=2),
        (torch.full((1, 4, 4), 5.0),),
    ),
    "filled with a whole number": (lambda x: x * torch.full((3,), 2.5, dtype=torch.int64), (X,)),
    "filled with a byte that wraps": (lambda x: x + torch.full((3,), -1, dtype=torch.uint8), (X,)),
    "filled with a rounded number": (lambda x: x + torch.full((3,), 2049.0, dtype=torch.float16), (X,)),
    "filled with a truth": (lambda x: x * torch.full((3,), 2.0, dtype=torch.bool), (X,)),
    "a sum of whole sums": (lambda x: x.sum(1, dtype=torch.int64).sum(dtype=torch.float32).sin(), (X,)),
    "a sum of the bits": (lambda x: x.view(torch.int32).sum(dtype=torch.float32), (X,)),
    "a truth, bounded": (lambda x: x.clamp(0, 0.5).bool().float().clamp(max=0.6), (X,)),
    "a truth of what is negative": (lambda x: F.relu(-(x.clamp(-3, -2).bool().float())), (X,)),
    "a sum of no copies": (lambda x: x.expand(0, 3).sum(0), (torch.tensor([[1.0, 2.0, float("inf")]]),)),
    "scales beyond the type": (lambda x, w: ((x @ w) * 1e30 * 1e30) @ w, (torch.zeros(2, 3), torch.randn(3, 3))),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_eager_gives(name: str) -> None:
    function, inputs = CASES[name]
    with interpreted(), override(debug=True):
        found = fusepass.optimize(Functional(function))(*inputs)
    torch.testing.assert_close(found, function(*inputs), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [lambda x: (x - 1013.25) / 10 * 0.5, lambda x: (x - 1000) * 7.3 * 3.1, lambda x: (1013.25 - x) * 0.5 * 7.3],
)
def test_a_difference_is_taken_before_it_is_scaled(function: Callable[[Tensor], Tensor]) -> None:
    x = 1013.25 + 1e-2 * torch.randn(64, 64)
    with interpreted():
        fused = fusepass.optimize(Functional(function))
        found = fused(x)
    exact = function(x.double())
    eager = (function(x) - exact).norm()
    assert (found - exact).norm() <= 2 * eager + 1e-7 * exact.norm()


class TwiceConvolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x).squeeze(1) - self.conv(x).mean())


def test_what_is_written_twice_has_two_readers() -> None:
    """So a convolution is not summed inside for one of them."""
    model, x = TwiceConvolved(), torch.randn(4, 64, 32, 32)
    with torch.no_grad(), interpreted():
        fused = fusepass.optimize(model)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)
    (region,) = fused.report().regions
    assert [op.target for op in region.ops].count("aten.convolution") == 1


def test_a_large_unit_matrix_is_made_where_it_is_read() -> None:
    """PyTorch's decomposition compares numbers of 16 bits without sign from 256 rows on."""
    model, x = Functional(lambda x: (x + torch.eye(x.shape[0])).relu() * 2), torch.randn(300, 300)
    with interpreted():
        fused = fusepass.optimize(model)
        torch.testing.assert_close(fused(x), model(x))
    assert fused.report().fused_share == 1
