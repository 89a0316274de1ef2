"""Where results are rounded to 16 bits, exponentials and quotients may be good to few digits; nowhere else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import render
from tests.support.regions import NO_SPLIT, region


def _shares(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row's exponentials, those of their sum, and they themselves."""
    power = (x - x.amax(1, True)).exp()
    return power / power.sum(1, True), power


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "softmax": (lambda x: x.softmax(1), ("exp2_few",)),
    "softmax and a factor": (lambda x: -2 * x.softmax(1), ("exp2_few",)),
    "shares": (lambda x: _shares(x.float())[0].to(x.dtype), ("exp2_few",)),
    "shares and what they are of": (lambda x: math.prod(_shares(x.float())).to(x.dtype), ("exp_few", "divide_by_few")),
    "exponentials below the largest": (lambda x: (x - x.amax(1, True)).exp(), ("exp_few",)),
    "a power of two": (lambda x: x.exp2(), ("exp2_few",)),
    "a gate": (lambda x: F.silu(x), ("sigmoid_few",)),
    "a hyperbolic tangent": (lambda x: 3 * x.tanh(), ("tanh_few",)),
    "an exponential": (lambda x: x.exp(), ("exp_few",)),
    "softplus": (lambda x: F.softplus(x), ("exp_few", "log1p_few")),
    "logarithm of a gate": (lambda x: F.logsigmoid(x), ("exp_few", "log1p_few")),
    "mish": (lambda x: F.mish(x), ("exp_few",)),
    "one side an exponential": (lambda x: 2 * F.elu(x), ("expm1_few",)),
    "extremes": (lambda x: x.tanh().clamp(-0.5, 0.75), ("tanh_few",)),
    "a sum of positive numbers": (lambda x: 1 / (x.exp() + x.sigmoid() * 2), ("exp_few", "sigmoid_few")),
    "a sum of any numbers": (lambda x: x.exp() + x, ()),
    "an exponential of it": (lambda x: F.softplus(x).exp(), ("exp_few",)),
    "a difference": (lambda x: x.exp() - 1, ()),
    "a difference of gates": (lambda x: x.sigmoid() - x.sigmoid().flip(1), ()),
    "a logarithm": (lambda x: x.log_softmax(1), ()),
    "a comparison": (lambda x: torch.where(x.sigmoid() > 0.5, x, -x), ()),
    "a mean of exponentials": (lambda x: x.exp().mean(1), ()),
    "softmax in float32": (lambda x: x.float().softmax(1), ()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_few_digits(name: str, dtype: torch.dtype) -> None:
    function, few = CASES[name]
    made = region(function, torch.randn(3, 40).to(dtype))
    program = made.passed(NO_SPLIT)
    source = render(program, DeviceFacts.h200())
    assert set(re.findall(r"fp::(\w+_few)\(", source.text)) == set(few)


def test_online_softmax_has_few_digits() -> None:
    """Rows that do not stay on the chip are reduced once; the state computes exponentials."""
    x = torch.empty(2, 1 << 20, dtype=torch.float16, device="meta")
    for result, digits in ((torch.float16, ", true"), (torch.float32, "")):
        made = region(lambda x, to=result: x.softmax(1, dtype=torch.float32).to(to), x)
        text = render(made.passed(NO_SPLIT), DeviceFacts.h200()).text
        assert f"fp::Softmax<float{digits}> " in text


BEHIND: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "a product": (lambda x, w: F.silu(x @ w), (64, 64), (64, 64)),
    "a product, one by one": (lambda x, w: F.silu(x @ w), (64, 64), (64, 63)),
    "a convolution": (lambda x, w: F.silu(F.conv2d(x, w)), (2, 16, 20, 20), (8, 16, 3, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("name", BEHIND)
def test_few_digits_behind_anchors(name: str, dtype: torch.dtype) -> None:
    function, *shapes = BEHIND[name]
    made = region(function, *(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes), cuda=True)
    source = generate(made.program, made.builder, DeviceFacts.h200(), AnchorSource.HALVES).source
    assert set(re.findall(r"fp::(sigmoid\w*)\(", source.text)) == {
        "sigmoid_few" if dtype is torch.float16 else "sigmoid"
    }
