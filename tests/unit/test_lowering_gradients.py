"""Gradients that lowering gives directly: what autograd gives, for every geometry of the forward operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.lowering.registry import decomposition, supports
from fusepass.codegen.lowering.tensor import Unsupported
from fusepass.codegen.render import render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan_flat import Pointwise
from fusepass.codegen.schedule.plan_output_tile import OutputTile
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import operator_region, region, tensor_of

aten = torch.ops.aten
X = torch.randn(2, 3, 7, 9, dtype=torch.float64)

AVERAGES: dict[str, tuple[Any, ...]] = {
    "tiles": ([2, 3], [2, 3], [0, 0], False, True, None),
    "overlapping": ([3, 3], [1, 2], [1, 0], False, True, None),
    "padding does not count": ([3, 4], [2, 2], [1, 2], False, False, None),
    "over the edge": ([3, 3], [2, 4], [0, 1], True, True, None),
    "gaps": ([2, 1], [3, 2], [0, 0], False, True, None),
    "a divisor": ([2, 2], [1, 2], [1, 1], True, True, 3),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averages(name: str) -> None:
    geometry = AVERAGES[name]
    gradient = torch.randn_like(aten.avg_pool2d(X, *geometry))
    operator_region(aten.avg_pool2d_backward.default, gradient, X, *geometry).check(exact=False)


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (3, 4), (5, 2), (8, 13)], ids=str)
def test_adaptive_averages(size: tuple[int, int]) -> None:
    gradient = torch.randn(2, 3, *size, dtype=torch.float64)
    operator_region(aten._adaptive_avg_pool2d_backward.default, gradient, X).check(exact=False)


@pytest.mark.parametrize(
    "geometry",
    [([2, 3], [2, 3], [0, 0], [1, 1], False), ([3, 3], [1, 2], [1, 0], [1, 1], True), ([2, 3], [1, 1], [1, 1], [3, 2], False)],
    ids=str,
)  # fmt: skip
def test_maxima(geometry: tuple[Any, ...]) -> None:
    x = X.round()  # many are equal, and the first counts
    values, indices = aten.max_pool2d_with_indices(x, *geometry)
    gradient = torch.randn_like(values)
    target = aten.max_pool2d_with_indices_backward.default
    operator_region(target, gradient, x, *geometry, indices).check(exact=False)


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_windows_that_do_not_step_are_of_output_tiles(size: int, *, padded: bool) -> None:
    less, pad = (0, size // 2) if padded else (size - 1, 0)
    a, gradient = torch.empty(16, 3, 256, 256, device="meta"), torch.empty(16, 3, 256 - less, 256 - less, device="meta")
    geometry = [size, size], [1, 1], [pad, pad], False, True, None
    made = operator_region(aten.avg_pool2d_backward.default, gradient, a, *geometry, cuda=True)
    facts = DeviceFacts.h200()
    program = made.passed(pass_options(facts))
    (kernel,) = program.kernels
    assert isinstance(schedule(kernel, program, facts), OutputTile)


def test_a_gradient_that_takes_long_is_made_once_for_all_windows_it_came_from() -> None:
    def of_quotients(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        return aten.avg_pool2d_backward(x.exp() / y, a, [7, 7], [1, 1], [0, 0], False, True, None)

    x, y, a = torch.randn(2, 3, 10, 10), torch.rand(2, 3, 10, 10) + 1, torch.randn(2, 3, 16, 16)
    made = region(of_quotients, x, y, a)
    assert len(made.passed().kernels) == 2
    made.check(tolerance=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_windows_that_step_are_read_along_rows(size: int) -> None:
    """Windows that step share elements, or leave some out: these are neighbours all the same."""
    a, gradient = torch.empty(64, 64, 112, 112, device="meta"), torch.empty(64, 64, 56, 56, device="meta")
    geometry = [size, size], [2, 2], [size - 2, size - 2], False, True, None
    facts = DeviceFacts.h200()
    made = operator_region(aten.avg_pool2d_backward.default, gradient, a, *geometry, cuda=True)
    program = made.passed(pass_options(facts))
    (kernel,) = program.kernels
    plan = schedule(kernel, program, facts)
    assert (type(plan), plan.width) == (Pointwise, 4)


RESAMPLED: dict[str, tuple[list[int], list[int], bool, tuple[float | None, ...]]] = {
    "twice": ([5, 6], [10, 12], False, ()),
    "twice, by factors": ([5, 6], [10, 12], False, (2.0, 2.0)),
    "three times": ([4, 3], [12, 9], False, ()),
    "many times": ([2, 3], [14, 30], False, ()),
    "half": ([8, 9], [4, 4], False, (0.5, 0.5)),
    "a fifth": ([10, 11], [2, 2], False, ()),
    "a factor that is not whole": ([7, 6], [11, 8], False, (1.6, 1.45)),
    "corners": ([5, 4], [9, 13], True, ()),
    "fewer, with corners": ([9, 7], [4, 3], True, ()),
    "to one element": ([4, 5], [1, 1], True, ()),
    "of one element": ([1, 1], [6, 5], False, ()),
    "of one element, with corners": ([1, 2], [6, 5], True, ()),
    "as it is": ([5, 6], [5, 6], False, ()),
}


@pytest.mark.parametrize("name", RESAMPLED)
@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
def test_resampling(kind: str, name: str) -> None:
    before, after, corners, factors = RESAMPLED[name]
    target = getattr(aten, f"upsample_{kind}2d_backward").default
    gradient = torch.randn(2, 3, *after, dtype=torch.float64)
    operator_region(target, gradient, after, [2, 3, *before], corners, *factors).check(exact=False)


def test_resampling_refuses_what_kernels_disagree_on() -> None:
    """By a factor to the size that there is, some copy; behind the input, all elements are the last one."""
    target, gradient = aten.upsample_bilinear2d_backward.default, torch.randn(1, 1, 10, 12)
    for size, factors, reason in (([10, 6], (1.05, 2.0), "a copy"), ([5, 6], (1.0, 2.0), "behind its input")):
        with pytest.raises(Unsupported, match=reason):
            operator_region(target, gradient, [10, 12], [1, 1, *size], False, *factors).passed()
    with pytest.raises(Unsupported, match="a copy"):
        operator_region(aten.upsample_bilinear2d.default, torch.randn(1, 1, 5, 6), [5, 12], False, 1.1, 2.0).passed()


@needs_compiler
@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
def test_gradients_of_resampled_images_are_of_output_tiles(kind: str) -> None:
    torch.manual_seed(0)
    facts = DeviceFacts.h200()
    target = getattr(aten, f"upsample_{kind}2d_backward").default
    made = operator_region(target, torch.randn(64, 4, 64, 64), [64, 64], [64, 4, 32, 32], False)
    program = made.passed(pass_options(facts))
    (kernel,) = program.kernels
    assert isinstance(schedule(kernel, program, facts), OutputTile)
    (output,) = program.outputs
    got = tensor_of(emulate(program, render(program, facts), made.memory(program))[output], program.buffer(output))
    torch.testing.assert_close(got, made.eager()[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 5, 3, 2)], ids=str)
def test_nll_loss(shape: tuple[int, ...], reduction: int, weighted: bool) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    target = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    forward, backward = aten.nll_loss_forward, aten.nll_loss_backward
    if len(shape) > 2:
        forward, backward = aten.nll_loss2d_forward, aten.nll_loss2d_backward
    operator_region(forward.default, x, target, weight, reduction, 1).check()
    loss, total = forward(x, target, weight, reduction, 1)
    made = operator_region(
        backward.default, torch.randn_like(loss), x, target, weight, reduction, 1, total.clamp(min=0.5)
    )
    made.check(exact=False)


def test_nll_loss_of_more_samples_than_a_half_has_room_for() -> None:
    x, target = (torch.rand(70_000, 3) + 1).half(), torch.randint(0, 3, (70_000,))
    made = operator_region(aten.nll_loss_forward.default, x, target, None, 1, -100, results=1)
    (loss,) = made.run()
    expected = F.nll_loss(x.double(), target)
    assert abs(float(loss) - float(expected)) < 2e-3


def _activation_gradients() -> dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]:
    g, x = torch.randn(2, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    return {
        "gelu": (aten.gelu_backward.default, (g, x)),
        "silu": (aten.silu_backward.default, (g, x)),
        "tanh": (aten.tanh_backward.default, (g, x)),
        "sigmoid": (aten.sigmoid_backward.default, (g, x)),
        "threshold": (aten.threshold_backward.default, (g, x, 0.1)),
        "elu": (aten.elu_backward.default, (g, 1.0, 1.0, 1.0, False, x)),
        "softplus": (aten.softplus_backward.default, (g, x, 1.0, 20.0)),
        "softshrink": (aten.softshrink_backward.default, (g, x, 0.5)),
        "hardshrink": (aten.hardshrink_backward.default, (g, x, 0.5)),
        "hardswish": (aten.hardswish_backward.default, (g, x)),
        "leaky_relu": (aten.leaky_relu_backward.default, (g, x, 0.1, False)),
        "softmax": (aten._softmax_backward_data.default, (g, F.softmax(x, 1), 1, torch.float64)),
        "log_softmax": (aten._log_softmax_backward_data.default, (g, F.log_softmax(x, 1), 1, torch.float64)),
        "mse_loss": (aten.mse_loss_backward.default, (g, x, g + 1, 0)),
        "smooth_l1_loss": (aten.smooth_l1_loss_backward.default, (g, x, g + 1, 0, 0.7)),
        "dropout": (aten.native_dropout_backward.default, (g, x > 0, 2.0)),
    }


@pytest.mark.parametrize("name", _activation_gradients())
def test_other_gradients(name: str) -> None:
    target, arguments = _activation_gradients()[name]
    assert supports(target) or decomposition(target)
    operator_region(target, *arguments).check(exact=False)


def test_places_that_are_known_within_a_tensor_are_read_by_windows_that_leave_it() -> None:
    """A gradient of padding reads its clamped places by slices, and windows over it go beyond its ends."""

    def function(gradient: Tensor, like: Tensor) -> Tensor:
        inner = torch.ops.aten.reflection_pad2d_backward(gradient * 2, like, [2, 0, 1, 0])
        return torch.ops.aten.col2im(inner, [3, 2], [2, 1], [1, 2], [0, 0], [1, 1])

    made = region(function, torch.randn(1, 3, 6), torch.randn(1, 2, 4))
    made.check(made.passed(pass_options(DeviceFacts.h200())))
