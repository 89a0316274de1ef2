"""Convolutions and matrix products become library calls without their bias, which joins the kernels behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusepass.codegen.ir.program import Ref
from fusepass.codegen.lowering.tensor import Unsupported
from tests.support.regions import NO_SPLIT, region

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, 2, 1), (2, 3, 9), "convolution"),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 5, 6), "convolution"),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2, bias=False), (1, 2, 5, 5, 5), "convolution"),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1), (2, 3, 4, 5), "convolution"),
    "linear": (lambda: nn.Linear(6, 5), (4, 6), "mm"),
    "linear of a sequence": (lambda: nn.Linear(6, 5), (2, 3, 6), "mm"),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), (2, 3, 6), "mm"),
}


@pytest.mark.parametrize("name", MODELS)
def test_anchor(name: str) -> None:
    model, shape, operator = MODELS[name]
    made = region(nn.Sequential(model(), nn.GELU()).double(), torch.randn(shape, dtype=torch.float64))
    calls = [call.target for call in made.program.calls]
    assert calls.count(f"aten.{operator}.default") == 1
    if operator == "convolution":
        assert made.program.calls[0].args[2] is None, "the bias is left to the kernel"
    made.check()
    made.check(made.passed(NO_SPLIT))


def test_channels_last() -> None:
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    made = region(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)).double(), x)
    made.check()
    (call,) = made.program.calls
    assert made.program.buffer(call.result).strides[1] == 1


def test_half_products_keep_their_bias() -> None:
    """The library adds it before it rounds; a separate addition would round twice."""
    made = region(nn.Sequential(nn.Linear(6, 5), nn.ReLU()).half(), torch.randn(4, 6).half())
    call = made.program.calls[-1]
    assert call.target == "aten.addmm.default"
    assert [type(argument) for argument in call.args] == [Ref, Ref, Ref]
    made.check(tolerance=4e-3)


def test_two_anchors() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * torch.sigmoid(self.b(x))

    made = region(Two().double(), torch.randn(4, 6, dtype=torch.float64))
    made.check()
    passed = made.passed(NO_SPLIT)
    assert len(passed.kernels) == 1
    made.check(passed)


def test_batched_products() -> None:
    a, b, c = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 4), (2, 4, 5), (2, 3, 5)))
    region(lambda a, b, c: (torch.bmm(a, b).relu(), torch.baddbmm(c, a, b) + 1), a, b, c).check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 3), (2, 1), (0, 2), (3, 2)])
def test_products_with_factors(dtype: torch.dtype, beta: int, alpha: int) -> None:
    a, b, c = (torch.randn(shape).mul(4).to(dtype) for shape in ((3, 4), (4, 5), (3, 5)))
    if beta == 0 and dtype.is_floating_point:
        c[0, 0] = float("nan")
    made = region(
        lambda a, b, c: (
            torch.addmm(c, a, b, beta=beta, alpha=alpha) * 2,
            torch.baddbmm(c[None], a[None], b[None], beta=beta, alpha=alpha).abs(),
        ),
        a, b, c,
    )  # fmt: skip
    made.check(exact=False)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x + 1) @ x, "mm of a value computed inside the region"),
        (lambda x: F.conv1d(x[None] * 2, x[:2, :, None]), "convolution of a value computed inside"),
    ],
)
def test_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        region(function, torch.randn(4, 4))
