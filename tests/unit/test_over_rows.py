"""What is reduced over rows is reduced by the kernel that reduces along them: every thread of the kernels runs on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate, pass_options, traffic
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan_rows import Rows
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import NO_SPLIT, Region, region, tensor_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=2, l2_bytes=4096)
PIECES = replace(NO_SPLIT, row_pieces=lambda program, kernel: 3)

Model = Callable[..., tuple[Tensor, ...]]


def tokens(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (F.layer_norm(x, weight.shape, weight, bias).mean(1),)


def tokens_and_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y = F.layer_norm(x, weight.shape, weight, bias)
    return y, y.amax(1)


def batch(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (F.rms_norm(x, weight.shape, weight).sum(0) + bias,)


def load(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (x.softmax(-1).mean((0, 1)) * weight,)


def spread(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y = F.layer_norm(x, weight.shape)
    return y.var((0, 1)), y.mean((0, 1))


def gradients(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    mean = x.mean(-1, keepdim=True)
    spread = (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()
    given = [each.flatten(0, 1) for each in (torch.sin(3 * x), x, mean, spread)]
    return torch.ops.aten.native_layer_norm_backward(
        given[0], given[1], weight.shape, *given[2:], weight, bias, [True, True, True]
    )


def softmax_gradients(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y = torch.sigmoid(x)
    gradient = y * (x - (x * y).sum(-1, keepdim=True))
    return gradient, gradient.sum((0, 1))


CASES: dict[str, tuple[Model, tuple[int, ...], torch.dtype]] = {
    "mean over tokens": (tokens, (3, 37, 64), torch.float32),
    "of halves": (tokens, (4, 50, 256), torch.bfloat16),
    "of odd rows": (tokens, (3, 37, 51), torch.float32),
    "of rows that leave threads over": (tokens, (3, 37, 136), torch.float32),
    "of rows that warps share": (tokens, (2, 41, 1300), torch.float32),
    "of halves that warps share": (tokens, (2, 41, 1304), torch.float16),
    "of many rows for a thread": (tokens, (2, 700, 1024), torch.float32),
    "of rows of a few numbers": (tokens, (2, 3000, 4), torch.float32),
    "maximum, stored": (tokens_and_norm, (3, 37, 64), torch.float32),
    "maximum, stored as halves": (tokens_and_norm, (3, 40, 96), torch.float16),
    "over a batch": (batch, (40, 5, 48), torch.float32),
    "load of experts": (load, (9, 50, 8), torch.float32),
    "moments of columns": (spread, (9, 50, 40), torch.float32),
    "gradients": (gradients, (9, 50, 128), torch.float32),
    "gradients of halves": (gradients, (9, 50, 136), torch.bfloat16),
    "gradients of odd rows": (gradients, (9, 50, 77), torch.float32),
    "gradient and its sums": (softmax_gradients, (9, 50, 72), torch.float32),
}


def _made(name: str) -> Region:
    function, shape, dtype = CASES[name]
    weights = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    return region(function, torch.randn(shape).to(dtype), *weights, cuda=True)


def _over_rows(program: Program) -> int:
    return sum(kernel.partials is not None for kernel in program.kernels)


@pytest.mark.parametrize("name", CASES)
def test_the_program_says_the_same(name: str) -> None:
    made = _made(name)
    program = made.passed(PIECES)
    assert _over_rows(program) == 1
    half = CASES[name][2] is not torch.float32
    made.check(program, tolerance=2e-2 if half else 1e-5)


@needs_compiler
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(7)
def test_values(name: str, aligned: bool) -> None:
    made = _made(name)
    program = made.passed(pass_options(SMALL))
    assert _over_rows(program) == 1
    results = emulate(program, render(program, SMALL, aligned=aligned), made.memory(program), shift=0 if aligned else 1)
    bound = 2e-5 if CASES[name][2] is torch.float32 else 2e-2
    for output, wanted in zip(program.outputs, made.exact(), strict=True):
        torch.testing.assert_close(tensor_of(results[output], program.buffer(output)), wanted, rtol=bound, atol=bound)


@needs_compiler
def test_pieces_without_rows_change_nothing() -> None:
    """19 rows in 8 pieces of 3: the last has none."""
    made = region(lambda x: x.softmax(-1).amax(0), -torch.rand(19, 16) - 3, cuda=True)
    program = made.passed(replace(pass_options(SMALL), row_pieces=lambda program, kernel: 8))
    (result,) = emulate(program, render(program, SMALL), made.memory(program)).values()
    torch.testing.assert_close(torch.from_numpy(result), *made.exact())


@needs_compiler
@pytest.mark.parametrize("cols", [2, 3])
def test_rows_of_a_single_vector(cols: int) -> None:
    """Where a thread's column is known, no variable has it."""
    made = region(lambda x: (x - x.mean(-1, keepdim=True)).square().sum(1), torch.randn(3, 19, cols), cuda=True)
    program = made.passed(replace(pass_options(SMALL), row_pieces=lambda program, kernel: 2))
    for aligned in (True, False):
        source, shift = render(program, SMALL, aligned=aligned), int(not aligned)
        (result,) = emulate(program, source, made.memory(program), shift=shift).values()
        torch.testing.assert_close(torch.from_numpy(result).view(3, cols), *made.exact())


def _lies_on(model: Model, *shapes: tuple[int, ...]) -> Program:
    made = region(model, *(torch.empty(shape, device="meta") for shape in shapes), cuda=True)
    return generate(made.program, made.builder, H200).program


def test_everything_is_read_once() -> None:
    program = _lies_on(tokens, (256, 197, 768), (768,), (768,))
    least = sum(program.buffer(name).nbytes for name in (*program.inputs, *program.outputs))
    assert sum(sum(traffic(program, kernel)) for kernel in program.kernels) < 1.1 * least
    first = schedule(program.kernels[0], program, H200)
    assert isinstance(first, Rows)
    assert first.pieces is not None
    assert first.pieces.rows * first.pieces.count >= 197 == first.pieces.over


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda x: F.layer_norm(x, x.shape[-1:]).mean(0), (6, 1 << 20)),  # few rows
        (lambda x: F.layer_norm(x, x.shape[-1:]).mean(0), (4096, 1 << 16)),  # rows that no block holds in registers
        (
            lambda x: F.layer_norm(x, x.shape[-1:]).view(-1, 4, 256).mean(1),
            (1 << 16, 256),
        ),  # as many results as a quarter
        (
            lambda x: F.layer_norm(x.movedim(1, -1), x.shape[1:2]).mean((1, 2)),
            (64, 64, 64, 64),
        ),  # rows that lie side by side
    ],
)
def test_where_it_does_not_pay_rows_are_read_again(model: Model, shape: tuple[int, ...]) -> None:
    assert not _over_rows(_lies_on(model, shape))
