"""A value that several kernels or loops of a GPU compute has one set of bits in all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusepass
from fusepass.training.backend import fusepass_backend
from tests.support.regions import Functional

pytestmark = pytest.mark.gpu

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sin": torch.sin,
    "gelu": F.gelu,
    "silu": F.silu,
    "affine": lambda x: x * 1.1 + x * x,
    "softmax": lambda x: x.softmax(-1),
}
TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_nothing_exceeds_its_own_pool_or_extreme(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]

    def compared(x: Tensor) -> list[Tensor]:
        y = function(x)
        rows, columns = y.amax(-1, keepdim=True), y.amax(-2, keepdim=True)
        pooled = F.max_pool2d(y, (1, 19), stride=1, padding=(0, 9))
        return [y, y > pooled, y == rows, y == columns, y > rows, y > columns]

    fused = fusepass.optimize(Functional(compared), tune="off")
    for shape in ((4, 3, 67, 251), (1, 2, 300, 1030)):
        x = torch.randn(shape, device="cuda").to(dtype)
        y, over, in_row, in_column, over_row, over_column = fused(x)
        assert not over.any()
        assert not over_row.any()
        assert not over_column.any()
        assert torch.equal(in_row, y == y.amax(-1, keepdim=True))
        assert torch.equal(in_column, y == y.amax(-2, keepdim=True))
    assert fused.report().regions


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_finds_the_extremes_of_forward(name: str, dim: int, dtype: torch.dtype) -> None:
    """The gradient of an extreme is shared among the elements equal to it, so one at least has a part of it."""
    function = FUNCTIONS[name]

    def extremes(x: Tensor) -> Tensor:
        y = function(x)
        weighed = torch.where(y == y.amax(dim, keepdim=True), y * 2, y * 0.0)
        return y.amax(dim).sum() + weighed.sum()

    x = torch.randn(33, 40, 130, device="cuda").to(dtype)
    ours, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.compile(extremes, backend=fusepass_backend)(ours).backward()
    extremes(eager).backward()
    assert ours.grad is not None
    assert eager.grad is not None
    assert bool(ours.grad.isfinite().all())
    # Which elements have a part can only differ where eager's own values are one rounding apart.
    differing = ((ours.grad != 0) != (eager.grad != 0)).sum()
    assert int(differing) <= 1e-3 * x.numel()
