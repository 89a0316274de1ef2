"""Unusual inputs keep to the numeric policy: empty, tiny, not finite, strided, overlapping, misaligned, shared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import compare, reference
from fusepass.report.report import RegionState, Report

pytestmark = pytest.mark.models

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAN, INF = float("nan"), float("inf")

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def pointwise(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2 + torch.sigmoid(x)


def rows(x: Tensor) -> Tensor:
    """Two reductions over the last axis."""
    return F.gelu(F.layer_norm(x, x.shape[-1:])).softmax(-1)


def columns(x: Tensor) -> Tensor:
    """A reduction over the second axis, which is not the innermost one of a contiguous tensor."""
    return torch.relu(x) - x.mean(1, keepdim=True)


def everything(x: Tensor) -> Tensor:
    return (x * x).sum() + 1


def binary(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x * y) + x.sigmoid()


UNARY = (pointwise, rows, columns, everything)
every_function = pytest.mark.parametrize("function", UNARY, ids=lambda function: function.__name__)


def verify(model: nn.Module, *inputs: Tensor, fuses: bool = True) -> Report:
    """Two calls are right, silent, run as generated kernels where `fuses`, and leave the inputs as they are."""
    truth = reference(model, inputs)
    with torch.no_grad(), warnings.catch_warnings(action="error", category=FusepassWarning):
        eager = model(*inputs)
        before = [tensor.clone() for tensor in inputs]
        optimised = fusepass.optimize(model, debug=True)
        for call in ("first", "second"):
            outcome = compare(optimised(*inputs), eager, truth)
            assert outcome.ok, f"{call} call: {outcome.explain()}"
    for tensor, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)
    report = optimised.report()
    assert report.fallbacks == ()
    assert any(region.state is RegionState.FUSED for region in report.regions) == fuses, str(report)
    return report


# ---- sizes


EMPTY: tuple[Callable[[Tensor], Tensor], ...] = (
    pointwise,
    lambda x: torch.relu(x).sum(1) + 1,
    lambda x: torch.relu(x).mean(1) * 2,  # NaN
    lambda x: torch.relu(x).prod(1) * 2,
    lambda x: torch.softmax(torch.relu(x), 1),
    lambda x: torch.logsumexp(torch.relu(x), 1) * 2,  # -inf
    lambda x: F.gelu(F.layer_norm(x, x.shape[-1:])),
)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0,) * 3], ids=str)
@pytest.mark.parametrize("function", EMPTY, ids=range(len(EMPTY)))
def test_empty_tensors_run_as_the_original(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    report = verify(Function(function), x, fuses=False)
    assert any("empty" in refusal.reason for refusal in report.refusals)


def test_an_empty_batch_through_a_network_in_evaluation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).eval()
    verify(model, torch.randn(0, 3, 6, 6), fuses=False)
    verify(model, torch.randn(1, 3, 6, 6))


def test_an_empty_result_beside_one_that_is_not() -> None:
    def function(x: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
        return rows(x), torch.relu(empty) * 2

    verify(Function(function), torch.randn(3, 5), torch.randn(0, 5))


def test_errors_for_empty_tensors_are_the_original_s() -> None:
    optimised = fusepass.optimize(Function(lambda x: torch.relu(x).amax(1) + 1))
    with torch.no_grad(), pytest.warns(FusepassWarning), pytest.raises(IndexError, match="non-zero size"):
        optimised(torch.randn(3, 0))


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 1), (3, 1, 4), (2, 3, 1)], ids=str)
@pytest.mark.thinned(5)
def test_axes_of_one_element(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        centred = x - x.mean(1, keepdim=True)
        return torch.softmax(x * 2, 1), centred * torch.rsqrt(x.var(1, correction=0, keepdim=True) + 1), x.exp().sum(2)

    verify(Function(function), torch.randn(shape).to(dtype))


def test_the_variance_of_one_element_is_nan() -> None:
    with pytest.warns(UserWarning, match="degrees of freedom"):
        verify(Function(lambda x: x.relu() + x.var(1, keepdim=True)), torch.randn(3, 1, 4))


@every_dtype
def test_zero_dimensional_tensors(dtype: torch.dtype) -> None:
    scalar = torch.tensor(0.3).to(dtype)
    verify(Function(pointwise), scalar)
    verify(Function(lambda x: (torch.relu(x) * 2).sum() + x.softmax(0)), scalar)
    verify(Function(lambda x, y: torch.relu(x) * y.exp()), scalar, torch.randn(5).to(dtype))


def test_a_zero_dimensional_tensor_keeps_the_dtype_of_the_other() -> None:
    """Type promotion gives a number-like tensor no say."""
    half = torch.randn(5).half()
    verify(Function(lambda x, y: torch.relu(x) * y + 1), torch.tensor(0.3, dtype=torch.float64), half)
    verify(Function(lambda x, y: torch.relu(x) * y + 1), torch.tensor([0.3], dtype=torch.float64), half)


# ---- values that are not finite


@every_dtype
@pytest.mark.parametrize("bad", [(NAN,), (INF,), (-INF,), (INF, -INF), (NAN, INF)], ids=str)
@every_function
@pytest.mark.thinned(5)
def test_nan_and_infinities_stay_in_their_place(
    function: Callable[[Tensor], Tensor], bad: tuple[float, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(4, 6, 37).to(dtype)
    for number, value in enumerate(bad):
        x[1, 2, 11 * number] = value
        x[number + 2, 5, 36] = value
    verify(Function(function), x)


@every_dtype
@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, -0.0])
@pytest.mark.thinned(5)
def test_rows_of_one_value(value: float, dtype: torch.dtype) -> None:
    x = torch.full((3, 37), value, dtype=dtype)
    verify(Function(lambda x: (torch.log_softmax(x, 1), torch.logsumexp(x * 2, 1), x.amax(1) + x.amin(1))), x)


@every_dtype
def test_comparisons_and_clamps_of_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5], dtype=dtype)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        signs = torch.where(x > y, x, -y) + torch.where(x != x, 1.0, 0.0)
        return signs, torch.maximum(x, y).relu(), torch.minimum(x, y) * 2, x.clamp(-1, 1) + 1, torch.fmax(x, y) + 1

    verify(Function(function), x[:, None], x[None, :])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_overflow_of_half_precision(dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 40).to(dtype) * torch.finfo(dtype).max
    verify(Function(lambda x: (torch.relu(x) * 1.5, (x * 0.5 + x * 0.25).abs())), x)


def test_subnormal_numbers_are_kept() -> None:
    tiny = torch.finfo(torch.float32).tiny
    x = torch.tensor([tiny, tiny / 2, tiny / 1024, -tiny / 8])
    optimised = fusepass.optimize(Function(lambda x: torch.relu(x * 0.5) + x))
    with torch.no_grad():
        assert torch.equal(optimised(x), torch.relu(x * 0.5) + x)
    assert optimised.report().ops_fused == 3


# ---- strides, alignment, shared memory


@every_dtype
@every_function
@pytest.mark.thinned(5)
def test_transposed(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    verify(Function(function), torch.randn(37, 6, 4).to(dtype).transpose(0, 2))


@every_function
def test_strided(function: Callable[[Tensor], Tensor]) -> None:
    verify(Function(function), torch.randn(8, 12, 74)[::2, 1::2, ::2])


@every_function
def test_permuted(function: Callable[[Tensor], Tensor]) -> None:
    verify(Function(function), torch.randn(4, 6, 37).permute(1, 0, 2))


@every_dtype
@every_function
@pytest.mark.thinned(5)
def test_expanded(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    verify(Function(function), torch.randn(1, 6, 1).to(dtype).expand(4, 6, 37))


@every_function
def test_overlapping_windows(function: Callable[[Tensor], Tensor]) -> None:
    """Neighbouring rows share all but one of their elements."""
    verify(Function(function), torch.randn(100).as_strided((4, 6, 37), (7, 1, 1)))


@every_dtype
@every_function
@pytest.mark.thinned(5)
def test_misaligned(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    flat = torch.randn(4 * 6 * 40 + 3).to(dtype)
    for offset in (1, 3):
        x = flat[offset:][: 4 * 6 * 40].view(4, 6, 40)
        assert x.data_ptr() % 16 != 0 or offset * dtype.itemsize % 16 == 0
        verify(Function(function), x)


def test_alignment_may_change_from_call_to_call() -> None:
    flat = torch.randn(4 * 40 + 1)
    model = Function(rows)
    optimised = fusepass.optimize(model)
    for offset in (0, 1, 0, 1):
        x = flat[offset:][:160].view(4, 40)
        with torch.no_grad():
            outcome = compare(optimised(x), model(x), reference(model, (x,)))
        assert outcome.ok, f"offset {offset}: {outcome.explain()}"
    assert len(optimised.report().regions) == 1
    assert optimised.report().fallbacks == ()


@every_dtype
@pytest.mark.parametrize("weights_last", [False, True])
@pytest.mark.parametrize("inputs_last", [False, True])
@pytest.mark.thinned(5)
def test_channels_last(inputs_last: bool, weights_last: bool, dtype: torch.dtype) -> None:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.GroupNorm(2, 8), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers).to(dtype).eval()
    x = torch.randn(2, 3, 6, 10).to(dtype)
    verify(
        model.to(memory_format=torch.channels_last) if weights_last else model,
        x.contiguous(memory_format=torch.channels_last) if inputs_last else x,
    )


def test_channels_last_without_an_anchor() -> None:
    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1))
    verify(model, x)
    verify(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()).eval(), x)
    verify(Function(binary), x, x.contiguous())


def test_channels_last_3d() -> None:
    x = torch.randn(2, 4, 3, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    verify(nn.Sequential(nn.ConvTranspose3d(4, 6, 2), nn.BatchNorm3d(6), nn.AdaptiveAvgPool3d(1)).eval(), x)


def shared_memory() -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of inputs that lie in one memory."""
    x = torch.randn(6, 6)
    flat = torch.randn(40)
    return {
        "the same tensor": (x, x),
        "an alias": (x, x.view(6, 6)),
        "its transpose": (x, x.t()),
        "a row of it": (x, x[2]),
        "an overlapping part": (flat[:36].view(6, 6), flat[4:].view(6, 6)),
        "a misaligned overlapping part": (flat[1:37].view(6, 6), flat[3:39].view(6, 6)),
        "one expanded number": (x[0, :1].expand(6, 6), x),
    }


@pytest.mark.parametrize("case", shared_memory())
def test_inputs_that_share_memory(case: str) -> None:
    verify(Function(binary), *shared_memory()[case])


def test_the_same_tensor_and_different_ones_take_turns() -> None:
    """What was made for a call with one tensor twice must not serve one with two, nor the reverse."""
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    model = Function(binary)
    optimised = fusepass.optimize(model)
    with torch.no_grad():
        for inputs in ((x, x), (x, y), (y, y), (y, x)):
            outcome = compare(optimised(*inputs), model(*inputs), reference(model, inputs))
            assert outcome.ok, outcome.explain()


def test_a_view_of_a_parameter_as_input() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)).requires_grad_(False)
    verify(model, model[0].weight)
    verify(model, model[0].weight.t())


def test_results_do_not_share_memory_with_each_other_or_an_earlier_call() -> None:
    optimised = fusepass.optimize(Function(lambda x: (torch.relu(x) * 2, torch.relu(x) + 1)))
    x = torch.randn(5, 7)
    with torch.no_grad():
        results = [*optimised(x), *optimised(x)]
    kept = [result.clone() for result in results]
    for number, result in enumerate(results):
        result.fill_(number)
        kept[number].fill_(number)
    for result, expected in zip(results, kept, strict=True):
        assert torch.equal(result, expected)


def test_other_memory_formats_of_one_shape_are_signatures_of_their_own() -> None:
    model = Function(rows)
    optimised = fusepass.optimize(model)
    x = torch.randn(4, 6, 8, 10)
    forms = [x, x.contiguous(memory_format=torch.channels_last), x[..., :1].expand(4, 6, 8, 10), x.clone()]
    with torch.no_grad():
        for form in forms * 2:
            outcome = compare(optimised(form), model(form), reference(model, (form,)))
            assert outcome.ok, f"strides {form.stride()}: {outcome.explain()}"
    assert len(optimised.report().regions) == 3
