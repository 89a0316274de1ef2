"""Dropout on a GPU: the numbers are eager's, whatever is fused with it, and the generator is left where eager leaves it."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusepass
from fusepass.autotune import tune
from fusepass.autotune.work import Work
from fusepass.codegen.ir.random import place
from fusepass.codegen.lowering.dropout import kept as computed
from fusepass.codegen.lowering.dropout import kept_by_pytorch, share_kept, uniform
from fusepass.compile.dropout import rule_of
from fusepass.report.choice import EAGER, Choice
from fusepass.report.report import RegionState
from fusepass.runtime.masks import KEPT as kept
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


# ---- masks that run as operators


def _arguments(shape: tuple[int, ...], dtype: torch.dtype, p: float = 0.3, last: bool = False) -> tuple[Any, ...]:
    """What ``fusepass::kept`` takes behind the state for a dense tensor; channels last where asked for."""
    rule, count = rule_of(DEVICE), prod(shape)
    assert rule is not None
    x = torch.empty(shape, device="meta")
    stride = (x.to(memory_format=torch.channels_last) if last else x).stride()
    return [*shape], [*stride], p, dtype, rule.threads(count), rule.width(dtype, count)


def _state(seed: int, offset: int) -> Tensor:
    return torch.tensor([seed, offset], device=DEVICE)


def _launched(call: Callable[[], object]) -> list[str]:
    """The kernels that the device ran for a call, and what it copied or filled."""
    for _ in range(2):  # the first profile of a process can miss kernels
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in events if not event.is_user_annotation]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(2,), (1, 6), (300, 8), (1000,), (777, 1002), (2048, 1030), (4096, 2048)], ids=str)
@pytest.mark.invariant(33)
def test_an_operator_has_the_bits_of_the_chain_and_of_pytorch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for p, state in ((0.1, _state(11, 40)), (0.5, _state(-1, 2**40 + 8)), (1 - 2**-30, _state(7, 0))):
        args = _arguments(shape, dtype, p)
        mask = kept(state, *args)
        assert torch.equal(mask, computed(state, *args))
        assert torch.equal(mask, kept_by_pytorch(state, *args))


def test_an_operator_s_mask_lies_as_it_is_asked_to() -> None:
    state, args = _state(11, 40), _arguments((8, 16, 12, 12), torch.bfloat16, last=True)
    mask = kept(state, *args)
    assert mask.stride() == tuple(args[1])
    assert torch.equal(mask, computed(state, *args))
    assert kept(state, [0, 5], [5, 1], 0.5, torch.float32, 0, 1).shape == (0, 5)


def test_an_operator_numbers_more_elements_than_32_bits() -> None:
    state, count = _state(11, 2**33), (1 << 31) + (3 << 20)
    args = _arguments((count,), torch.float16)
    mask, threads, width = kept(state, *args), *args[-2:]
    for start in (0, count // 3 * 2, (1 << 31) - (1 << 19), count - (1 << 20)):
        places = place(torch.arange(start, start + (1 << 20), device=DEVICE), threads, width)
        expected = uniform(*state.unbind(), *places).double() < share_kept(args[2], torch.float16)
        assert torch.equal(mask[start : start + (1 << 20)], expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_an_operator_is_one_launch(dtype: torch.dtype) -> None:
    state, args = _state(11, 40), _arguments((4096, 768), dtype)
    kept(state, *args)
    (name,) = _launched(lambda: kept(state, *args))
    assert "dropout_mask" in name
    assert len(_launched(lambda: computed(state, *args))) > 100, "the profiler does not see all launches"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_captured_operator_is_one_launch_with_the_state_of_its_replay(dtype: torch.dtype) -> None:
    state, several = _state(11, 40), [_arguments((4096, 768), dtype), _arguments((300, 8), dtype, 0.5)]
    for args in several:
        kept(state, *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        masks = [kept(state, *args) for args in several]
    for seed, offset in ((3, 8), (-5, 2**34)):
        state.copy_(_state(seed, offset))
        graph.replay()
        for mask, args in zip(masks, several, strict=True):
            assert torch.equal(mask, computed(_state(seed, offset), *args))
    assert len(_launched(graph.replay)) == 2


def test_the_first_mask_of_a_process_may_be_captured() -> None:
    program = """
import warnings, torch
from fusepass.runtime.masks import KEPT as kept
from fusepass.codegen.lowering.dropout import kept as computed
warnings.simplefilter("error")
state, args = torch.tensor([11, 40], device="cuda"), ([4096, 64], [64, 1], 0.3, torch.float32, 4096 * 64, 4)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    mask = kept(state, *args)
graph.replay()
assert torch.equal(mask, computed(state, *args))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


class Behind(nn.Module):
    """A layer behind a product, and that behind a chain without dropout, which is a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.layer = nn.Linear(64, 64), Layer(64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.product(torch.sin(torch.exp(x * 0.1))))
        return found


def test_regions_with_masks_may_be_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers stay eager's, and each of their masks is one launch, in calls and in replays."""

    def chosen(work: Work, *_: object) -> Choice:
        has_mask = work.graph.graph.find_nodes(op="call_function", target=kept)
        return Choice(EAGER if has_mask else work.candidates[0].name)

    monkeypatch.setattr(tune, "_measured", chosen)
    monkeypatch.setattr(tune, "_key", lambda work: None)  # nothing is remembered
    model, x = Behind().to(DEVICE), torch.randn(512, 64, device=DEVICE)
    fused = fusepass.optimize(model, tune="fast", cuda_graphs=False)
    with torch.no_grad():
        (expected, state), (found, left) = _after(lambda: model(x)), _after(lambda: fused(x))
        torch.testing.assert_close(found, expected)
        assert torch.equal(left, state)
        assert {region.state for region in fused.report().regions} == {RegionState.EAGER, RegionState.FUSED}
        masks = sum("dropout_mask" in name for name in _launched(lambda: fused(x)))
        assert masks > 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fused(x)
        launched = _launched(graph.replay)
    assert sum("dropout_mask" in name for name in launched) == masks
    assert len(launched) < 100
