"""Attention that is written out, on a CUDA device: which kernel serves it, values, what is not finite, how it lies."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.compile.pipeline import CompiledGraph
from fusepass.numerics.check import compare
from fusepass.patterns.rules import attention as rule
from fusepass.training.backend import Backend
from tests.unit.test_rules_attention import FIRES, RULE

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HALVES = DTYPES[:2]


class Written(nn.Module):
    """One of the spellings as a module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = FIRES[name][0]

    def forward(self, *inputs: Tensor) -> Tensor:
        value: Tensor = self.function(*inputs)
        return value


class Layer(nn.Module):
    """Self-attention of heads that lie beside each other, between two linear layers."""

    def __init__(self, channels: int, heads: int, causal: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.bias = nn.Parameter(torch.randn(heads, 1, 1)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        n, length, channels = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if self.bias is not None:
            place = torch.arange(length, device=x.device)
            scores = scores + self.bias * (place - place[:, None]).abs().to(x.dtype)
        if self.causal:
            ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(ahead, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, channels))


def rules(model: OptimizedModule) -> set[str]:
    return {rewrite.rule for rewrite in model.report().rewrites}


def drawn(name: str, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.rand(shape, device="cuda") - 0.3).to(dtype) for shape in FIRES[name][1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FIRES)
@torch.no_grad()
def test_every_spelling(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "_FEWEST_ON_CUDA", 1)  # they have 16 or 17 keys
    model = Written(name)
    inputs = drawn(name, dtype)
    if name == "in another type" and dtype is torch.float32:
        pytest.skip("it computes the softmax in float64")
    fused = fusepass.optimize(model, tune="off")
    with torch.device("cuda"):  # where masks are made
        comparison = compare(fused(*inputs), model(*inputs), model(*(value.double() for value in inputs)))
    assert comparison.ok, comparison.explain()
    assert (RULE in rules(fused)) is (len(FIRES[name][1]) == 3 or name == "heads in a row")


SIZES = ((2, 64, 64, 4), (3, 197, 96, 3), (1, 300, 256, 2), (2, 77, 320, 2), (4, 1, 64, 2), (2, 513, 512, 8))
"""Batch, length, channels, heads."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_a_layer(size: tuple[int, int, int, int], causal: bool, bias: bool, dtype: torch.dtype) -> None:
    batch, length, channels, heads = size
    model = Layer(channels, heads, causal, bias).to("cuda", dtype).eval()
    x = torch.randn(batch, length, channels, device="cuda", dtype=dtype)
    fused = fusepass.optimize(model, tune="off")
    found, wanted = fused(x), model(x)
    assert found.stride() == wanted.stride()
    comparison = compare(found, wanted, model.double()(x.double()))
    assert comparison.ok, comparison.explain()
    if bias:
        expected = dtype in HALVES and length >= 128
    else:
        expected = dtype in HALVES or length <= 256 or causal
    assert (RULE in rules(fused)) is (expected and length > 1)
    assert fused.report().fallbacks == ()


def gradients(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    model.zero_grad()
    given = x.detach().clone().requires_grad_()
    result = call(given)
    result.backward(
        torch.linspace(-1, 2, result.numel(), device="cuda", dtype=torch.float64).view(result.shape).to(result.dtype)
    )
    found = (result.detach(), given.grad, *(each.grad for each in model.parameters()))
    return tuple(each.clone() for each in found if each is not None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_a_layer(size: tuple[int, int, int, int], causal: bool, dtype: torch.dtype) -> None:
    batch, length, channels, heads = size
    model = Layer(channels, heads, causal, False).to("cuda", dtype)
    x = torch.randn(batch, length, channels, device="cuda", dtype=dtype)
    made: list[CompiledGraph] = []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=Backend("graph", {"tune": "off"}, observe=made.append))
    found, eager = gradients(compiled, model, x), gradients(model, model, x)
    exact = gradients(model.double(), model, x.double())
    comparison = compare(found, eager, exact)
    assert comparison.ok, comparison.explain()
    assert (RULE in {rewrite.rule for rewrite in made[0].report.rewrites}) is (dtype in HALVES and length > 1)


class Module(nn.Module):
    """PyTorch's, which makes weights that nobody reads."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.attention(x, x, x)[0]
        return value


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_a_module(dtype: torch.dtype) -> None:
    model = Module(96, 3).to("cuda", dtype)
    x = torch.randn(4, 100, 96, device="cuda", dtype=dtype)
    made: list[CompiledGraph] = []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=Backend("graph", {"tune": "off"}, observe=made.append))
    found, eager = gradients(compiled, model, x), gradients(model, model, x)
    comparison = compare(found, eager, gradients(model.double(), model, x.double()))
    assert comparison.ok, comparison.explain()
    assert RULE in {rewrite.rule for rewrite in made[0].report.rewrites}


class Padded(nn.Module):
    """Self-attention in which some keys of each sample are hidden by the lowest number."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = x @ x.transpose(-2, -1) * x.shape[-1] ** -0.5
        return scores.masked_fill(padding[:, None, None], torch.finfo(x.dtype).min).softmax(-1) @ x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 520])
@torch.no_grad()
def test_a_mask_by_a_number_may_leave_nothing(length: int, dtype: torch.dtype) -> None:
    """Then all keys weigh alike."""
    x = torch.randn(3, 16, length, 32, device="cuda", dtype=dtype)
    padding = torch.arange(length, device="cuda") >= torch.tensor([[length // 3], [0], [length]], device="cuda")
    model = Padded()
    fused = fusepass.optimize(model, tune="off")
    found, wanted = fused(x, padding), model(x, padding)
    comparison = compare(found, wanted, model(x.double(), padding))
    assert comparison.ok, comparison.explain()
    assert (RULE in rules(fused)) is (dtype in HALVES and length >= 128)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_what_is_not_finite_stays_so(causal: bool, bad: float) -> None:
    model = Layer(64, 2, causal, False).to("cuda", torch.bfloat16).eval()
    x = torch.randn(2, 100, 64, device="cuda", dtype=torch.bfloat16)
    x[0, 60, 5] = bad
    fused = fusepass.optimize(model, tune="off")
    found, wanted = fused(x), model(x)
    assert RULE in rules(fused)
    assert torch.equal(found.isfinite(), wanted.isfinite())
