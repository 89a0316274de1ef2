"""Operands of products that are copied first: what the kernels compute, and when a copy is made."""

from __future__ import annotations

import numpy as np
import pytest

from fusepass.codegen.generate import generate
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.products import BF16, COPIED, F16, H200, ONE, Case, assert_close, generated, program_of
from tests.unit.test_render_cuda import inputs_of


def product_of(program: Program) -> tuple[Kernel, Product]:
    ((kernel, product),) = [(k, k.anchor) for k in program.kernels if isinstance(k.anchor, Product)]
    return kernel, product


def copies_of(program: Program) -> list[str]:
    _, product = product_of(program)
    temps = {buffer.name for buffer in program.buffers if buffer.role is Role.TEMP}
    return [side for side in ("left", "right") if getattr(product, side).buffer in temps]


@needs_compiler
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("name", COPIED)
@pytest.mark.thinned(3)
def test_values(name: str, aligned: bool) -> None:
    case = COPIED[name]
    program = generated(case, copied=True)
    verify(program)
    assert copies_of(program)
    inputs = inputs_of(program)
    found = emulate(program, render(program, ONE, aligned=aligned), inputs, shift=0 if aligned else 1)
    assert_close(case, program, found, interpret(program, inputs))


@needs_compiler
def test_what_is_not_finite_is_where_it_was() -> None:
    case = COPIED["odd"]
    program = generated(case, copied=True)
    inputs = inputs_of(program)
    inputs["a"].reshape(-1)[[7, 200]] = np.inf, np.nan
    inputs["w"].reshape(-1)[90] = -np.inf
    found, wanted = emulate(program, render(program, ONE), inputs), interpret(program, inputs)
    assert np.isnan(wanted["y"]).any()
    assert np.array_equal(np.isnan(found["y"]), np.isnan(wanted["y"]))
    assert np.array_equal(np.isinf(found["y"]), np.isinf(wanted["y"]))


def test_rows_of_a_copy_begin_with_whole_accesses() -> None:
    program = generated(COPIED["odd halves"], copied=True)
    _, product = product_of(program)
    assert product.left.row == product.right.row == 72
    assert {program.buffer(each.buffer).shape for each in (product.left, product.right)} == {(1, 130, 72), (1, 72, 72)}


def test_an_operand_that_a_batch_shares_is_copied_once() -> None:
    program = generated(COPIED["one operand for all of a batch"], copied=True)
    _, product = product_of(program)
    assert program.buffer(product.right.buffer).shape == (1, 36, 40)
    assert product.right.batch == 0


CHOSEN = {
    "whole accesses": (Case(8192, 4096, 4096, dtype=BF16), []),
    "odd": (Case(8192, 4096, 4097, dtype=BF16), ["left", "right"]),
    "a large left one of pairs": (Case(42093, 505, 2854, dtype=BF16), ["right"]),
    "odd floats": (Case(8192, 1024, 3011), ["left", "right"]),
    "floats apart": (Case(4096, 4096, 4096, left_down=True, right_across=True), ["right"]),
    "halves apart": (Case(4096, 4096, 4096, left_down=True, right_across=True, dtype=F16), []),
    "odd halves apart": (Case(4096, 4095, 4096, left_down=True, right_across=True, dtype=F16), ["right"]),
    "few terms": (Case(1 << 19, 256, 3), []),  # memory is what it waits for
}


@pytest.mark.parametrize("name", CHOSEN)
def test_copies_are_made_where_they_save_time(name: str) -> None:
    case, sides = CHOSEN[name]
    made = generate(program_of(case), Builder(), H200, AnchorSource.GENERATED).program
    assert copies_of(made) == sides


def test_the_preferred_product_is_that_of_copies() -> None:
    """Without them, the estimate is not clearly below the library's."""
    case = Case(8192, 1024, 3011)
    preferred = generate(program_of(case), Builder(), H200, AnchorSource.PREFERRED).program
    assert copies_of(preferred) == ["left", "right"]
