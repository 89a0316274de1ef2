"""Functions with windows as programs for a small device, whose kernels are run on the host and held against PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.program import Program
from fusepass.codegen.schedule import ranking
from fusepass.codegen.schedule.plan import Schedule
from tests.support.interpret import Array
from tests.support.regions import Region, region, tensor_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=1, l2_bytes=4096)
"""A device that few blocks fill."""

Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[tuple[int, ...], ...], torch.dtype]
"""A function, and the shapes and the type of its inputs."""


def prepared(case: Case, memory_format: torch.memory_format = torch.contiguous_format) -> tuple[Region, Program]:
    """A case as a region and as a program for `SMALL`. The first input lies in `memory_format`, and has numbers that are not finite, and -0."""
    function, shapes, dtype = case
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    inputs[0] = inputs[0].contiguous(memory_format=memory_format)
    first = inputs[0].as_strided((inputs[0].numel(),), (1,))
    first[torch.randperm(first.numel())[:4]] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0]).to(dtype)
    found = region(function, *inputs, cuda=True)
    return found, found.passed(pass_options(SMALL))


def ways(program: Program) -> list[Schedule]:
    """The schedules that are timed of the last kernel, what the rules choose first."""
    return [each.plan for each in ranking(program.kernels[-1], program, SMALL)]


def assert_as_eager(found: Region, program: Program, results: Mapping[str, Array]) -> None:
    """Every output in `results` is what PyTorch's operators give, NaN where that is NaN."""
    for output, wanted in zip(program.outputs, found.eager(), strict=True):
        torch.testing.assert_close(tensor_of(results[output], program.buffer(output)), wanted, equal_nan=True)
