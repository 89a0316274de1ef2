"""Matrix products as kernels: what the kernels compute (every thread run on the host), how they are laid out, and when they are chosen."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from fusepass.codegen.build import check_compiles
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import generate_anchors
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule_product import preferred, product_length, schedule_product, serves
from fusepass.errors import IRError
from fusepass.numerics import compare
from tests.support.emulate import emulate
from tests.support.interpret import decode, interpret
from tests.support.numpy_ops import Array
from tests.support.products import BF16, CASES, F16, H200, ONE, Case, generated, program_of
from tests.unit.test_render_cuda import inputs_of

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

TOLERANCE = {DType.F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}


def tolerance_of(case: Case) -> float:
    return 2e-3 if case.tf32 else TOLERANCE[case.dtype]


def run(program: Program, facts: DeviceFacts, inputs: dict[str, Array], *, aligned: bool = True) -> dict[str, Array]:
    return emulate(program, render(program, facts, aligned=aligned), inputs, shift=0 if aligned else 1)


def assert_close(case: Case, program: Program, got: dict[str, Array], wanted: dict[str, Array]) -> None:
    (name,) = program.outputs
    found, right = (decode(memory[name], case.dtype).astype(np.float64) for memory in (got, wanted))
    tolerance = tolerance_of(case)
    np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance * np.abs(right).max())


@needs_compiler
@pytest.mark.parametrize("facts", [pytest.param(ONE, id="large tiles"), pytest.param(H200, id="small tiles")])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, facts: DeviceFacts) -> None:
    case = CASES[name]
    program = generated(case)
    verify(program)
    assert not program.calls
    inputs = inputs_of(program)
    assert_close(case, program, run(program, facts, inputs), interpret(program, inputs))


@needs_compiler
@pytest.mark.parametrize("name", ["linear", "plain", "both turned", "half", "half, turned", "bfloat16"])
def test_values_where_nothing_is_aligned(name: str) -> None:
    case = CASES[name]
    program = generated(case)
    inputs = inputs_of(program)
    assert_close(case, program, run(program, ONE, inputs, aligned=False), interpret(program, inputs))
