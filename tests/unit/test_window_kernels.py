"""Windows that are reduced have a kernel of their own, which reduces over their positions; one that stores them serves those that reduce them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate, pass_options
from fusepass.codegen.ir.expr import Window
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.passes.pipeline import PassOptions
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import NO_SPLIT, Region, region, tensor_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=1, l2_bytes=4096)
H200 = DeviceFacts.h200()

Model = Callable[..., Tensor | tuple[Tensor, ...]]


def average(x: Tensor, size: int = 3) -> Tensor:
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[x.dim() - 3]
    return pool(x, size, 1, size // 2, count_include_pad=False)


def maximum(x: Tensor, size: int = 3) -> Tensor:
    return (F.max_pool1d, F.max_pool2d)[x.dim() - 3](x, size, 1, size // 2)


def mean(x: Tensor) -> Tensor:
    return F.gelu(maximum(x)).mean((2, 3))


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.silu(average(x))
    return y, y.mean((2, 3))


def batch(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.batch_norm(maximum(x, 5), None, None, scale, shift, training=True).relu()


def groups(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.gelu(F.group_norm(average(x), 2, scale, shift))


def row(x: Tensor, scale: Tensor) -> Tensor:
    return F.instance_norm(average(x, 7)) * scale[:, None]


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    y = maximum(x)
    return y.amax((2, 3)), y.amin((2, 3))


def mixer(x: Tensor, scale: Tensor, shift: Tensor, layer: Tensor) -> tuple[Tensor, Tensor]:
    """What stands between two layers of a network that mixes positions by pooling (Yu et al., 2022)."""
    y = F.group_norm(x, 1, scale, shift)
    x = x + layer[:, None, None] * (average(y) - y)
    return x, F.group_norm(x, 1, scale, shift)


CASES: dict[str, tuple[Model, tuple[int, ...], int, torch.dtype]] = {
    "mean": (mean, (2, 3, 24, 32), 0, torch.float32),
    "mean of halves": (mean, (2, 3, 17, 23), 0, torch.float16),
    "stored and averaged": (both, (2, 6, 15, 13), 0, torch.float32),
    "stored and averaged halves": (both, (3, 4, 14, 14), 0, torch.bfloat16),
    "batch": (batch, (3, 2, 19, 40), 2, torch.float32),
    "batch of small images": (batch, (5, 6, 7, 7), 2, torch.float32),
    "groups": (groups, (2, 4, 33, 28), 2, torch.float32),
    "groups of halves": (groups, (2, 4, 20, 21), 2, torch.float16),
    "one axis": (row, (2, 3, 201), 1, torch.float32),
    "two reductions": (extremes, (2, 5, 18, 30), 0, torch.float32),
    "mixer": (mixer, (2, 4, 20, 28), 3, torch.float32),
    "mixer of halves": (mixer, (2, 4, 9, 14), 3, torch.float16),
}


def _seconds(program: Program, kernel: Kernel) -> float:
    """Windows where rows are reduced cost most, then what is read of a buffer as large as an input."""
    large = max(program.buffer(name).numel for name in program.inputs)
    read = sum(program.buffer(name).numel == large for name in kernel.reads)
    return 9.0 * _reduces_windows(kernel) + read * (2 if kernel.reduction_loops else 1)


def _reduces_windows(kernel: Kernel) -> bool:
    return bool(kernel.reduction_loops) and any(isinstance(node, Window) for node in kernel.nodes)


def _options() -> PassOptions:
    """For a device on which rows stay nowhere."""
    return replace(pass_options(SMALL), seconds=_seconds, longest_cached_row=1)


def _made(name: str, options: PassOptions | None = None) -> tuple[Region, Program]:
    function, size, vectors, dtype = CASES[name]
    made = region(function, *(torch.randn(each).to(dtype) for each in (size, *[size[1]] * vectors)), cuda=True)
    return made, made.passed(options or _options())


@needs_compiler
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(7)
def test_values(name: str, aligned: bool) -> None:
    made, program = _made(name)
    assert not any(map(_reduces_windows, program.kernels))
    assert any(kernel.partials is not None for kernel in program.kernels) is (name != "one axis")  # whose rows stay
    assert not any(kernel.is_pointwise and not kernel.stores and kernel.partials is None for kernel in program.kernels)
    results = emulate(program, render(program, SMALL, aligned=aligned), made.memory(program))
    bound = 1e-5 if CASES[name][3] is torch.float32 else 1e-2
    for output, wanted in zip(program.outputs, made.eager(), strict=True):
        torch.testing.assert_close(tensor_of(results[output], program.buffer(output)), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", CASES)
def test_without_patches_windows_are_computed_where_they_are_reduced(name: str) -> None:
    made, program = _made(name, NO_SPLIT)
    assert all(kernel.partials is None for kernel in program.kernels)
    assert sum(any(isinstance(node, Window) for node in kernel.nodes) for kernel in program.kernels) == 1
    made.check(program, exact=False, tolerance=2e-2 if CASES[name][3] is not torch.float32 else 1e-5)


@needs_compiler
@pytest.mark.parametrize("name", ["mean", "batch", "mixer"])
def test_what_is_not_finite_is_so_in_eager(name: str) -> None:
    made, program = _made(name)
    memory = made.memory(program)
    memory[program.inputs[0]][[111, 900]] = np.nan, np.inf
    found = emulate(program, render(program, SMALL), memory)
    wanted = interpret(program, memory)
    for output in program.outputs:
        there, here = (tensor_of(each[output], program.buffer(output)) for each in (wanted, found))
        assert torch.equal(here.isnan(), there.isnan())
        assert torch.equal(here.isinf(), there.isinf())
        assert here.isnan().any()


def _large(function: Model, size: tuple[int, ...], vectors: int = 0, dtype: torch.dtype = torch.float32) -> Program:
    sizes = (size, *[size[1:2]] * vectors)
    made = region(function, *(torch.empty(each, dtype=dtype, device="meta") for each in sizes), cuda=True)
    return made.passed(pass_options(H200))


def test_windows_that_are_only_averaged_are_not_stored() -> None:
    first, merge = _large(mean, (32, 96, 112, 112)).kernels
    assert not first.stores
    assert not merge.is_pointwise


def test_floats_that_stay_on_the_chip_are_read_once() -> None:
    (kernel,) = _large(groups, (256, 16, 56, 56), 2).kernels
    assert _reduces_windows(kernel)


def test_halves_are_computed_again() -> None:
    first, _, second = _large(batch, (32, 96, 112, 112), 2, torch.float16).kernels
    assert not first.stores
    assert any(isinstance(node, Window) for node in second.nodes)


def test_a_mixer_moves_each_tensor_as_rarely_as_can_be() -> None:
    """Its input for two statistics and for windows, their sum to memory and back, and the result."""
    program = _large(mixer, (32, 64, 56, 56), 3)
    large = program.buffer(program.inputs[0]).numel
    assert not any(each.role is Role.TEMP and each.numel == large for each in program.buffers)
    moved = sum(
        program.buffer(name).numel == large for kernel in program.kernels for name in [*kernel.reads, *kernel.writes]
    )
    assert moved == 5


def test_windows_over_three_axes_stay() -> None:
    program = _large(lambda x: average(x).mean((2, 3, 4)), (2, 16, 16, 28, 28))
    assert all(kernel.partials is None for kernel in program.kernels)


def beside(
    pool: Callable[[Tensor], Tensor], reduce: Callable[[Tensor], Tensor], narrow: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What `reduce` makes of what was pooled, beside what `narrow` makes of it."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        pooled = pool(x)
        return reduce(pooled), narrow(pooled)

    return model


HALF_BESIDE = {
    "sum": beside(average, lambda v: v.sum(-2), Tensor.bfloat16),
    "mean": beside(lambda x: maximum(x) * 1.1, lambda v: v.mean(-1), Tensor.half),
    "product": beside(lambda x: average(x) + 1, lambda v: v.prod(-1), Tensor.half),
    "variance": beside(average, lambda v: v.var(-1), Tensor.bfloat16),
}


@pytest.mark.parametrize("name", HALF_BESIDE)
@pytest.mark.invariant(36)
def test_what_is_stored_as_a_half_is_not_read_for_float32(name: str) -> None:
    made = region(HALF_BESIDE[name], torch.randn(2, 3, 8, 16).half().float())
    for program in (made.program, made.passed()):
        made.check(program)  # of float32, to 2e-6


@pytest.mark.parametrize(
    "model", [beside(average, lambda v: v.sum(-2), lambda v: v), beside(lambda x: average(x).half(), lambda v: v.float().sum(-2), lambda v: v)]
)  # fmt: skip
def test_a_float32_result_reads_what_holds_its_value(model: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """As it is, or as the half that the model itself makes of it."""
    made = region(model, torch.randn(2, 3, 8, 16))
    program = made.passed()
    assert not any(
        isinstance(node, Window) for kernel in program.kernels if kernel.reduction_loops for node in kernel.nodes
    )
    made.check(program, exact=False)


@pytest.mark.invariant(36)
def test_a_half_that_the_store_rounds_is_read_for_halves_alone() -> None:
    """The product that is made of it in float32 is an equal expression, and another number in eager."""
    x = torch.randn(2, 3, 8, 16).half()
    for reduce, computed in ((lambda v: (v * 1.5).sum(-2), False), (lambda v: (v.float() * 1.5).sum(-2), True)):
        program = region(beside(average, reduce, lambda v: v * 1.5), x).passed()
        reading = [node for kernel in program.kernels if kernel.reduction_loops for node in kernel.nodes]
        assert any(isinstance(node, Window) for node in reading) is computed


def test_a_window_of_a_single_number() -> None:
    """It stands in no row."""
    made = region(lambda x: F.avg_pool1d(x, 2, 2, 1, ceil_mode=True).flatten()[-1].softmax(0), torch.rand(1, 1, 1))
    generated = generate(made.program, made.builder, H200)
    (kernel,) = generated.program.kernels
    assert not kernel.rows
    assert any(isinstance(node, Window) for node in kernel.nodes)
    assert kernel.name in generated.source.text
