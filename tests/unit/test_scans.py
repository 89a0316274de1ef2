"""Scans: running sums and products, with what is before and behind them in one kernel."""

from __future__ import annotations

import math
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
from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.plan_rows import Columns, Rows
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import Array
from tests.support.native import run_native
from tests.support.regions import NO_SPLIT, Region, region, tensor_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=2, l2_bytes=1 << 20)
"""Few rows already fill it, so that small kernels get the schedules of large ones."""

F16, BF16, F32, F64, I8, I64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64
Function = Callable[..., Tensor]
Case = tuple[Function, tuple[int, ...], torch.dtype]
"""A function of one tensor, its shape and type."""


def exclusive(x: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(x[:, :1]), x), 1)[:, :-1].cumsum(1)


CASES: dict[str, Case] = {
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
    "greatest": (lambda x: x.cummax(1).values * 2, (9, 1000), F32),
    "least of halves": (lambda x: x.cummin(1).values, (5, 2055), F16),
    "greatest and where": (lambda x: tuple(x.cummax(1)), (9, 1000), F32),
    "where, part of a warp": (lambda x: x.round().cummin(1).indices, (37, 20), F32),
    "greatest and where, pieces": (lambda x: tuple(x.round().cummax(1)), (3, 9001), F32),
    "least and where, integers": (lambda x: tuple(x.cummin(1)), (4, 1030), I8),
    "greatest and where, doubles": (lambda x: tuple(x.cummax(1)), (4, 530), F64),
    "least and where, outer": (lambda x: tuple(x.cummin(0)), (70, 513), BF16),
    "greatest and where, groups": (lambda x: tuple(x.cummax(1)), (2, 300, 33), F32),
    "where, backwards": (lambda x: x.flip(1).cummax(1).indices.flip(1), (6, 4999), F32),
    "exponentials": (lambda x: x.logcumsumexp(1), (9, 1000), F32),
    "exponentials of halves": (lambda x: x.logcumsumexp(1).relu(), (5, 2055), F16),
    "exponentials, part of a warp": (lambda x: x.logcumsumexp(1), (37, 20), F64),
    "exponentials, pieces": (lambda x: (x * 9).logcumsumexp(1), (3, 9000), F32),
    "exponentials, outer": (lambda x: x.logcumsumexp(0), (70, 513), F32),
    "exponentials, groups": (lambda x: x.logcumsumexp(1), (2, 300, 33), F32),
}
"""Functions of one tensor, its shape and type. Each is one kernel."""


def made_from(case: Case) -> Region:
    """The function on numbers that are the same in each run."""
    function, shape, dtype = case
    torch.manual_seed(0)
    return region(function, (torch.randn(shape) * 3).to(dtype))


def computed(made: Region, program: Program, *, on_gpu: bool) -> dict[str, Array]:
    """What the code of `program` gives, emulated if it is that for a GPU."""
    memory = made.memory(program)
    return emulate(program, render(program, SMALL), memory) if on_gpu else run_native(program, memory)


_ENDS = (math.nan, math.inf, -math.inf)


@needs_compiler
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("function", [torch.cummax, torch.cummin, torch.logcumsumexp])
@pytest.mark.parametrize("shape", [(6, 40), (40, 6)])
def test_what_is_not_finite(function: Callable[[Tensor, int], object], shape: tuple[int, int], on_gpu: bool) -> None:
    """Each of these first and among others, two of them, and nothing else."""
    dim = shape.index(40)
    x = torch.randn(6, 40)
    x[0, 7], x[1, 7], x[2, :9], x[3, 20], x[3, 22], x[4] = *_ENDS, *_ENDS
    x[5, 3], x[5, 8], x[5, 9] = math.inf, math.nan, -math.inf
    made = region(lambda x: function(x, dim), x if dim else x.t().contiguous())
    program, exact = made.passed(pass_options(SMALL)), made.exact()
    made.check(program)
    _compare(program, computed(made, program, on_gpu=on_gpu), exact)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(3)
def test_one_kernel_that_means_what_pytorch_means(name: str) -> None:
    made = made_from(CASES[name])
    made.check()
    passed = made.passed()
    assert len(passed.kernels) == 1
    made.check(passed)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(5)
def test_emulated(name: str) -> None:
    made = made_from(CASES[name])
    program = made.passed(pass_options(SMALL))
    _compare(program, computed(made, program, on_gpu=True), made.exact())


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(5)
def test_on_a_cpu(name: str) -> None:
    made = made_from(CASES[name])
    program = made.passed()
    _compare(program, computed(made, program, on_gpu=False), made.exact())


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
    assert all(len(kernel.reduction_loops[-1]) == 1 for kernel in passed.kernels if kernel.scans)
    made.check(passed)


BEHIND: dict[str, Case] = {
    "softmax": (lambda x: x.softmax(1).cumsum(1), (9, 1000), F32),
    "softmax, part of a warp": (lambda x: x.softmax(1).cumsum(1), (37, 20), F32),
    "softmax, rows begin anywhere": (lambda x: x.softmax(1).cumsum(1), (5, 2055), F16),
    "softmax of long rows": (lambda x: x.softmax(1).cumsum(1), (3, 9001), F32),
    "softmax, backwards": (lambda x: x.softmax(1).flip(1).cumsum(1).flip(1), (6, 999), F32),
    "mean, which is a result": (
        lambda x: (lambda m: ((x * x - m).cumsum(1), m * 2))(x.mean(1, keepdim=True)),
        (9, 1000),
        F32,
    ),
    "mean and variance": (lambda x: F.layer_norm(x, x.shape[1:]).cumsum(1).relu(), (9, 1000), F32),
    "greatest and where": (lambda x: tuple((x - x.amin(1, keepdim=True)).cummax(1)), (9, 1000), F32),
    "for what is behind it": (lambda x: x.cumsum(1) / x.abs().sum(1, keepdim=True), (9, 1000), F32),
    "before and behind it": (
        lambda x: (x.sigmoid() + x.amin(1, keepdim=True).abs()).cumsum(1) * x.amax(1, keepdim=True),
        (9, 130),
        F32,
    ),
    "exponentials": (lambda x: (x - x.amax(1, keepdim=True)).logcumsumexp(1), (9, 1000), F32),
    "doubles": (lambda x: x.softmax(1).cumsum(1), (4, 530), F64),
}
"""Functions whose scans need what other reduction loops have found."""


@pytest.mark.parametrize("name", BEHIND)
def test_behind_other_sweeps(name: str) -> None:
    made = made_from(BEHIND[name])
    for options in (NO_SPLIT, pass_options(SMALL)):
        program = made.passed(options)
        assert len(program.kernels) == 1
        made.check(program)


@needs_compiler
@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.thinned(5)
def test_behind_other_sweeps_compiled(name: str, on_gpu: bool) -> None:
    made = made_from(BEHIND[name])
    program = made.passed(pass_options(SMALL))
    _compare(program, computed(made, program, on_gpu=on_gpu), made.exact())


@needs_compiler
def test_what_scans_goes_along_one_axis() -> None:
    """Each element twice is two axes where it is read."""

    def function(x: Tensor) -> Tensor:
        return F.layer_norm(x.repeat_interleave(2, -1), (2 * x.shape[-1],)).cumsum(-1) * 0.1

    made = region(function, torch.randn(24, 5))
    program = made.passed(pass_options(SMALL))
    _compare(program, computed(made, program, on_gpu=True), made.exact())


def test_a_dimension_of_one_is_no_other_axis_of_what_scans() -> None:
    made = region(lambda x: (x * x.amax()).flip(0).cumsum(0), torch.randn(13, 1))
    for options in (NO_SPLIT, pass_options(SMALL)):
        program = made.passed(options)
        assert len(program.kernels) == 1
        made.check(program)


def test_rows_that_do_not_stay_on_the_chip_are_scanned_by_a_kernel_of_their_own() -> None:
    facts = DeviceFacts.h200()
    for shape, kernels in (((4096, 16384), 1), ((4096, 16385), 2)):
        program = region(lambda x: x.softmax(1).cumsum(1), torch.empty(shape, device="meta")).passed(
            pass_options(facts)
        )
        assert len(program.kernels) == kernels
        assert program.kernels[-1].scans
    columns = region(lambda x: x.softmax(0).cumsum(0), torch.empty(512, 4096, device="meta"))
    assert len(columns.passed(pass_options(facts)).kernels) == 2


@pytest.mark.parametrize(
    ("function", "shape", "walk", "backward"),
    [
        (lambda x: x.cumsum(1), (4096, 4096), Rows, False),
        (lambda x: x.flip(1).cumsum(1).flip(1), (4096, 4096), Rows, True),
        (lambda x: x.flip(1).cumsum(1), (4096, 4096), Rows, False),  # half of it goes either way
        (lambda x: x.cumsum(0), (4096, 4096), Columns, False),
        (lambda x: x.flip(0).cumsum(0).flip(0), (4096, 4096), Columns, False),
    ],
)
def test_schedule(function: Function, shape: tuple[int, ...], walk: type[Schedule], backward: bool) -> None:
    facts = DeviceFacts.h200()
    program = region(function, torch.empty(shape)).passed(pass_options(facts))
    (kernel,) = program.kernels
    plan = schedule(kernel, program, facts)
    assert (type(plan), isinstance(plan, Rows) and plan.backward) == (walk, backward)


@pytest.mark.parametrize(
    ("columns", "lanes", "each"),
    [
        (32_768, 512, 4),
        (32_769, 256, 9),  # four pieces, and none for what is left of the vectors
        (33_000, 256, 9),
        (40_960, 512, 4),
        (8_193, 256, 9),
        (9_500, 256, 8),  # ten would be many more
    ],
)
def test_a_piece_for_next_to_nothing_is_none(columns: int, lanes: int, each: int) -> None:
    facts = DeviceFacts.h200()
    program = region(lambda x: x.cumsum(1), torch.empty(8192, columns, device="meta")).passed(pass_options(facts))
    plan = schedule(program.kernels[0], program, facts)
    assert (plan.lanes, plan.unroll) == (lanes, each)


def test_blocks_take_as_many_rows_as_lie_together_where_rows_are_few() -> None:
    program = region(lambda x: x.cumsum(1), torch.empty(316, 41686, 6, device="meta")).passed(
        pass_options(DeviceFacts.h200())
    )
    plan = schedule(program.kernels[0], program, DeviceFacts.h200())
    assert (type(plan), plan.lanes, plan.groups, plan.blocks) == (Columns, 8, 128, 237)


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
    assert [(region.name, region.pattern) for region in report.regions] == [
        ("flip_mul_cumsum_flip_cumprod_add", "scan")
    ]


class Sums(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.flip(1) * 2).cumsum(1).flip(1).cumprod(0) + 1


def _compare(program: Program, got: dict, wanted: tuple[Tensor, ...]) -> None:
    for name, want in zip(program.outputs, wanted, strict=True):
        bound = {BF16: 1.6e-2, F16: 2e-3}.get(want.dtype, 2e-6)
        torch.testing.assert_close(
            tensor_of(got[name], program.buffer(name)), want, rtol=bound, atol=bound * 20, equal_nan=True
        )
