"""Few long rows are scanned in pieces, whatever their length, forwards and backwards, along either axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.passes.split import SplitPolicy
from tests.support.emulate import needs_compiler
from tests.support.regions import region, tensor_of
from tests.unit.test_scans import SMALL, Case, computed, made_from

SPLIT = replace(pass_options(SMALL), split=SplitPolicy(workers=32, least_piece=64, lanes=4))
F16, F32, I32 = torch.float16, torch.float32, torch.int32

CASES: dict[str, Case] = {
    "equal pieces": (lambda x: x.cumsum(1), (2, 4096), F32),
    "a rest": (lambda x: x.cumsum(1), (3, 4099), F32),
    "a rest of one": (lambda x: x.cumsum(0), (2049,), F32),
    "a product": (lambda x: (x * 0.01 + 1).cumprod(0) * 2, (3001,), F32),
    "halves": (lambda x: x.cumsum(1).relu(), (2, 2050), F16),
    "integers": (lambda x: x.cumsum(1), (2, 2050), I32),
    "backwards": (lambda x: x.flip(1).cumsum(1).flip(1), (2, 4099), F32),
    "only read backwards": (lambda x: x.flip(1).cumsum(1), (2, 4096), F32),
    "before it and behind it": (lambda x: (x.sigmoid().cumsum(1) * 0.25 + x).tanh(), (3, 3000), F32),
    "outer": (lambda x: x.cumsum(1), (2, 1999, 3), F32),
    "greatest": (lambda x: x.cummax(1).values, (3, 4099), F32),
    "greatest and where": (lambda x: tuple(x.round().cummax(1)), (3, 4099), F32),
    "least and where of integers": (lambda x: tuple(x.cummin(1)), (2, 2050), I32),
    "exponentials": (lambda x: (x * 9).logcumsumexp(1), (3, 4099), F32),
}


@pytest.mark.parametrize("name", CASES)
def test_meaning(name: str) -> None:
    made = made_from(CASES[name])
    program = made.passed(SPLIT)
    first, before, each, *rest = program.kernels
    assert not first.scans
    assert before.scans
    assert each.scans
    assert [kernel.rest for kernel in rest] == ([] if name == "equal pieces" else [True] * len(rest))
    made.check(program, tolerance=2e-3 if CASES[name][2] is F16 else None)


def test_a_row_without_equal_pieces_that_leave_none_or_several() -> None:
    options = replace(SPLIT, split=SplitPolicy(workers=3, least_piece=1, lanes=1, least_of_scans=2))
    made = region(lambda x: x.cumsum(0), torch.randn(7))
    program = made.passed(options)
    assert len(program.kernels) == 1
    made.check(program)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.thinned(5)
def test_compiled(name: str, on_gpu: bool) -> None:
    made = made_from(CASES[name])
    program = made.passed(SPLIT)
    results = computed(made, program, on_gpu=on_gpu)
    for output, wanted in zip(program.outputs, made.exact(), strict=True):
        got = tensor_of(results[output], program.buffer(output))
        bound = 2e-3 if wanted.dtype is F16 else 1e-5
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound * float(wanted.abs().max()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("function", [torch.cumsum, torch.cummax, torch.cummin, torch.logcumsumexp])
def test_what_is_not_finite_stays_behind_where_it_is(function: Callable[[Tensor, int], object], value: float) -> None:
    x = torch.randn(2, 2050)
    x[0, 1000], x[1, 2049] = value, value
    x[1, :1200] = value if function is not torch.cumsum else x[1, :1200]
    made = region(lambda x: function(x, 1), x)
    made.check(made.passed(SPLIT))


def test_many_rows_are_left_alone() -> None:
    program = region(lambda x: x.cumsum(1), torch.randn(8, 4096)).passed(SPLIT)
    assert len(program.kernels) == 1  # in few pieces, what is read twice costs more
    assert program.kernels[0].reductions[0].op is ReduceOp.SUM
