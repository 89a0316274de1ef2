"""CUDA graphs, measured choices and profiles on a device."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.errors import FusepassWarning
from tests.support.precision import exact_products

pytestmark = [pytest.mark.gpu, pytest.mark.models]


@pytest.fixture(autouse=True)
def _surroundings() -> Iterator[None]:
    with exact_products(), torch.no_grad():
        yield


class Net(nn.Module):
    """Two regions with a convolution each, and an operator between them that does not fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.special.bessel_j0(torch.relu(self.norm(self.first(x))))
        return torch.softmax(self.second(y), 1) * 2


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_replays_follow_inputs_parameters_and_addresses() -> None:
    net = Net().cuda().eval()
    optimised = fusepass.optimize(net, cuda_graphs=True)
    pairs = []
    for number in range(10):
        x = torch.rand(2, 3, 9, 9, device="cuda")
        if number == 3:
            net.first.weight.mul_(1.5)  # in place: no new capture
        if number == 5:
            net.second.weight = nn.Parameter(torch.rand_like(net.second.weight))
        if number == 7:
            net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
        pairs.append((optimised(x), net(x)))
    for actual, expected in pairs:  # none was overwritten by a later call
        close(actual, expected)
    assert optimised.report().cuda_graphs == ("replayed, 3 captured",)


def test_running_statistics_are_updated_once_for_each_call() -> None:
    net = Net().cuda().train()
    other = copy.deepcopy(net)
    optimised = fusepass.optimize(net, cuda_graphs=True)
    for _ in range(5):
        x = torch.rand(4, 3, 9, 9, device="cuda")
        close(optimised(x), other(x))
        close(net.norm.running_mean, other.norm.running_mean)
        close(net.norm.running_var, other.norm.running_var)
        assert net.norm.num_batches_tracked == other.norm.num_batches_tracked


def test_models_that_share_memory_do_not_disturb_each_other() -> None:
    nets = [Net().cuda().eval() for _ in range(3)]
    fused = [fusepass.optimize(net, cuda_graphs=True) for net in nets]
    held = []
    for number in range(6):
        for net, optimised in zip(nets, fused, strict=True):
            x = torch.rand(2, 3, 9 + number % 2, 9, device="cuda")
            held.append((optimised(x), net(x)))
    for actual, expected in held:
        close(actual, expected)


def test_a_model_is_replayed_when_those_before_it_are_gone() -> None:
    for number in range(3):
        optimised = fusepass.optimize(Net().cuda().eval(), cuda_graphs=True)
        x = torch.rand(2, 3, 9, 9 + number, device="cuda")
        held = [optimised(x) for _ in range(3)]
        assert optimised.report().cuda_graphs == ("replayed, 1 captured",)
        close(held[2], held[0])
        del optimised
        gc.collect()
        assert torch.rand(8, device="cuda").isfinite().all()


def test_other_streams_replay_too() -> None:
    net = Net().cuda().eval()
    optimised = fusepass.optimize(net, cuda_graphs=True)
    x = torch.rand(2, 3, 9, 9, device="cuda")
    expected = net(x)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(6)]
    results = []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(optimised(x))
    torch.cuda.synchronize()
    for result in results:
        close(result, expected)


def test_a_call_inside_another_capture_becomes_part_of_it() -> None:
    net = Net().cuda().eval()
    optimised = fusepass.optimize(net, cuda_graphs=True)
    x = torch.rand(2, 3, 9, 9, device="cuda")
    for _ in range(3):
        optimised(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = optimised(x)
    x.copy_(torch.rand_like(x))
    graph.replay()
    close(result, net(x))


def test_random_numbers_are_not_replayed() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5)).cuda().train()
    optimised = fusepass.optimize(net, cuda_graphs=True)
    x = torch.rand(8, 64, device="cuda")
    drawn = [optimised(x) for _ in range(4)]
    assert not torch.equal(drawn[2], drawn[3])
    (told,) = optimised.report().cuda_graphs
    assert told.startswith("not used: ")
    assert told.endswith("draws random numbers")


def test_a_result_that_is_an_input_stays_it() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, torch.tanh(x) * 2

    optimised = fusepass.optimize(Same(), cuda_graphs=True)
    x = torch.rand(8, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        results = [optimised(x) for _ in range(3)]
    assert [first is x or first.data_ptr() == x.data_ptr() for first, _ in results] == [True] * 3


def test_a_replay_does_not_synchronise() -> None:
    net = Net().cuda().eval()
    optimised = fusepass.optimize(net, cuda_graphs=True)
    x = torch.rand(2, 3, 9, 9, device="cuda")
    for _ in range(3):
        optimised(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimised(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("effort", ["fast", "max"])
def test_the_choice_is_measured_kept_and_right(effort: str, tmp_path: Path) -> None:
    net = Net().cuda().eval()
    x = torch.rand(8, 3, 65, 65, device="cuda")
    state = torch.cuda.get_rng_state()
    first = fusepass.optimize(net, x, tune=effort, cache_dir=tmp_path)
    assert torch.equal(state, torch.cuda.get_rng_state())
    close(first(x), net(x))
    choices = [region.choice for region in first.report().regions]
    assert all(choice is not None for choice in choices)
    taken = [seconds for choice in choices if choice is not None for _, seconds in choice.seconds]
    assert taken if effort == "max" else True
    assert all(seconds > 0 for seconds in taken)
    again = fusepass.optimize(net, x, tune=effort, cache_dir=tmp_path).report()
    for region, choice in zip(again.regions, choices, strict=True):
        assert region.choice is not None
        assert choice is not None
        if choice.reason is None:  # else it is measured again
            assert region.choice.recorded
            assert region.choice.chosen == choice.chosen


def test_a_profile_is_within_reach_of_the_device() -> None:
    net = nn.Sequential(nn.LayerNorm(1024), nn.GELU()).cuda()
    x = torch.rand(16384, 1024, device="cuda")
    profile = fusepass.optimize(net).profile(x)
    (step,) = profile.steps
    assert step.kind == "fused"
    assert 0.4 < step.fraction < 1.15
    assert step.seconds < step.seconds_before
    assert "region-" in profile.to_html()


class Deep(nn.Module):
    """Launches that take longer than their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_what_waits_for_the_host_is_replayed_unasked() -> None:
    net = Deep().cuda().eval()
    optimised = fusepass.optimize(net)
    held = []
    for number in range(24):
        x = torch.randn(8, 32, device="cuda")
        held.append((optimised(x), net(x)))
        torch.cuda.synchronize()
        if number == 16:
            net.layers[3][0].weight.mul_(1.5)
    for actual, expected in held:
        close(actual, expected)
    assert optimised.report().cuda_graphs == ("replayed, 1 captured",)


def test_what_keeps_the_device_busy_is_not() -> None:
    net = nn.Sequential(nn.Linear(4096, 4096), nn.GELU()).cuda().eval()
    optimised = fusepass.optimize(net)
    x = torch.randn(8192, 4096, device="cuda")
    for _ in range(16):
        result = optimised(x)
        torch.cuda.synchronize()
    close(result, net(x))
    (told,) = optimised.report().cuda_graphs
    assert told.startswith("not used: ")
