"""A region's CUDA source, run on the host beside PyTorch in float64."""

from __future__ import annotations

import torch

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render
from tests.support.emulate import emulate
from tests.support.regions import Region, tensor_of


def check_emulated(
    made: Region, program: Program, facts: DeviceFacts, bound: float, absolute: float | None = None
) -> None:
    """Assert that all outputs of `program` are within `bound` of the exact ones, relative and, if that is no other bound, absolute."""
    results = emulate(program, render(program, facts), made.memory(program))
    for output, want in zip(program.outputs, made.exact(), strict=True):
        got = tensor_of(results[output], program.buffer(output))
        atol = bound if absolute is None else absolute
        torch.testing.assert_close(got, want, check_dtype=False, rtol=bound, atol=atol)
