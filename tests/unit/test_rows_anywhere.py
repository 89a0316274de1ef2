"""Rows whose length is no multiple of a vector: they begin anywhere, and are read and written in whole vectors all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render
from fusepass.codegen.schedule import schedule, weights
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule_general import generalised
from tests.support import kernels as k
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region, tensor_of

H200 = DeviceFacts.h200()
BF16 = torch.bfloat16
# Few rows already fill it, so that small kernels get the schedules of large ones.
SMALL = replace(H200, multiprocessors=2, l2_bytes=1 << 20)


@pytest.mark.parametrize(
    ("make", "width", "anywhere"),
    [
        (lambda: k.layer_norm(4096, 1001), 4, True),
        (lambda: k.layer_norm(4096, 1002), 4, True),
        (lambda: k.layer_norm(4096, 1004), 4, False),
        (lambda: k.layer_norm(4096, 1004, k.F16), 8, True),
        (lambda: k.layer_norm(4096, 50_257), 4, True),
        (lambda: k.row_reduction(4096, 1001, ReduceOp.SUM), 4, True),
        (lambda: k.softmax_rows(4096, 63), 1, False),  # too short
    ],
)
def test_choice(make: Callable[[], Program], width: int, anywhere: bool) -> None:
    program = make()
    plan = schedule(program.kernels[0], program, H200)
    assert (plan.width, isinstance(plan, Rows) and plan.start is not None) == (width, anywhere)


def test_whole_vectors_are_read_and_written_as_they_lie_and_ends_one_by_one() -> None:
    text = render(k.layer_norm(4096, 1001), H200).text
    row = "1001 * row + col"
    assert f"x_in_0[u] = fp::load_vector<4>(x + ({row}));" in text
    assert f"fp::store_vector(y + ({row}), y_out_0);" in text
    assert "if (u * 32 <= 214 || lane + u * 32 < whole)" in text  # of 246 to 250 vectors
    assert "if (end < 1001)" in text


def test_other_operands_are_loaded_one_by_one() -> None:
    """Weights begin at a multiple of 16 bytes in every row, which is between two vectors in most."""
    text = render(k.layer_norm(4096, 1001), H200).text
    assert "weight_in_0[v] = weight[col + v];" in text


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("columns", [1001, 1023, 5121])
def test_where_sizes_come_at_run_time_vectors_overhang_both_ends(columns: int, coarse: bool) -> None:
    program = k.layer_norm(4096, columns, k.F16)
    (kernel,) = program.kernels
    plan = generalised(schedule(kernel, program, H200), kernel, coarse=coarse)
    assert plan.overhangs
    assert plan.unroll * plan.lanes >= plan.vectors(columns)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "copied"),
    [
        (1 << 17, 1001, BF16, True),
        (1 << 10, 1001, BF16, False),
        (1 << 14, 1001, BF16, False),  # a launch more takes longer than what it saves
        (9999, 5001, torch.float32, False),
        (1 << 18, 5001, torch.float32, False),  # loads of single floats are as fast
        (4096, 50_257, torch.float32, True),
        (256, 50_257, torch.float32, False),
    ],
)
def test_weights_are_laid_out_for_each_beginning_where_that_saves_more_than_a_launch(
    rows: int, columns: int, dtype: torch.dtype, copied: bool
) -> None:
    norm = nn.LayerNorm(columns, device="meta", dtype=dtype)
    program = region(norm, torch.empty((rows, columns), device="meta", dtype=dtype)).passed(pass_options(H200))
    assert (len(program.kernels) == 2) is copied
    width = 16 // dtype.itemsize
    assert (f"fp::load_vector<{width}>(arg0_1_shifted + (" in render(program, H200).text) is copied


@needs_compiler
@pytest.mark.parametrize(("columns", "dtype"), [(1003, BF16), (1001, torch.float32), (1002, torch.float32)])
def test_values_with_weights_that_are_laid_out(
    columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_SAVES", ((0, 0, 0, 1.0),))
    norm = nn.LayerNorm(columns).to(dtype)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    assert len(_check(norm, (700, columns), dtype).kernels) == 2


@needs_compiler
@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (lambda x: x[:, 1:-2].softmax(-1), (7, 403), torch.float32),
        (lambda x: F.layer_norm(x + x.flip(0), (301,)), (8, 301), torch.bfloat16),
        (nn.LayerNorm(1003).to(torch.bfloat16), (7, 1003), torch.bfloat16),  # weights are loaded one by one
        (nn.GroupNorm(2, 6), (3, 6, 13, 13), torch.float32),
        (lambda x: x.max(-1), (5, 1003), torch.float32),
        (lambda x: F.batch_norm(x, None, None, training=True), (6, 5, 13, 7), torch.float32),  # runs of 91
        (lambda x: F.batch_norm(x.relu(), None, None, training=True), (40, 3, 15, 17), torch.bfloat16),
        (lambda x: x[:, :, 1:].amax((0, 2)), (9, 5, 102), torch.float32),
        (lambda x: (x - x.mean((0, 2), keepdim=True)) * x.abs().sum(2, keepdim=True), (9, 4, 343), torch.float32),
        (lambda x: x.float().softmax(-1), (5, 5121), torch.bfloat16),
        (lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True), (5, 9001), torch.float32),
    ],
)
@pytest.mark.thinned(5)
def test_values(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    program = _check(function, shape, dtype)
    plans = [schedule(kernel, program, SMALL) for kernel in program.kernels]
    assert any(isinstance(plan, Rows) and plan.start is not None for plan in plans)


@needs_compiler
@pytest.mark.parametrize("columns", [52_000, 52_003])
def test_rows_that_are_reduced_only_are_copied_ahead(columns: int) -> None:
    """The last phase that needs a row's places is a reduction loop."""
    program = _check(lambda x: (x - x.amax(-1, keepdim=True)).exp2().mean(-1), (5, columns), torch.float32)
    plan = schedule(program.kernels[0], program, SMALL)
    assert isinstance(plan, Rows)
    assert (plan.keep, plan.blocks) == (Keep.FETCHED, 2)


@needs_compiler
@pytest.mark.parametrize("sums", [1, 8])
def test_a_short_row_of_bytes_has_a_thread_for_each_element_at_its_ends(sums: int) -> None:
    """Vectors of sixteen leave up to thirty elements at the ends, more than a row of 201 has vectors."""

    def function(x: Tensor) -> Tensor:
        return torch.stack([(x > number).sum(1) for number in range(sums)], 1)

    torch.manual_seed(0)
    made = region(function, torch.randint(0, 9, (6, 201), dtype=torch.uint8))
    program = made.passed(pass_options(SMALL))
    plan = schedule(program.kernels[0], program, SMALL)
    assert isinstance(plan, Rows)
    assert plan.start is not None
    got = emulate(program, render(program, SMALL), made.memory(program))
    for name, wanted in zip(program.outputs, made.run(program), strict=True):
        assert torch.equal(tensor_of(got[name], program.buffer(name)), wanted)


def _check(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Program:
    """Hold what emulated kernels give against the interpreter; the program."""
    torch.manual_seed(0)
    made = region(function, torch.randn(shape).to(dtype))
    program = made.passed(pass_options(SMALL))
    got = emulate(program, render(program, SMALL), made.memory(program))
    for name, wanted in zip(program.outputs, made.run(program), strict=True):
        bound = 1e-2 if wanted.dtype is torch.bfloat16 else 2e-6
        torch.testing.assert_close(tensor_of(got[name], program.buffer(name)), wanted, rtol=bound, atol=bound)
    return program
