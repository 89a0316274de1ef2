"""Rows shorter than an access become windows, as do those of few elements whose results are reduced; what is the place of an extreme is
counted in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import Window
from fusepass.codegen.ir.program import Role
from fusepass.codegen.render import render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from tests.support.emulate import emulate, needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import region, tensor_of
from tests.support.windows import SMALL

F16, BF16, U8 = torch.float16, torch.bfloat16, torch.uint8


def _weighted(x: Tensor) -> Tensor:
    return (x * torch.linspace(0.1, 1, x.shape[-1], dtype=x.dtype, device=x.device)).sum(-1) + 1


def _check(function: Callable[..., object], *inputs: Tensor, facts: DeviceFacts = SMALL) -> str:
    made = region(function, *inputs)
    program = made.passed(pass_options(facts))
    source = render(program, facts)
    results = emulate(program, source, made.memory(program))
    for output, want in zip(program.outputs, made.exact(), strict=True):
        torch.testing.assert_close(
            tensor_of(results[output], program.buffer(output)), want, equal_nan=True, check_dtype=False
        )
    return source.text


@needs_compiler
@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (lambda x: x.sum(-1), (4000, 3), torch.float32),
        (lambda x: x.sum(-1), (4001, 3), torch.float32),
        (lambda x: x.amax(-1), (20, 100, 2), torch.float32),
        (lambda x: x.mean(-1), (8192, 3), F16),
        (lambda x: x.mean(-1), (8192, 2), BF16),
        (lambda x: x.amin(-1), (8192, 5), F16),
        (lambda x: x.norm(dim=-1), (4096, 3), torch.float32),
        (lambda x: (x.sum(-1), x.amax(-1)), (4096, 3), torch.float32),
        (_weighted, (4096, 3), torch.float32),
        (lambda x: x.prod(-1), (8192, 2), torch.float32),
        (lambda x: (x > 0).any(-1), (4096, 3), torch.float32),
    ],
)
def test_short_rows_are_windows(function: Callable[..., object], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    x[3], x.view(-1)[7], x.view(-1)[-1] = inf, nan, -inf
    program = region(function, x).passed(pass_options(SMALL))
    (kernel,) = program.kernels
    assert kernel.is_pointwise
    assert any(isinstance(node, Window) for node in kernel.nodes)
    _check(function, x)


@needs_compiler
def test_short_rows_of_bytes() -> None:
    x = torch.randint(0, 255, (1024, 3), dtype=U8)
    _check(lambda x: x.float().mean(-1), x)
    _check(lambda x: x.sum(-1), x)


@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (lambda x: x.sum(-1), (1000, 4), torch.float32),  # an access
        (lambda x: x.sum(-1), (1000, 9), F16),
        (lambda x: x.sum(-1), (1000, 2), torch.float64),
        (lambda x: x.sum(0), (3, 1000), torch.float32),  # columns
        (lambda x: x.argmax(-1), (1000, 3), torch.float32),
        (lambda x: x.softmax(-1), (1000, 3), torch.float32),  # something for each element
        (lambda x: x.var(-1), (1000, 3), torch.float32),
    ],
)
def test_others_stay_rows(function: Callable[..., object], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    program = region(function, torch.empty(shape, dtype=dtype)).passed(pass_options(SMALL))
    assert not any(kernel.is_pointwise for kernel in program.kernels)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return ((x[:, None] - y) ** 2).sum(-1)


NESTED: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...], int]] = {
    "least distance": (lambda x, y: _distances(x, y).amin(1), ((70, 3), (130, 3)), 9100),
    "nearest": (lambda x, y: _distances(x, y).argmin(1), ((70, 8), (130, 8)), 9100),
    "soft assignment": (lambda x, y: (-_distances(x, y)).softmax(1), ((70, 4), (130, 4)), 9100),
    "mean length": (lambda x: x.norm(dim=-1).mean(), ((4099, 4),), 4099),
    "greatest colour": (lambda x: x.amax(1).mean((1, 2)), ((4, 3, 33, 30),), 3960),
    "normalised sum": (lambda x: torch.layer_norm(x.sum(1), (130,)), ((40, 4, 130),), 5200),
    "across": (lambda x: x.amax(-1).sum(1), ((3, 40, 64, 4),), 7680),
}
"""Functions, shapes, and how many results need not be stored."""


@needs_compiler
@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("facts", [SMALL, DeviceFacts.h200()], ids=lambda facts: facts.name)
def test_few_elements_whose_results_are_reduced_are_windows(name: str, facts: DeviceFacts) -> None:
    torch.manual_seed(0)
    function, shapes, results = NESTED[name]
    given = [torch.randn(shape) for shape in shapes]
    given[0].view(-1)[5] = nan
    program = region(function, *given).passed(pass_options(facts))
    assert any(isinstance(node, Window) for node in program.kernels[0].nodes)
    assert not any(buffer.role is Role.TEMP and buffer.numel >= results for buffer in program.buffers)
    _check(function, *given, facts=facts)


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(-1), x.sum(-1).amax(1)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.sum(-1).amax(1), (40, 50, 9)),  # more elements
        (_twice, (40, 50, 4)),  # stored anyway
        (lambda x: x.argmax(-1).sum(1), (40, 50, 4)),  # no operation of a window
        (lambda x: x.sum(-1).amax(1), (7, 1, 5)),  # rows of one element
    ],
)
def test_other_results_are_stored_before(function: Callable[..., object], shape: tuple[int, ...]) -> None:
    program = region(function, torch.empty(shape)).passed(pass_options(SMALL))
    reducing = [kernel for kernel in program.kernels if kernel.reduction_loops]
    assert not any(isinstance(node, Window) for kernel in reducing for node in kernel.nodes)


@needs_compiler
@pytest.mark.parametrize("function", [lambda x, y: _distances(x, y), lambda x, y: (x[:, None] * y).prod(-1)])
def test_few_elements_of_few_tensors_are_windows(function: Callable[..., object]) -> None:
    x, y = torch.randn(200, 4), torch.randn(90, 4)
    (kernel,) = region(function, x, y).passed(pass_options(SMALL)).kernels
    assert kernel.is_pointwise
    _check(function, x, y)


@needs_compiler
def test_few_elements_that_lie_apart_are_windows() -> None:
    x, y = torch.randn(500, 8, 2), torch.randn(500, 8)

    def weighted(x: Tensor, y: Tensor) -> Tensor:
        return (x * y[..., None]).sum(1)

    (kernel,) = region(weighted, x, y).passed(pass_options(SMALL)).kernels
    assert kernel.is_pointwise
    _check(weighted, x, y)


def test_a_cpu_stores_what_it_reduces_across_memory() -> None:
    for name, kernels in (("across", 2), ("least distance", 1)):
        function, shapes, _ = NESTED[name]
        program = region(function, *map(torch.empty, shapes)).passed(pass_options(DeviceFacts.cpu(2)))
        assert len(program.kernels) == kernels


def test_a_cpu_has_loops_for_short_rows() -> None:
    program = region(lambda x: x.sum(-1), torch.empty(1000, 3)).passed(pass_options(DeviceFacts.cpu(2)))
    assert not program.kernels[0].is_pointwise


@needs_compiler
@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, F16, torch.int32, torch.float64])
@pytest.mark.parametrize("shape", [(70, 96), (33, 515), (9, 2048), (5, 1030)])
@pytest.mark.parametrize("dim", [0, 1])
def test_places_of_extremes(shape: tuple[int, int], dtype: torch.dtype, dim: int) -> None:
    """Ties, NaN, and rows of nothing but the least number that there is, whose first place is the result."""
    torch.manual_seed(0)
    x = torch.randint(-3, 4, shape).to(dtype)
    rows = x if dim else x.t()
    if dtype.is_floating_point:
        rows[0], rows[1], rows[2, 3], rows[3, -1] = -inf, inf, nan, nan
        rows[4, :-1], rows[4, -1] = -inf, -5
        rows[2, -2] = nan
    else:
        rows[0], rows[1] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    text = _check(lambda x: (x.argmax(dim), *x.min(dim)), x)
    assert "push_behind" in text


@needs_compiler
def test_places_are_those_of_the_caller() -> None:
    """What is counted otherwise than memory goes is not met in order."""
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (6, 40, 30)).float()
    assert "push_behind" not in _check(lambda x: x.permute(0, 2, 1).flatten(1).argmax(1), x)
    _check(lambda x: x.flip(-1).argmax(-1), x)
    _check(lambda x: x.argmax(), x.flatten().repeat(20))


@needs_compiler
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a[:, :, None] + b).amax(1),
        lambda a, b: (a[:, :, None] + b).max(1),
        lambda a, b: (a[:, :, None] * b).sum(1),
    ],
)
def test_rows_of_what_goes_across_are_beside_each_other(function: Callable[..., object]) -> None:
    """Neighbouring threads read neighbours of what goes across, and one element of the rest."""
    torch.manual_seed(0)
    a, b = torch.randn(60, 70), torch.randn(70, 200)
    program = region(function, a, b).passed(pass_options(SMALL))
    assert isinstance(schedule(program.kernels[0], program, SMALL), Columns)
    _check(function, a, b)
    turned = region(lambda a, b: (a[:, None] + b).amax(-1), a, b.t().contiguous()).passed(pass_options(SMALL))
    assert isinstance(schedule(turned.kernels[0], turned, SMALL), Rows)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nearest": lambda x, y: ((x[:, None] - y) ** 2).sum(-1).argmin(1),
    "shares": lambda x, y: (-((x[:, None] - y).abs().sum(-1))).softmax(-1),
    "least, and their mean": lambda x, y: ((x[:, None] - y) ** 2).sum(-1).amin(1).mean(),
}


@needs_compiler
@pytest.mark.parametrize(("count", "size"), [(96, 5), (37, 5), (96, 17), (100, 20)])
@pytest.mark.parametrize("name", DISTANCES)
def test_what_all_rows_meet_is_laid_out_by_elements_of_the_windows(name: str, count: int, size: int) -> None:
    """So that neighbouring threads load neighbours, in vectors where these fit."""
    torch.manual_seed(0)
    made = region(DISTANCES[name], torch.randn(400, size), torch.randn(count, size))
    facts = DeviceFacts.h200()
    program = made.passed(replace(pass_options(facts), taps_from=1))
    filling, reading, *_ = program.kernels
    assert filling.origin == ("weights by tap",)
    assert (schedule(reading, program, facts).width > 1) is (count % 4 == 0)
    check_emulated(made, program, facts, 1e-5, 1e-6)


def _gradients(x: Tensor, y: Tensor, least: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Of the least squared distances of each of `x` to those of `y`."""
    apart = x[:, None] - y
    found = (apart.square().sum(-1) <= least[:, None]).to(x.dtype)
    shares = found / found.sum(1, keepdim=True) * gradient[:, None]
    each = shares[..., None] * 2 * apart
    return each.sum(1), -each.sum(0)


@needs_compiler
@pytest.mark.parametrize("size", [3, 4])
def test_what_several_reduce_is_computed_by_each(size: int) -> None:
    torch.manual_seed(0)
    x, y, gradient = torch.randn(160, size), torch.randn(96, size), torch.randn(160)
    least = (x[:, None] - y).square().sum(-1).sort(1).values[:, 1] + 1e-3  # two of each row at least
    made = region(_gradients, x, y, least, gradient)
    facts = DeviceFacts.h200()
    program = made.passed(pass_options(facts))
    largest = max(buffer.numel for buffer in program.buffers if buffer.role is Role.TEMP)
    assert largest < 160 * 96
    check_emulated(made, program, facts, 1e-4)


def test_a_processor_stores_it() -> None:
    shapes = (160, 3), (96, 3), (160,), (160,)
    program = region(_gradients, *map(torch.empty, shapes)).passed(pass_options(DeviceFacts.cpu(2)))
    assert max(buffer.numel for buffer in program.buffers if buffer.role is Role.TEMP) >= 160 * 96
