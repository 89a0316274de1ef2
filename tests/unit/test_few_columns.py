"""Products of few columns as sums along rows: what the kernels compute on a GPU (every thread run on the host), and which products are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fusepass.capture.trace import Captured, capture
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.search.space import search_space
from tests.support.emulate import emulate, needs_compiler
from tests.support.emulated import check_emulated
from tests.support.regions import Region, region

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)

torch.manual_seed(0)


def linear(terms: int, columns: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(terms, columns, dtype=dtype).requires_grad_(False)


def two_results(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    return y.tanh() + 1, y * y


CASES: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...], torch.dtype]] = {
    "ten, four rows at once": (nn.Sequential(linear(40, 10), nn.ReLU()), ((8, 40),), torch.float32),
    "sixteen, two rows at once": (nn.Sequential(linear(64, 16), nn.Sigmoid()), ((6, 64),), torch.float32),
    "odd rows that begin anywhere": (nn.Sequential(linear(33, 3), nn.ReLU()), ((7, 33),), torch.float32),
    "one": (nn.Sequential(linear(100, 1), nn.Sigmoid()), ((8, 100),), torch.float32),
    "of halves, with a bias": (nn.Sequential(linear(48, 9, torch.float16), nn.ReLU()), ((12, 48),), torch.float16),
    "columns beside each other, two results": (two_results, ((8, 48), (48, 5)), torch.float32),
    "and another tensor": (lambda x, w, y: (x @ w + y).relu(), ((8, 48), (48, 3), (8, 3)), torch.float32),
    "read by a softmax": (nn.Sequential(linear(40, 6), nn.Softmax(-1)), ((12, 40),), torch.float32),
    "long rows": (nn.Sequential(linear(3000, 4), nn.ReLU()), ((16, 3000),), torch.float32),
}


def made_of(name: str) -> tuple[Region, Program]:
    model, shapes, dtype = CASES[name]
    given = region(model, *(torch.randn(shape).to(dtype) for shape in shapes), cuda=True)
    program = generate(given.program, given.builder, H200, AnchorSource.ARITHMETIC).program
    verify(program)
    return given, program


@needs_compiler
@pytest.mark.parametrize("facts", [SMALL, H200], ids=["small", "h200"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(3)
def test_values(name: str, facts: DeviceFacts) -> None:
    given, program = made_of(name)
    assert not program.calls
    assert {reduction.op for reduction in program.kernels[0].reductions} == {ReduceOp.SUM}
    bound = 2e-3 if CASES[name][2] is torch.float16 else 1e-5
    check_emulated(given, program, facts, bound)


@needs_compiler
def test_inputs_may_start_anywhere() -> None:
    given, program = made_of("ten, four rows at once")
    memory = given.memory(program)
    aligned, anywhere = (
        emulate(program, render(program, SMALL, aligned=not shift), memory, shift=shift) for shift in (0, 1)
    )
    for name in program.outputs:
        torch.testing.assert_close(*(torch.from_numpy(found[name]) for found in (aligned, anywhere)))


def test_rows_are_taken_together() -> None:
    counts = {name: made_of(name)[1].kernels[0].row_count for name in CASES}
    assert counts["ten, four rows at once"] == counts["of halves, with a bias"] - 1 == 2
    assert counts["sixteen, two rows at once"] == 3
    assert counts["odd rows that begin anywhere"] == 7


def test_few_threads_have_a_row_of_many_sums() -> None:
    given = region(nn.Sequential(linear(640, 10), nn.ReLU()), torch.randn(4096, 640), cuda=True)
    program = generate(given.program, given.builder, SMALL, AnchorSource.ARITHMETIC).program
    plan = schedule(program.kernels[0], program, SMALL)
    assert (type(plan), plan.lanes, plan.groups, plan.unroll) == (Rows, 16, 16, 1)
    few = schedule(program.kernels[0], program, H200)
    assert few.lanes > 16  # too few rows for the device
    assert "16 lanes x 16 rows" in describe(program, program.kernels[0], SMALL)


OTHERS: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...]]] = {
    "many columns": (nn.Sequential(linear(40, 17), nn.ReLU()), ((8, 40),)),
    "terms apart": (lambda x, w: (x.t() @ w).relu(), ((48, 8), (48, 3))),
    "a batch": (lambda x, y: torch.bmm(x, y).relu(), ((2, 4, 40), (2, 40, 4))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_stay(name: str) -> None:
    model, shapes = OTHERS[name]
    given = region(model, *map(torch.randn, shapes), cuda=True)
    program = generate(given.program, given.builder, H200, AnchorSource.ARITHMETIC).program
    assert program.calls or any(isinstance(kernel.anchor, Product) for kernel in program.kernels)


@pytest.mark.parametrize(
    ("rows", "terms", "columns", "tried"),
    [(4096, 256, 16, True), (4095, 256, 16, False), (4096, 256, 17, False), (1 << 20, 1, 1, True)],
)
def test_who_is_tried(rows: int, terms: int, columns: int, tried: bool) -> None:
    """Of 4 MiB that are read, or more."""
    with torch.no_grad():
        made = capture(nn.Sequential(nn.Linear(terms, columns), nn.ReLU()), (torch.empty(rows, terms),), {})
    assert isinstance(made, Captured)
    offered = search_space(made.graph, H200, "fast")
    assert any(each.anchor is AnchorSource.ARITHMETIC for each in offered) is tried


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x).relu()


def test_a_tensor_may_be_both_operands() -> None:
    with torch.no_grad():
        made = capture(Twice(), (torch.empty(16, 16),), {})
    assert isinstance(made, Captured)
    assert AnchorSource.ARITHMETIC not in {each.anchor for each in search_space(made.graph, H200, "fast")}
