"""Scans: running sums and products, with what is before and behind them in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusepass
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.program import Program
from fusepass.codegen.lowering.lower import Unsupported
from fusepass.codegen.render import render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan import Walk
from tests.support.emulate import emulate, needs_compiler
from tests.support.native import run_native
from tests.support.regions import region, tensor_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=2, l2_bytes=1 << 20)
"""Few rows already fill it, so that small kernels get the schedules of large ones."""

F16, BF16, F32, F64, I8, I64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64
Function = Callable[..., Tensor]


def exclusive(x: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(x[:, :1]), x), 1)[:, :-1].cumsum(1)


CASES: dict[str, tuple[Function, tuple[int, ...], torch.dtype]] = {
    "part of a warp": (lambda x: x.cumsum(1), (37, 20), F32),
    "one element": (lambda x: x.cumsum(1), (5, 1), F32),
    "one row": (lambda x: x.cumsum(0), (77,), F32),
    "a block": (lambda x: x.cumsum(1), (9, 1000), F32),
    "pieces": (lambda x: x.cumsum(1), (3, 9000), F32),
    "part of a piece": (lambda x: x.cumsum(1), (3, 4999), F32),
    "rows begin anywhere": (lambda x: x.cumsum(1), (7, 9001), F32),
    "halves, rows begin anywhere": (lambda x: (x * 0.5).cumsum(1), (5, 2055), F16),
    "backwards, rows begin anywhere": (lambda x: x.flip(1).cumsum(1).flip(1), (6, 4999), F32),
    "a product, rows begin anywhere": (lambda x: (x * 0.1 + 1).cumprod(1), (9, 1003), F32),
    "halves": (lambda x: x.cumsum(1), (5, 2056), F16),
    "bfloat16, pieces": (lambda x: (x * 0.5).cumsum(1), (3, 9000), BF16),
    "doubles": (lambda x: x.cumsum(1), (4, 1030), F64),
    "integers": (lambda x: x.cumsum(1), (4, 1030), I8),
    "integers of few digits": (lambda x: x.cumsum(1, dtype=I8), (4, 1030), I8),
    "truth values": (lambda x: (x > 0).cumsum(1), (9, 333), F32),
    "a product": (lambda x: (x * 0.1 + 1).cumprod(1), (9, 1000), F32),
    "before it": (lambda x: (x.relu() * x.sigmoid()).cumsum(1), (9, 1000), F32),
    "behind it": (lambda x: (x.cumsum(1) * 0.25 + x).tanh(), (9, 1000), F32),
    "backwards": (lambda x: x.flip(1).cumsum(1).flip(1), (9, 1000), F32),
    "backwards, pieces": (lambda x: x.flip(1).cumsum(1).flip(1), (3, 9000), F32),
    "backwards, part of a warp": (lambda x: x.flip(1).cumsum(1).flip(1), (37, 20), F32),
    "only read backwards": (lambda x: x.flip(1).cumsum(1), (9, 1000), F32),
    "without its own": (exclusive, (9, 1001), F32),
    "outer": (lambda x: x.cumsum(0), (70, 513), F32),
    "outer, groups": (lambda x: x.cumsum(1), (2, 300, 33), F32),
    "outer, all rows of a thread": (lambda x: x.cumsum(0), (19, 12000), F32),
    "outer, three rows lie together": (lambda x: x.cumsum(1), (8, 701, 3), F32),
    "outer, a product, five rows lie together": (lambda x: (x * 0.1 + 1).cumprod(1), (5, 900, 5), F64),
    "outer, backwards": (lambda x: x.flip(1).cumsum(1).flip(1), (2, 300, 33), F16),
    "middle": (lambda x: x.cumsum(1).relu(), (3, 40, 6, 8), F32),
    "a view": (lambda x: x[1:, 3:].cumsum(1), (8, 205), F32),
    "transposed": (lambda x: x.t().cumsum(0), (64, 200), F32),
}
"""Functions of one tensor, its shape and type. Each is one kernel."""


def _made(name: str) -> tuple[Function, Tensor]:
    function, shape, dtype = CASES[name]
    torch.manual_seed(0)
    return function, (torch.randn(shape) * 3).to(dtype)


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_that_means_what_pytorch_means(name: str) -> None:
    made = region(*_made(name))
    made.check()
    passed = made.passed()
    assert len(passed.kernels) == 1
    made.check(passed)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(3)
def test_emulated(name: str) -> None:
    made = region(*_made(name))
    program = made.passed(pass_options(SMALL))
    _compare(program, emulate(program, render(program, SMALL), made.memory(program)), made.exact())


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(3)
def test_on_a_cpu(name: str) -> None:
    made = region(*_made(name))
    program = made.passed()
    _compare(program, run_native(program, made.memory(program)), made.exact())


def test_a_scan_that_two_kernels_read_is_written() -> None:
    made = region(lambda x: (lambda y: (y.relu(), y.sum(0)))(x.cumsum(1)), torch.randn(5, 40))
    passed = made.passed()
    assert [kernel.scans for kernel in passed.kernels] == [True, False]
    made.check(passed)


def test_a_scan_that_is_read_at_computed_places_is_written() -> None:
    """So far back, but not before the beginning."""
    made = region(lambda x: (lambda y: y - F.pad(y, (3, 0), mode="replicate")[:, :-3])(x.cumsum(1)), torch.randn(5, 40))
    passed = made.passed()
    assert len(passed.kernels) == 2
    made.check(passed)


def test_a_scan_does_not_join_reductions_of_the_same_values() -> None:
    made = region(lambda x: (x.cumsum(1), x.sum(1), x.softmax(1).cumsum(1)), torch.randn(5, 40))
    passed = made.passed()
    assert all(len(kernel.reductions) == 1 for kernel in passed.kernels if kernel.scans)
    made.check(passed)


@pytest.mark.parametrize(
    ("function", "shape", "walk", "backward"),
    [
        (lambda x: x.cumsum(1), (4096, 4096), Walk.INNER, False),
        (lambda x: x.flip(1).cumsum(1).flip(1), (4096, 4096), Walk.INNER, True),
        (lambda x: x.flip(1).cumsum(1), (4096, 4096), Walk.INNER, False),  # half of it goes either way
        (lambda x: x.cumsum(0), (4096, 4096), Walk.OUTER, False),
        (lambda x: x.flip(0).cumsum(0).flip(0), (4096, 4096), Walk.OUTER, False),
    ],
)
def test_schedule(function: Function, shape: tuple[int, ...], walk: Walk, backward: bool) -> None:
    facts = DeviceFacts.h200()
    program = region(function, torch.empty(shape)).passed(pass_options(facts))
    (kernel,) = program.kernels
    plan = schedule(kernel, program, facts)
    assert (plan.walk, plan.backward) == (walk, backward)


def test_blocks_take_as_many_rows_as_lie_together_where_rows_are_few() -> None:
    program = region(lambda x: x.cumsum(1), torch.empty(316, 41686, 4, device="meta")).passed(
        pass_options(DeviceFacts.h200())
    )
    plan = schedule(program.kernels[0], program, DeviceFacts.h200())
    assert (plan.walk, plan.lanes, plan.groups, plan.blocks) == (Walk.OUTER, 8, 128, 158)


def test_a_convolution_is_not_scanned_in_its_region() -> None:
    """Its kernels go over rows as their reductions do, which have one result for each."""
    with pytest.raises(Unsupported, match="a scan of what a convolution"):
        region(lambda x: (x @ x).cumsum(0), torch.randn(4, 4))


def test_what_is_reduced_behind_a_scan_is_in_its_region() -> None:
    model = torch.nn.Sequential(Cumulated(), torch.nn.Softmax(1))
    (region,) = fusepass.explain(model, torch.randn(8, 64)).regions
    assert (region.name, region.pattern) == ("exp_cumsum_log_softmax", "scan")


class Cumulated(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp().cumsum(1).log()


def test_regions() -> None:
    model = Sums()
    report = fusepass.explain(model, torch.randn(8, 64))
    assert [region.name for region in report.regions] == ["flip_mul_cumsum_flip", "cumprod_add"]
    assert [region.pattern for region in report.regions] == ["scan", "scan"]


class Sums(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.flip(1) * 2).cumsum(1).flip(1).cumprod(0) + 1


def _compare(program: Program, got: dict, wanted: tuple[Tensor, ...]) -> None:
    for name, want in zip(program.outputs, wanted, strict=True):
        bound = {BF16: 1.6e-2, F16: 2e-3}.get(want.dtype, 2e-6)
        torch.testing.assert_close(tensor_of(got[name], program.buffer(name)), want, rtol=bound, atol=bound * 20)
