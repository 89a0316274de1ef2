"""Dropout on a GPU: the numbers are eager's, whatever is fused with it, and the generator is left where eager leaves it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusepass
from fusepass.codegen.lowering.dropout import kept as computed
from fusepass.compile.dropout import rule_of
from fusepass.training.backend import Backend
from tests.support.precision import exact_products

pytestmark = [pytest.mark.gpu, pytest.mark.models]

DEVICE = torch.device("cuda", 0)
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_products():
        yield


class Layer(nn.Module):
    """What stands behind attention and behind a feed-forward network, and the latter; with other random numbers between if `noisy`."""

    def __init__(self, width: int, noisy: bool = False) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.noisy = noisy

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + F.dropout(torch.tanh(x), 0.2))
        if self.noisy:
            x = x + torch.rand_like(x)
        y = self.back(F.dropout(F.gelu(self.wide(x)), 0.1))
        return x + F.dropout(y, 0.5)


def _after(call: Callable[[], Tensor], seed: int = 5) -> tuple[Tensor, Tensor]:
    """What a call gives from a seed, and the generator's state behind it."""
    torch.manual_seed(seed)
    return call(), torch.cuda.get_rng_state(DEVICE)


def _dropped(x: Tensor, p: float) -> Tensor:
    return torch.where(F.dropout(torch.cos(x * 0.1) + 2, p) == 0, 0, torch.ones_like(x))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_rule_is_known(dtype: torch.dtype) -> None:
    rule = rule_of(DEVICE)
    assert rule is not None
    assert dtype in rule.widths


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1,), (3,), (255,), (256, 6), (2, 1029), (777, 1003), (2048, 1030), (4096, 2048)], ids=str
)
def test_what_is_dropped_is_what_eager_drops(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.rand(shape, dtype=dtype, device=DEVICE)
    fused = fusepass.optimize(Dropped(), tune="off")
    with torch.no_grad():
        (expected, state), (found, left) = _after(lambda: _dropped(x, 0.3)), _after(lambda: fused(x))
    assert torch.equal(found, expected)
    assert torch.equal(left, state)
    assert fused.report().regions, "nothing was fused"


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _dropped(x, 0.3)


@pytest.mark.parametrize("shape", [(8, 16, 12, 12), (3, 5, 7, 9)], ids=str)
def test_elements_count_as_they_lie(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, device=DEVICE).to(memory_format=torch.channels_last)
    fused = fusepass.optimize(Dropped(), tune="off")
    with torch.no_grad():
        (expected, _), (found, _) = _after(lambda: _dropped(x, 0.3)), _after(lambda: fused(x))
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("noisy", [False, True], ids=["alone", "noise between"])
@pytest.mark.parametrize("tune", ["off", "fast"])
@pytest.mark.invariant(33)
def test_a_layer_draws_as_eager_does(noisy: bool, tune: str) -> None:
    model = nn.Sequential(Layer(64, noisy), Layer(64)).to(DEVICE)
    x = torch.randn(512, 64, device=DEVICE)
    fused = fusepass.optimize(model, tune=tune)
    with torch.no_grad():
        for seed in (5, 6, 2**63 + 11):
            (expected, state), (found, left) = _after(lambda: model(x), seed), _after(lambda: fused(x), seed)
            torch.testing.assert_close(found, expected)
            assert torch.equal(left, state)


@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
@pytest.mark.parametrize("noisy", [False, True], ids=["alone", "noise between"])
@pytest.mark.invariant(33)
def test_gradients_are_of_what_was_kept(dtype: torch.dtype, noisy: bool) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(Layer(64, noisy), Layer(64)).to(DEVICE, dtype)
    x = torch.randn(512, 64, device=DEVICE, dtype=dtype)
    compiled = torch.compile(copy.deepcopy(model), backend=Backend("graph", {"tune": "off"}))
    for seed in (5, 6):
        found, states = [], []
        for each in (model, compiled):
            torch.manual_seed(seed)
            each.zero_grad()
            given = x.clone().requires_grad_()
            result = each(given)
            result.float().square().sum().backward()
            found.append([result, given.grad, *(parameter.grad for parameter in each.parameters())])
            states.append(torch.cuda.get_rng_state(DEVICE))
        assert torch.equal(*states)
        bound = 1e-4 if dtype is torch.float32 else 0.04
        for expected, got in zip(*found, strict=True):
            assert (got - expected).double().norm() <= bound * expected.double().norm()


def test_what_is_computed_again_is_what_was_dropped() -> None:
    torch._dynamo.reset()
    layer = Layer(64).to(DEVICE)
    x = torch.randn(512, 64, device=DEVICE, requires_grad=True)

    def run(given: Tensor) -> Tensor:
        result: Tensor = checkpoint(layer, given, use_reentrant=False)
        return result

    def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
        (found,) = torch.autograd.grad(call(x).square().sum(), x)
        return found

    expected, state = _after(lambda: gradient(run))
    found, left = _after(lambda: gradient(torch.compile(run, backend=Backend("graph", {"tune": "off"}))))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(left, state)


def test_each_replay_of_a_captured_graph_drops_something_else() -> None:
    model, x = Dropped(), torch.rand(1000, 64, device=DEVICE)
    fused = fusepass.optimize(model, tune="off")
    with torch.no_grad():
        fused(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = fused(x)
        found = []
        for _ in range(3):
            graph.replay()
            found.append(result.clone())
    assert not any(torch.equal(a, b) for a, b in ((found[0], found[1]), (found[1], found[2])))
    for each in found:
        assert abs(each.mean().item() - 0.7) < 0.01


def test_operators_that_run_as_they_were_drop_the_same() -> None:
    x, size, stride = torch.tensor([11, 40], device=DEVICE), [300, 8], [8, 1]
    rule = rule_of(DEVICE)
    assert rule is not None
    for dtype in TYPES:
        placed = (rule.threads(2400), rule.width(dtype, 2400))
        expected = computed(x, size, stride, 0.3, dtype, *placed)
        assert torch.equal(torch.ops.fusepass.kept.default(x, size, stride, 0.3, dtype, *placed), expected)
