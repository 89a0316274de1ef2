"""What reduces over the positions of depthwise convolutions is reduced in their kernel; what then reads results alone computes them again."""

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
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import render
from fusepass.codegen.schedule import schedule
from fusepass.errors import ScheduleError
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import Region, computing_again, region, tensor_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=1, l2_bytes=4096)
H200 = DeviceFacts.h200()

Model = Callable[..., Tensor | tuple[Tensor, ...]]


def depthwise(x: Tensor, w: Tensor, b: Tensor | None = None, **how: int) -> Tensor:
    convolution = (F.conv1d, F.conv2d)[x.dim() - 3]
    return convolution(x, w, b, padding=w.shape[-1] // 2, groups=x.shape[1], **how)


def batch(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.batch_norm(depthwise(x, w), None, None, scale, shift, training=True).relu()


def groups(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.gelu(F.group_norm(depthwise(x, w, shift), 2, scale, shift))


def mean(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(depthwise(x, w)).mean((2, 3))


def gate(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.silu(depthwise(x, w, b))
    return y, y.mean((2, 3))


def narrow(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Results of which a thread would have several rows, and tiles be exchanged, if nothing were reduced."""
    y = F.silu(F.conv2d(x, w, b, padding=(3, 2), groups=x.shape[1]))
    return y, y.mean((2, 3))


def several(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = depthwise(x, w)
    return y.sum((2, 3)), y.amax((2, 3))


def dilated(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.conv2d(x, w, dilation=2, groups=x.shape[1])
    return y.sum((2, 3)), y.amax((2, 3))


def row(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.instance_norm(depthwise(x, w)) * scale[:, None]


def shapes(x: tuple[int, ...], window: tuple[int, ...], vectors: int = 0) -> tuple[tuple[int, ...], ...]:
    return (x, (x[1], 1, *window), *[(x[1],)] * vectors)


CASES: dict[str, tuple[Model, tuple[tuple[int, ...], ...], torch.dtype]] = {
    "whole patches": (batch, shapes((2, 3, 24, 32), (3, 3), 2), torch.float32),
    "patches that overlap": (groups, shapes((2, 4, 131, 61), (3, 3), 2), torch.float32),
    "patches side by side": (batch, shapes((1, 2, 19, 300), (3, 3), 2), torch.float32),
    "side by side that overlap": (mean, shapes((2, 3, 17, 262), (5, 5)), torch.float32),
    "several images": (mean, shapes((3, 8, 7, 7), (3, 3)), torch.float32),
    "halves": (gate, shapes((2, 6, 14, 14), (5, 5), 1), torch.float16),
    "odd rows of halves": (gate, shapes((2, 6, 15, 13), (3, 3), 1), torch.bfloat16),
    "results leave together": (gate, shapes((2, 6, 15, 13), (3, 3), 1), torch.float32),
    "narrow images": (narrow, shapes((1, 6, 8, 1), (3, 3), 1), torch.float32),
    "two reductions": (several, shapes((2, 5, 33, 28), (7, 7)), torch.float32),
    "a last vector that is there in part": (dilated, shapes((1, 4, 19, 11), (3, 2)), torch.float16),
    "one axis": (row, shapes((2, 3, 201), (9,), 1), torch.float32),
}


def _made(name: str, *, twice: bool = False) -> tuple[Region, Program]:
    """A case for a device on which rows stay nowhere, so that what reads results again reads them from memory, or computes them."""
    function, sizes, dtype = CASES[name]
    made = region(function, *(torch.randn(size).to(dtype) for size in sizes))
    options = pass_options(SMALL, AnchorSource.GENERATED)
    options = computing_again(options, lambda program, first, second: twice)
    return made, made.passed(replace(options, longest_cached_row=1))


AGAIN = batch, groups, row
"""What reads results once more behind their statistics."""


def _reducing(program: Program) -> list[Kernel]:
    return [kernel for kernel in program.kernels if kernel.partials is not None]


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("aligned", "twice"), [(True, False), (True, True), (False, True)])
@pytest.mark.thinned(6)
def test_values(name: str, aligned: bool, twice: bool) -> None:
    made, program = _made(name, twice=twice)
    (kernel,) = _reducing(program)
    assert not program.calls
    assert bool(kernel.stores) is (CASES[name][0] in (gate, narrow) or (CASES[name][0] in AGAIN and not twice))
    dtype = CASES[name][2]
    results = emulate(program, render(program, SMALL, aligned=aligned), made.memory(program))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for output, wanted in zip(program.outputs, made.eager(), strict=True):
        torch.testing.assert_close(tensor_of(results[output], program.buffer(output)), wanted, **tolerance)


@needs_compiler
@pytest.mark.parametrize("twice", [True, False])
def test_what_is_not_finite_is_so_in_eager(twice: bool) -> None:
    made, program = _made("patches that overlap", twice=twice)
    memory = made.memory(program)
    memory[program.inputs[0]][[1111, 9000]] = np.nan, np.inf
    (output,) = program.outputs
    found = tensor_of(emulate(program, render(program, SMALL), memory)[output], program.buffer(output))
    interpreted = tensor_of(interpret(program, memory)[output], program.buffer(output))
    assert torch.equal(found.isnan(), interpreted.isnan())
    assert found.isnan().any()
    assert not found.isnan().all()


@needs_compiler
@pytest.mark.parametrize("value", [3.0e-3, 1234.567])
def test_equal_numbers_are_their_mean(value: float) -> None:
    """A normalisation magnifies what is off: by 300 times, where there is no variance."""
    made, program = _made("whole patches")
    memory = made.memory(program)
    x, weight, _, shift = program.inputs
    memory[x][:], memory[weight][:] = value, 0
    memory[weight][4::9] = 1  # in the middle of each window
    (output,) = program.outputs
    found = tensor_of(emulate(program, render(program, SMALL), memory)[output], program.buffer(output))
    wanted = tensor_of(memory[shift], program.buffer(shift)).relu()
    assert torch.equal(found, wanted.view(-1, 1, 1).expand_as(found))


@needs_compiler
def test_places_that_need_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule._MAX_INT", 0)
    made, program = _made("patches that overlap", twice=True)
    source = render(program, SMALL)
    assert "const int64_t first_row" in source.text
    results = emulate(program, source, made.memory(program))
    output = program.outputs[0]
    torch.testing.assert_close(
        tensor_of(results[output], program.buffer(output)), made.eager()[0], rtol=1e-5, atol=1e-5
    )


def _large(function: Model, size: tuple[int, ...], window: int, vectors: int, dtype: torch.dtype) -> Program:
    sizes = shapes(size, (window, window), vectors)
    made = region(function, *(torch.empty(each, dtype=dtype, device="meta") for each in sizes))
    return made.passed(pass_options(H200, AnchorSource.GENERATED))


def test_large_results_are_computed_again_and_small_ones_stay_on_the_chip() -> None:
    large = _large(batch, (32, 96, 112, 112), 3, 2, torch.float32)
    first, _, second = large.kernels
    assert not first.stores
    assert second.writes == set(large.outputs)
    small = _large(batch, (64, 384, 14, 14), 3, 2, torch.float32)
    assert not _reducing(small)
    assert len(small.kernels) == 2


def test_windows_of_many_points_are_computed_once() -> None:
    program = _large(batch, (32, 96, 56, 56), 13, 2, torch.float16)
    assert all(kernel.stores for kernel in _reducing(program))


def test_a_gate_stores_its_value_and_its_means() -> None:
    program = _large(gate, (32, 144, 56, 56), 3, 1, torch.float32)
    first, merge = program.kernels
    assert (len(first.stores), first.partials is not None) == (1, True)
    assert merge.col_count == 1
    source = render(program, H200).text
    assert "reduced over positions in 1 pieces" in source


def test_rows_of_other_sizes_of_a_sample_are_refused() -> None:
    """What is made for so many pieces cannot be laid out in others."""
    program = _large(gate, (32, 144, 56, 56), 3, 1, torch.float32)
    first = program.kernels[0]
    assert first.partials is not None
    other = replace(first, partials=replace(first.partials, pieces=Axis("piece", 999)))
    with pytest.raises(ScheduleError, match="made for 999 pieces"):
        schedule(other, program, H200)
