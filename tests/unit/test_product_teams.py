"""Products of halves by teams of warps in blocks that stay (`fp_matmul_teams.cuh`), alone and in pairs of blocks."""

from __future__ import annotations

import re
import shutil
import subprocess
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
from fusepass.codegen.render.cuda.contraction.families import PRODUCT
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.schedule_product import schedule_product
from fusepass.codegen.schedule_product.tiles import TILINGS, Access, Tiling
from fusepass.codegen.search.space import search_space
from fusepass.codegen.source import Source
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.native import compile_command
from tests.support.products import BF16, F16, H200, Case, assert_close, generated, tiling_id
from tests.support.regions import region, tensor_of
from tests.support.thinned import thinned
from tests.unit.test_render_cuda import inputs_of

TEAMS = [tiling for tiling in TILINGS if tiling.teams]
FEW = replace(H200, multiprocessors=4)  # so that a team has several tiles
PAIRED = ScheduleOverrides(anchor_rank=1)

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
    overrides = PAIRED if tiling.members > 1 else ScheduleOverrides()
    source = render(program, FEW, overrides=overrides)
    assert f", {tiling.strip}, {tiling.members}>;" in source.text
    return source


@needs_compiler
@pytest.mark.parametrize(("tiling", "name"), thinned([(tiling, name) for name in CASES for tiling in TEAMS], 7))
def test_values(tiling: Tiling, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tiling(monkeypatch, tiling)
    case = CASES[name]
    program = generated(case)
    inputs = inputs_of(program)
    assert_close(case, program, emulate(program, rendered(program, tiling), inputs), interpret(program, inputs))


def _alike(model: Callable[..., torch.Tensor], tilings: tuple[Tiling, ...], *inputs: torch.Tensor) -> Source:
    """The source of `model`, laid out by the last one of `tilings`, whose values are those of float64."""
    made = region(model, *inputs)
    program = made.passed(pass_options(FEW, AnchorSource.GENERATED))
    source = rendered(program, tilings[-1])
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
    source = _alike(lambda x, w: (x @ w.t()).float() * 0.5, (TEAMS[1],), *_operands(200, 264, 72))
    assert ".room()" not in source.text


@needs_compiler
@pytest.mark.parametrize("members", [1, 2])
def test_rows_are_reduced_strip_by_strip(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many pieces as tiles that blocks have alone give, which pairs keep to."""
    tilings = tuple(each for each in TEAMS if (each.rows, each.columns) == (128, 128) and each.members <= members)
    with_tiling(monkeypatch, *tilings)
    source = _alike(lambda x, w: torch.relu(x @ w.t()).float().var(1), tilings, *_operands(300, 264, 136))
    assert "fp::add_row" in source.text or "fp::push_strip" in source.text


def test_pairs_keep_to_the_pieces_that_rows_are_reduced_in(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, paired = (
        next(each for each in TEAMS if (each.members, each.columns) == which) for which in ((1, 128), (2, 256))
    )
    with_tiling(monkeypatch, alone, paired)
    made = region(lambda x, w: (x @ w.t()).float().var(1), *_operands(300, 520, 136))
    program = made.passed(pass_options(FEW, AnchorSource.GENERATED))
    (kernel,) = (each for each in program.kernels if isinstance(each.anchor, Product))
    assert kernel.partials is not None
    assert [each.plan.tiling.members for each in PRODUCT.ranking(kernel, program, FEW)] == [1]


def test_pairs_are_second_and_a_measurement_may_choose_them() -> None:
    program = generated(Case(4096, 4096, 4096, dtype=BF16))
    (kernel,) = program.kernels
    assert [each.plan.tiling.members for each in PRODUCT.ranking(kernel, program, H200)] == [1, 2]
    source = render(program, H200, overrides=PAIRED)
    assert "fp::launch_clusters<mm_relu>(2, 132, 384," in source.text
    assert source.name.endswith("_a1")


@pytest.mark.parametrize(
    ("sizes", "dtype", "tried"),
    [
        ((2048, 2048, 512), torch.bfloat16, True),
        ((512, 512, 512), torch.bfloat16, False),
        ((2048, 2048, 512), torch.float32, False),
    ],
)
def test_large_products_of_halves_are_tried_in_pairs(
    sizes: tuple[int, int, int], dtype: torch.dtype, tried: bool
) -> None:
    rows, columns, terms = sizes
    given = (torch.empty(count, terms, dtype=dtype, device="meta") for count in (rows, columns))
    graph = region(lambda x, w: torch.relu(x @ w.t()), *given).graph
    for effort in ("fast", "max"):
        assert (PAIRED in {spec.overrides for spec in search_space(graph, H200, effort)}) is tried
    assert PAIRED not in {spec.overrides for spec in search_space(graph, H200, "off")}


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


def test_a_box_of_each_operand() -> None:
    """Of the right one a block of a pair brings half."""
    program = generated(Case(512, 512, 136, batch=3, dtype=BF16, right_across=True, shared_right=True))
    (kernel,) = program.kernels
    plan = next(each.plan for each in PRODUCT.ranking(kernel, program, H200) if each.plan.tiling.members == 2)
    left, right = PRODUCT.boxes(kernel, plan)
    assert (left.sizes, left.strides, left.box) == ((136, 512, 3), (136, 512 * 136), (64, plan.tiling.rows))
    assert (right.sizes, right.box) == ((512, 136, 1), (64, 64))
    assert right.strides[0] == 512


@pytest.mark.parametrize("tiling", TEAMS, ids=tiling_id)
@pytest.mark.thinned(4)
def test_ptxas_neither_spills_nor_parts_products(
    tiling: Tiling, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    with_tiling(monkeypatch, tiling)
    program = generated(Case(1024, 1024, 1024, dtype=BF16))
    source, text = rendered(program, tiling), tmp_path / "product.cu"
    text.write_text(source.text)
    command = [*compile_command(source, text, tmp_path / "product.o"), "-Xptxas", "-v"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "C75" not in told, told
    assert {int(number) for number in re.findall(r"(\d+) bytes spill stores", told)} == {0}, told
