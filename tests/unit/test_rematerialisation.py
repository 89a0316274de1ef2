"""Convolutions that are computed once for their statistics and once more for what needs these; reductions of a thread's own sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import render
from fusepass.codegen.schedule_convolution import pays_twice
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import computing_again, region
from tests.support.thinned import thinned
from tests.support.values import check_values
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)  # its blocks take several tiles one after another
Model = Callable[[Tensor, Tensor, Tensor], object]


def program_of(model: Model, out: int = 20, *, twice: bool = True, size: tuple[int, ...] = (2, 5, 9, 70)) -> Program:
    """The program of `model`, which gets a convolution's result, a weight and a bias for each channel."""
    x, w, b = torch.randn(size), torch.randn(out, size[1], *(3,) * (len(size) - 2)), torch.randn(out)
    made = region(lambda x, w, b: model(F.conv2d(x, w, b), b * 2 + 3, b), x, w, b)
    options = pass_options(SMALL, AnchorSource.HALVES)
    return made.passed(computing_again(options, lambda program, first, second: twice))


def convolutions(program: Program) -> list[Kernel]:
    return [kernel for kernel in program.kernels if kernel.anchor is not None]


def check(program: Program, inputs: dict[str, np.ndarray] | None = None, tolerance: float = 2e-5) -> str:
    """Compares what the kernels compute with the program's meaning; their text."""
    return check_values(program, SMALL, inputs or inputs_of(program), tolerance)


def batch(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(y, None, None, weight, bias, training=True)


def groups(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(torch.sigmoid(y * weight.view(-1, 1, 1)), 4, weight, bias)


def clamped_extreme(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (F.instance_norm(y) * weight.view(-1, 1, 1)).amax(1)


@needs_compiler
@pytest.mark.parametrize(
    ("model", "out"), [(groups, 20), (clamped_extreme, 40), *thinned([(batch, 70), (batch, 17)], 2)]
)
def test_values(model: Model, out: int) -> None:
    program = program_of(model, out)
    first, second = convolutions(program)
    assert first.partials is not None
    assert not first.stores
    assert second.writes == set(program.outputs)
    assert "fp::push_sums" in check(program)


@needs_compiler
def test_what_is_not_finite_is_so_in_both() -> None:
    program = program_of(groups)
    inputs = inputs_of(program)
    inputs[program.inputs[0]][1111] = np.nan
    inputs[program.inputs[0]][4000] = np.inf
    check(program, inputs)


@needs_compiler
@pytest.mark.parametrize("value", [3.0e-3, 1234.567])
def test_equal_numbers_are_their_mean(value: float) -> None:
    """A normalisation magnifies what is off: by 300 times, where there is no variance."""
    program = program_of(batch)
    inputs = inputs_of(program)
    weight = program.inputs[1]
    inputs[weight][:] = 0
    for name in program.inputs[2:]:
        inputs[name][:] = value
    got = emulate(program, render(program, SMALL), inputs)
    shift = got[program.outputs[0]]
    assert np.unique(shift).size == 1
    assert shift[0] == np.float32(value)


def pooled(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.max_pool2d(batch(y, weight, bias), 2)


def kept(y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return y, batch(y, weight, bias)


def both_ways(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return batch(y, weight, bias) + y.flip(3)


@needs_compiler
@pytest.mark.parametrize("model", thinned([pooled, kept, both_ways], 3))
def test_results_that_are_needed_elsewhere_are_stored(model: Model) -> None:
    """Where that is the sums alone, what is reduced takes their place in registers."""
    program = program_of(model)
    (kernel,) = convolutions(program)
    assert ("fp::push_sums" in check(program)) is (len(kernel.stores) == 1)


def chained(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.hardswish(y * weight.view(-1, 1, 1))


def moved(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return chained(y, weight, bias) + torch.arange(float(y.shape[3]))


@needs_compiler
@pytest.mark.parametrize(
    ("model", "out", "own"), [(chained, 40, True), *thinned([(moved, 20, False), (chained, 7, True)], 3)]
)
def test_values_are_made_where_sums_are(model: Model, out: int, own: bool) -> None:
    """Unless they depend on the position."""
    program = program_of(model, out)
    assert ("fp::stage_values" in check(program)) is own


def test_not_without_a_gain() -> None:
    (kernel,) = convolutions(program_of(batch, twice=False))
    assert kernel.stores


@pytest.mark.parametrize(("out", "kernel", "wanted"), [(64, 3, True), (16, 7, False)])
def test_cost_decides(out: int, kernel: int, wanted: bool) -> None:
    """Few taps and many results, or few results of many taps, in two kernels."""
    meta = {"device": "meta"}
    x, w, b = (
        torch.empty(64, 8, 128, 128, **meta),
        torch.empty(out, 8, kernel, kernel, **meta),
        torch.empty(out, **meta),
    )
    asked = []

    def again(program: Program, first: Kernel, second: Kernel) -> bool:
        asked.append(pays_twice(program, first, second, H200))
        return asked[-1]

    made = region(lambda x, w, b: batch(F.conv2d(x, w, b), b, b), x, w, b)
    made.passed(computing_again(pass_options(H200, AnchorSource.HALVES), again))
    assert asked == [wanted]
