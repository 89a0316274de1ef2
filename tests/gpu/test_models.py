"""Whole models on a CUDA device: values in every dtype and format, streams, graphs, autocast, no synchronisation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import check, compare, observe, reference
from fusepass.report.report import CaptureRoute, RegionState
from tests.support.precision import cudnn, exact_products

pytestmark = [pytest.mark.gpu, pytest.mark.models]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Chain(nn.Module):
    """Layers and a function after them."""

    def __init__(self, *layers: nn.Module, then: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layers(x))


def layer_norm_gelu(channels: int = 16) -> nn.Module:
    """The LayerNorm runs over the last axis, which must be 2 * `channels` long."""
    layers = nn.ConvTranspose3d(8, channels, 4, 2, 1), nn.LayerNorm(2 * channels), nn.GELU()
    return Chain(*layers, then=lambda x: x * 0.5)


def batch_norm_subtract_mean() -> nn.Module:
    layers = nn.ConvTranspose3d(8, 12, 3, 2, 1), nn.BatchNorm3d(12)
    return Chain(*layers, then=lambda x: x - x.mean((2, 3, 4), keepdim=True))


def gelu_group_norm() -> nn.Module:
    return Chain(nn.ConvTranspose2d(8, 12, 3), nn.GELU(), nn.GroupNorm(3, 12))


def scale_batch_norm_pool() -> nn.Module:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2.0

    norm = nn.BatchNorm3d(12)
    nn.init.uniform_(norm.bias, 1, 2)  # or the means of equal samples would be rounding alone
    return Chain(nn.ConvTranspose3d(8, 12, 3), Scale(), norm, nn.AdaptiveAvgPool3d(1))


def gelu_pool() -> nn.Module:
    return Chain(nn.Conv2d(3, 20, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1))


def hardswish_group_norm_mean() -> nn.Module:
    layers = nn.Conv3d(3, 8, 2), nn.Hardswish(), nn.GroupNorm(4, 8)
    return Chain(*layers, then=lambda x: x.mean((2, 3, 4)))


def layer_norm() -> nn.Module:
    return nn.LayerNorm((8, 33, 35))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "layer_norm_gelu": (layer_norm_gelu, ((2, 8, 4, 6, 16), (1, 8, 1, 1, 16), (3, 8, 5, 7, 16))),
    "batch_norm_subtract_mean": (batch_norm_subtract_mean, ((4, 8, 4, 6, 8), (1, 8, 2, 3, 5), (7, 8, 1, 9, 11))),
    "gelu_group_norm": (gelu_group_norm, ((4, 8, 16, 16), (1, 8, 1, 1), (3, 8, 37, 41))),
    "scale_batch_norm_pool": (scale_batch_norm_pool, ((4, 8, 6, 8, 8), (2, 8, 1, 1, 1), (5, 8, 7, 3, 13))),
    "gelu_pool": (gelu_pool, ((4, 3, 20, 36), (1, 3, 3, 5), (2, 3, 65, 131))),
    "hardswish_group_norm_mean": (hardswish_group_norm_mean, ((2, 3, 5, 9, 10), (1, 3, 3, 4, 5), (3, 3, 6, 11, 37))),
    "layer_norm": (layer_norm, ((2, 8, 33, 35), (1, 8, 33, 35))),
}
every_model = pytest.mark.parametrize("name", MODELS)


def cases(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[Tensor]]:
    make, shapes = MODELS[name]
    model = make().to("cuda", dtype)
    return model, [torch.rand(shape, device="cuda").to(dtype) for shape in shapes]


def assert_right(model: nn.Module, optimised: nn.Module, x: Tensor) -> None:
    outcome = check(model, optimised, (x,))
    assert outcome.ok, f"{x.dtype}{list(x.shape)}, strides {x.stride()}: {outcome.explain()}"


def assert_fused(optimised: OptimizedModule) -> None:
    report = optimised.report()
    assert report.capture is CaptureRoute.TRACED, report.reason
    assert report.regions
    assert {region.state for region in report.regions} == {RegionState.FUSED}, str(report)
    assert report.fallbacks == ()


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        yield


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    with exact_products():
        yield


# ---- values


@every_dtype
@every_model
def test_the_mission_models_at_reduced_and_odd_shapes(name: str, dtype: torch.dtype) -> None:
    model, inputs = cases(name, dtype)
    optimised = fusepass.optimize(model)
    for training in (True, False):
        model.train(training)
        for x in inputs:
            if training and "batch_norm" in name and x.shape[0] * x[0, 0].numel() == 1:
                continue
            assert_right(model, optimised, x)
            assert_right(model, optimised, x * -30 + 1)
    assert_fused(optimised)


@every_dtype
@every_model
def test_memory_formats(name: str, dtype: torch.dtype) -> None:
    model, inputs = cases(name, dtype)
    optimised = fusepass.optimize(model)
    x = inputs[0]
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    assert_right(model, optimised, x.contiguous(memory_format=last))
    assert_right(model, optimised, x.transpose(-1, -2).contiguous().transpose(-1, -2))
    padded = torch.empty([*x.shape[:-1], x.shape[-1] + 3], dtype=dtype, device="cuda")
    padded[..., 1:-2] = x
    assert_right(model, optimised, padded[..., 1:-2])
    assert_right(model, optimised, x[:1].expand(x.shape))
    for parameter in model.parameters():
        if parameter.dim() == x.dim():
            parameter.data = parameter.data.contiguous(memory_format=last)
    assert_right(model, optimised, x.contiguous(memory_format=last))
    assert_fused(optimised)


@every_dtype
@every_model
def test_misaligned_inputs(name: str, dtype: torch.dtype) -> None:
    """One specialisation serves memory of any alignment, in turns."""
    model, (x, *_) = cases(name, dtype)
    optimised = fusepass.optimize(model)
    flat = torch.empty(x.numel() + 8, dtype=dtype, device="cuda")
    for offset in (0, 1, 3, 0):
        shifted = flat[offset : offset + x.numel()].view(x.shape)
        shifted.copy_(x)
        with torch.no_grad():
            outcome = compare(optimised(shifted), *expected(model, shifted))
        assert outcome.ok, f"offset {offset}: {outcome.explain()}"
    assert len(optimised.report().regions) == 1
    assert_fused(optimised)


def expected(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What eager gives and what float64 gives; buffers of `model` stay as they are."""
    return observe(copy.deepcopy(model), (x,))["output"], reference(model, (x,))


@every_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(value: float, dtype: torch.dtype) -> None:
    def then(x: Tensor) -> Tensor:
        return torch.softmax(F.relu(x) * 2, -1) + x.amax(1, keepdim=True) + torch.logsumexp(x, 2, keepdim=True)

    model = Chain(then=then)
    x = torch.randn(3, 5, 700, device="cuda").to(dtype)
    x[0, 1, 2] = x[2, 4, 699] = x[2, 4, 31] = value
    optimised = fusepass.optimize(model)
    assert_right(model, optimised, x)
    assert_fused(optimised)


@every_dtype
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (0, 5), (5, 0), (1, 100_003), (100_003, 1), (3, 1, 5)], ids=str)
def test_sizes_at_the_limits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = Chain(then=lambda x: (torch.tanh(x) * 2 + x).sum(-1, keepdim=True) + x.sigmoid())
    optimised = fusepass.optimize(model)
    assert_right(model, optimised, torch.randn(shape, device="cuda").to(dtype))
    assert optimised.report().fallbacks == ()


@every_model
def test_repeated_runs_give_the_same_bits(name: str) -> None:
    model, (x, *_) = cases(name)
    optimised = fusepass.optimize(model)
    with cudnn(deterministic=True):  # the anchor is cuDNN's
        first, *rest = (observe(optimised, (x.clone(),)) for _ in range(6))
    for again in rest:
        assert torch.equal(again["output"], first["output"])
        for buffer, value in first["buffers"].items():
            assert torch.equal(again["buffers"][buffer], value)


def test_long_rows_give_the_same_bits() -> None:
    """A reduction split over many blocks adds in one order, too."""
    model = Chain(then=lambda x: torch.softmax(x * 2, -1) + (x * x).mean(-1, keepdim=True))
    x = torch.randn(2, 1 << 20, device="cuda")
    optimised = fusepass.optimize(model)
    assert_right(model, optimised, x)
    with torch.no_grad():
        results = [optimised(x) for _ in range(5)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_calls_that_come_again_are_replayed_and_read_what_is_there_then() -> None:
    """Results that are held stay as they are: calls that write elsewhere are launched, or replayed, for themselves."""
    model = Chain(nn.BatchNorm1d(6), then=lambda x: torch.softmax(x.flatten(1), -1))
    x, held = torch.randn(4, 6, 1 << 17, device="cuda"), []
    model.cuda()
    optimised, twin = fusepass.optimize(model, tune="off"), copy.deepcopy(model)
    with torch.no_grad():
        for iteration in range(12):
            x.normal_()
            result, right = optimised(x), twin(x)
            torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-9)
            if iteration % 4 == 3:
                held.append((result, right))
    for result, right in held:
        torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-9)
    for buffer, value in twin.named_buffers():
        torch.testing.assert_close(model.get_buffer(buffer), value, rtol=1e-4, atol=1e-5)
    assert_fused(optimised)


@every_model
def test_buffers_follow_eager(name: str) -> None:
    model, inputs = cases(name)
    optimised = fusepass.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for factor in (1, -2, 3):
            model(inputs[0] * factor)
            optimised(inputs[0] * factor)
    for buffer, value in model.named_buffers():
        torch.testing.assert_close(optimised.get_buffer(buffer), value, rtol=1e-4, atol=1e-5)


@every_model
def test_moving_to_the_device_and_back(name: str) -> None:
    model, (x, *_) = cases(name)
    model.cpu()
    optimised = fusepass.optimize(model)
    assert_right(model, optimised, x.cpu())
    assert optimised.cuda() is optimised
    assert_right(model, optimised, x)
    optimised.cpu()
    assert_right(model, optimised, x.cpu())
    assert {region.device for region in optimised.report().regions} == {"cpu", "cuda:0"}
    assert_fused(optimised)


# ---- streams, graphs, devices


@every_model
def test_capture_in_a_cuda_graph(name: str) -> None:
    model, (x, *_) = cases(name)
    model.eval()
    optimised = fusepass.optimize(model)
    place = x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            optimised(place)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = optimised(place)
    for other in (x * 2, x - 1, torch.randn_like(x)):
        place.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        outcome = compare(result, *expected(model, other))
        assert outcome.ok, outcome.explain()
    assert_fused(optimised)


def test_a_replayed_graph_of_a_model_in_training_updates_its_buffers() -> None:
    model, (x, *_) = cases("batch_norm_subtract_mean")
    optimised = fusepass.optimize(model)
    place = x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        optimised(place)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        optimised(place)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for factor in (1, -2, 3):
            place.copy_(x * factor)
            graph.replay()
            twin(x * factor)
    for buffer, value in twin.named_buffers():
        torch.testing.assert_close(model.get_buffer(buffer), value, rtol=1e-4, atol=1e-5)


@every_model
def test_a_side_stream(name: str) -> None:
    """Kernels run on the current stream: after what was queued there, before what is queued next."""
    model, (x, *_) = cases(name)
    model.eval()
    optimised = fusepass.optimize(model, x)
    truth = expected(model, x * 3)
    side = torch.cuda.Stream()
    place = torch.zeros_like(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # some ten milliseconds: on another stream the kernels would read zeros
        place.copy_(x * 3)
        result = optimised(place)
        kept = result.clone()
    side.synchronize()
    for each in (result, kept):
        outcome = compare(each, *truth)
        assert outcome.ok, outcome.explain()


def test_the_current_device_need_not_be_that_of_the_inputs() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    model, (x, *_) = cases("gelu_group_norm")
    optimised = fusepass.optimize(model)
    assert_right(model, optimised, x)
    with torch.cuda.device(1):
        assert_right(model, optimised, x)
        assert torch.cuda.current_device() == 1
    optimised.to("cuda:1")
    assert_right(model, optimised, x.to("cuda:1"))
    assert {region.device for region in optimised.report().regions} == {"cuda:0", "cuda:1"}
    assert_fused(optimised)


def test_inputs_on_two_devices_raise_what_the_original_raises() -> None:
    model, (x, *_) = cases("gelu_group_norm")
    optimised = fusepass.optimize(model, x)
    with torch.no_grad(), silent(), pytest.raises(RuntimeError, match=r"same device|type"):
        optimised(x.cpu())
    assert_right(model, optimised, x)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("training", [True, False])
@every_model
def test_calls_do_not_wait_for_the_device(name: str, training: bool) -> None:
    model, (x, *_) = cases(name)
    model.train(training)
    optimised = fusepass.optimize(model)
    misaligned = torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape).copy_(x)
    with torch.no_grad():
        for each in (x, misaligned):
            optimised(each)
        with no_synchronisation():
            for each in (x, misaligned, x):
                optimised(each)
    assert_fused(optimised)


# ---- autocast, gradients, torch.compile, torch.export


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_model
def test_autocast(name: str, dtype: torch.dtype) -> None:
    """Held against eager: what is rounded where is autocast's to say, and the dtype of the result with it."""
    model, (x, *_) = cases(name)
    model.eval()
    optimised = fusepass.optimize(model)
    with torch.no_grad():
        with torch.autocast("cuda", dtype):
            result, eager = optimised(x), model(x)
        assert result.dtype == eager.dtype
        outcome = compare(result.float(), eager.float(), reference(model, (x,)))
        error = (result.double() - eager.double()).abs().max() / eager.double().abs().max()
        assert outcome.ok or error < 4 * torch.finfo(dtype).eps, outcome.explain()
    assert_right(model, optimised, x)
    assert_fused(optimised)


@every_model
def test_gradients_are_eager_s(name: str) -> None:
    model, (x, *_) = cases(name)
    twin = copy.deepcopy(model)
    optimised = fusepass.optimize(model)
    for each in (optimised, twin):
        torch.manual_seed(1)
        with silent():
            result = each(x)
        (result * torch.randn_like(result)).sum().backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        # cuDNN sums weight gradients in an order that varies.
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-3)
    report = optimised.report()
    assert report.fallbacks == ()
    assert report.backward is not None


@every_model
def test_compile_with_this_backend_forward_and_backward(name: str) -> None:
    torch._dynamo.reset()
    model, (x, *_) = cases(name)
    exact = copy.deepcopy(model).double()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fusepass", fullgraph=True)
    weight = torch.randn_like(expected(model, x)[0])
    gradients = []
    for each, dtype in ((compiled, torch.float32), (twin, torch.float32), (exact, torch.float64)):
        leaf = x.detach().clone().to(dtype).requires_grad_()
        result = each(leaf)
        (result * weight.to(dtype)).sum().backward()
        owner = model if each is compiled else each
        gradients.append([result.detach(), leaf.grad, *(parameter.grad for parameter in owner.parameters())])
    # Sums of a backward pass may be taken in another order; cuDNN chooses its algorithms anew, too. A bias before a normalisation
    # has no gradient but rounding, relative to terms as large as those of the weight's gradient.
    largest = max(truth.abs().max().item() for truth in gradients[-1][2:])
    for number, (actual, eager, truth) in enumerate(zip(*gradients, strict=True)):
        scale = largest if number >= 2 else truth.abs().max().item()
        error, theirs = ((value.double() - truth).abs().max().item() for value in (actual, eager))
        assert error <= 4 * theirs + 1e-5 * scale, f"result {number}: {error:.2e}, eager {theirs:.2e}"
    for buffer, value in twin.named_buffers():
        torch.testing.assert_close(model.get_buffer(buffer), value, rtol=1e-4, atol=1e-5)


@every_model
def test_compile_with_this_backend_without_gradients(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = cases(name)
    compiled = torch.compile(model, backend="fusepass", fullgraph=True, dynamic=False)
    for x in inputs[:2]:
        assert_right(model, compiled, x)


@every_model
def test_compile_and_export_of_the_optimised_model_keep_the_fused_calls(name: str) -> None:
    torch._dynamo.reset()
    model, (x, *_) = cases(name)
    model.eval()
    optimised = fusepass.optimize(model, x)
    with torch.no_grad():
        program = fusepass.export(optimised, (x,))
        compiled = torch.compile(optimised, backend="eager", fullgraph=True)
        for each in (program.module(), compiled):
            outcome = compare(each(x), *expected(model, x))
            assert outcome.ok, outcome.explain()
    calls = [node for node in program.graph.nodes if str(node.target).startswith("fusepass.")]
    assert len(calls) == len(optimised.report().regions) >= 1


def test_out_of_memory_is_raised_and_the_next_call_runs() -> None:
    """A failed allocation within a fused call leaves nothing behind."""
    model = Chain(then=lambda x: torch.tanh(x) * 2 + x.sigmoid())
    optimised = fusepass.optimize(model)
    big = torch.zeros(1, device="cuda").expand(1 << 50)
    with torch.no_grad(), silent(), pytest.raises(RuntimeError, match=r"memory|too large|invalid"):
        optimised(big)
    assert_right(model, optimised, torch.randn(1000, device="cuda"))
