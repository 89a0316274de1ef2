"""Products of convolutions by groups of warps that take turns in blocks that stay (`fp_matmul_turns.cuh`)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import Precision
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render import render
from fusepass.codegen.schedule_product import schedule_product
from fusepass.codegen.schedule_product.tiles import TILINGS, Access, Tiling
from tests.support.convolutions import HALVED, Across, generated_pooling
from tests.support.emulate import emulate, needs_compiler
from tests.support.machine_code import told_by_ptxas
from tests.support.thinned import thinned
from tests.support.values import check_values
from tests.unit.test_halved import CASES, bound, exact, halved, memory, operands
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
FEW = replace(H200, multiprocessors=2)  # so that a group has several tiles


CHAINED = next(tiling for tiling in TILINGS if tiling.chained)


def choose(monkeypatch: pytest.MonkeyPatch, *tilings: Tiling) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", tilings)


@pytest.fixture(autouse=True)
def iterations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, *(tiling for tiling in TILINGS if tiling.iterations and not tiling.chained))


def product_of(program: Program) -> Kernel:
    (kernel,) = [kernel for kernel in program.kernels if isinstance(kernel.anchor, Product)]
    return kernel


@needs_compiler
@pytest.mark.parametrize(
    ("name", "facts"),
    thinned(
        [
            ("transposed, neighbours, by 2", FEW),  # two rows of tiles, phases between each other
            ("1d", FEW),
            ("2d, neighbours, dilated", FEW),
            ("2d, neighbours", H200),
        ],
        4,
    ),
)
def test_values(name: str, facts: DeviceFacts) -> None:
    case = CASES[name]
    program = halved(case)
    source = render(program, facts)
    assert "fp::TurnMultiplier" in source.text
    given = operands(case)
    found = emulate(program, source, memory(case, given))["y"].reshape(case.result)
    assert (np.abs(found - exact(case, given)) <= bound(case, given)).all()


@needs_compiler
@pytest.mark.parametrize("multiprocessors", [1, 2, 3])
@pytest.mark.parametrize(
    ("columns", "depth"),
    [
        (64, 2),  # runs of a row begin in the middle of a segment
        (32, 3),  # a row is a little longer than a tile
    ],
)
@pytest.mark.thinned(5)
def test_chains(columns: int, depth: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles share segments with the tiles before, chains begin anew with each sample, and blocks in the middle of one."""
    choose(monkeypatch, replace(CHAINED, n=columns // 8, stages=6))
    case = replace(CASES["2d, neighbours"], source=(3, 32, 9, 34))
    facts = replace(H200, multiprocessors=multiprocessors)
    program = halved(case)
    plan = schedule_product(product_of(program), program, facts)
    assert plan is not None
    product = product_of(program).anchor
    assert isinstance(product, Product)
    assert product.runs is not None
    assert product.runs.chain(columns).depth == depth
    given = operands(case)
    found = emulate(program, render(program, facts), memory(case, given))["y"].reshape(case.result)
    assert (np.abs(found - exact(case, given)) <= bound(case, given)).all()


def test_chains_are_for_tiles_that_share_segments() -> None:
    """Not for two runs (transposed by 2), and not where one segment has all that a tile reads."""
    left, right = (Access(inner_first=True, vector=8) for _ in range(2))

    def serves(columns: int, *outer: tuple[int, int]) -> bool:
        product = product_of(halved(CASES["2d, neighbours"])).anchor
        assert isinstance(product, Product)
        assert product.runs is not None
        return replace(CHAINED, n=columns // 8).serves(
            replace(product, runs=replace(product.runs, outer=outer)), left, right
        )

    assert serves(32, (3, 36))
    assert not serves(32, (2, 36))
    assert not serves(256, (3, 36))


@needs_compiler
def test_values_that_are_reduced() -> None:
    one = replace(H200, multiprocessors=1)
    case = replace(HALVED["2d, neighbours"], source=(5, 32, 4, 30), precision=Precision.TF32, halves=True)
    program = generated_pooling(case, Across.EACH, one)
    kernel = product_of(program)
    assert kernel.partials is not None
    plan = schedule_product(kernel, program, one)
    assert plan is not None
    assert plan.blocks * plan.tiling.iterations < plan.batches * plan.tiles[1]  # a group goes from one to the next
    check_values(program, one, inputs_of(program), 5e-6)


@pytest.mark.parametrize(
    ("name", "serves"),
    [
        ("2d, neighbours", True),
        ("2d", False),  # columns are no neighbours
    ],
)
def test_what_is_served(name: str, serves: bool) -> None:
    program = halved(CASES[name])
    assert (schedule_product(product_of(program), program, H200) is not None) is serves


def test_rows_stay_on_the_chip() -> None:
    """So there may be as many terms as leave room for a few runs, and as many rows of tiles as there are multiprocessors."""
    program = halved(CASES["transposed, neighbours, by 2"])
    kernel = product_of(program)
    plan = schedule_product(kernel, program, H200)
    assert plan is not None
    assert plan.tiles[0] > 1
    assert plan.blocks % plan.tiles[0] == 0
    assert plan.shared_bytes <= H200.shared_bytes_per_block
    assert schedule_product(kernel, program, replace(H200, multiprocessors=plan.tiles[0] - 1)) is None
    small = replace(H200, shared_bytes_per_block=90_000)
    assert schedule_product(kernel, program, small) is None


def test_sums_stay_in_registers(tmp_path: Path) -> None:
    """Nothing is spilled, and ptxas does not say that products run one by one."""
    told = told_by_ptxas(render(halved(CASES["2d, neighbours"]), H200), tmp_path)
    assert "C75" not in told, told
    assert {*re.findall(r"(\d+) bytes spill stores", told)} == {"0"}, told
