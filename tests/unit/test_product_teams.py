"""Products of halves by teams of warps in blocks that stay (`fp_matmul_teams.cuh`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.product import Nested, Product
from fusepass.codegen.ir.program import Program
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import render
from fusepass.codegen.render.cuda.families import PRODUCT
from fusepass.codegen.schedule_product import schedule_product
from fusepass.codegen.schedule_product.tiles import TILINGS, Access, Tiling
from fusepass.codegen.source import Source
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.machine_code import told_by_ptxas
from tests.support.products import BF16, F16, H200, Case, assert_close, generated, tiling_id
from tests.support.regions import region, tensor_of
from tests.support.thinned import thinned
from tests.unit.test_render_cuda import inputs_of

TEAMS = [tiling for tiling in TILINGS if tiling.teams]
FEW = replace(H200, multiprocessors=4)  # so that a team has several tiles

CASES = {
    "halves": Case(200, 520, 200, dtype=F16),  # an odd number of tiles of rows, and beyond the ends of both
    "neighbours across": Case(136, 264, 136, dtype=BF16, left_down=True, right_across=True),
    "a batch, in pieces": Case(200, 136, 320, batch=3, dtype=BF16, length=128),
    "a batch with one right operand": Case(136, 136, 72, batch=2, dtype=F16, shared_right=True),
    "spare elements": Case(136, 136, 24, dtype=BF16, spare=8, right_across=True),
    "below the diagonal": Case(300, 300, 64, dtype=BF16, lower=True),
}


@pytest.fixture(autouse=True)
def of_few_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule_product._LEAST_OF_TEAMS", 0)


def with_tiling(monkeypatch: pytest.MonkeyPatch, *tilings: Tiling) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", tilings)


def rendered(program: Program, tiling: Tiling) -> Source:
    source = render(program, FEW)
    assert f", {tiling.stages}, {tiling.strip}>;" in source.text
    return source


@needs_compiler
@pytest.mark.parametrize(("tiling", "name"), thinned([(tiling, name) for name in CASES for tiling in TEAMS], 7))
def test_values(tiling: Tiling, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tiling(monkeypatch, tiling)
    case = CASES[name]
    program = generated(case)
    inputs = inputs_of(program)
    assert_close(case, program, emulate(program, rendered(program, tiling), inputs), interpret(program, inputs))


def _alike(model: Callable[..., torch.Tensor], tiling: Tiling, *inputs: torch.Tensor) -> Source:
    """The source of `model`, laid out by `tiling`, whose values are those of float64."""
    made = region(model, *inputs)
    program = made.passed(pass_options(FEW, AnchorSource.GENERATED))
    source = rendered(program, tiling)
    found = emulate(program, source, made.memory(program))
    for name, want in zip(program.outputs, made.exact(), strict=True):
        torch.testing.assert_close(tensor_of(found[name], program.buffer(name)), want, rtol=4e-3, atol=4e-3)
    return source


def _operands(rows: int, columns: int, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, w = (torch.randn(count, terms, generator=generator) / terms**0.25 for count in (rows, columns))
    return x.half(), w.half()


@needs_compiler
def test_results_of_float32_are_stored_from_where_the_sums_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with_tiling(monkeypatch, TEAMS[1])
    source = _alike(lambda x, w: (x @ w.t()).float() * 0.5, TEAMS[1], *_operands(200, 264, 72))
    assert ".room()" not in source.text


@needs_compiler
def test_rows_are_reduced_strip_by_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    tiling = next(each for each in TEAMS if (each.rows, each.columns) == (128, 128))
    with_tiling(monkeypatch, tiling)
    source = _alike(lambda x, w: torch.relu(x @ w.t()).float().var(1), tiling, *_operands(300, 264, 136))
    assert "fp::add_row" in source.text or "fp::push_strip" in source.text


@pytest.mark.parametrize(
    ("case", "served"),
    [
        (Case(256, 256, 136, dtype=BF16), True),
        (Case(256, 256, 132, dtype=BF16), False),  # rows begin at multiples of 8 bytes
        (Case(256, 256, 136), False),  # float32
    ],
)
def test_what_the_copy_engine_brings(case: Case, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tiling(monkeypatch, *TEAMS)
    program = generated(case)
    (kernel,) = program.kernels
    assert (schedule_product(kernel, program, H200) is not None) is served
    assert schedule_product(kernel, program, H200, aligned=False) is None


def test_short_sums_are_left_to_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with_tiling(monkeypatch, *TEAMS)
    for terms, served in ((504, False), (512, True)):
        program = generated(Case(1024, 1024, terms, dtype=BF16))
        assert (schedule_product(program.kernels[0], program, H200) is not None) is served


def test_the_copy_engine_takes_no_dimensions_of_several() -> None:
    anchor = generated(Case(256, 256, 136, dtype=BF16)).kernels[0].anchor
    assert isinstance(anchor, Product)
    access = Access(inner_first=True, vector=8)
    assert TEAMS[0].serves(anchor, access, access)
    nested = replace(anchor, left=replace(anchor.left, row=Nested((16, 16), (4096, 136))))
    assert not TEAMS[0].serves(nested, access, access)


def test_a_box_of_each_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    with_tiling(monkeypatch, *TEAMS)
    program = generated(Case(512, 512, 136, batch=3, dtype=BF16, right_across=True, shared_right=True))
    (kernel,) = program.kernels
    plan = schedule_product(kernel, program, H200)
    assert plan is not None
    left, right = PRODUCT.boxes(kernel, plan)
    assert (left.sizes, left.strides, left.box) == ((136, 512, 3), (136, 512 * 136), (64, plan.tiling.rows))
    assert (right.sizes, right.box) == ((512, 136, 1), (64, 64))
    assert right.strides[0] == 512


@pytest.mark.parametrize("tiling", TEAMS, ids=tiling_id)
@pytest.mark.thinned(4)
def test_ptxas_neither_spills_nor_parts_products(
    tiling: Tiling, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_tiling(monkeypatch, tiling)
    program = generated(Case(1024, 1024, 1024, dtype=BF16))
    told = told_by_ptxas(rendered(program, tiling), tmp_path)
    assert "C75" not in told, told
    assert {int(number) for number in re.findall(r"(\d+) bytes spill stores", told)} == {0}, told
