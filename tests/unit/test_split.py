"""Few long rows are reduced in pieces that are merged in a fixed order; many or short rows are left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import ReduceOp, ReductionResult, walk
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.passes.pipeline import PassOptions, run_passes
from fusepass.codegen.passes.split import SplitPolicy
from tests.support.regions import NO_SPLIT, TILES, Region, region

F64 = torch.float64
ONLINE = 0  # every row is too long to stay on chip


def _options(workers: int, least_piece: int = 2, lanes: int = 1, cached: int = ONLINE) -> PassOptions:
    return PassOptions(SplitPolicy(workers, least_piece, lanes), cached)


def _ops(program: Program) -> list[list[ReduceOp]]:
    return [[reduction.op for reduction in kernel.reductions] for kernel in program.kernels]


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:], _weights(x.shape[1:]), _weights(x.shape[1:])),
    "group norm": lambda x: F.group_norm(x, x.shape[1], _weights(x.shape[1:2]), _weights(x.shape[1:2])),
    "batch norm": lambda x: F.batch_norm(x, None, None, _weights(x.shape[1:2]), None, True),
    "softmax": lambda x: x.flatten(1).softmax(1),
    "softmax over channels": lambda x: F.gelu(x).softmax(1),
    "softmax of all": lambda x: (x.flatten().softmax(0), x.flatten().log_softmax(0)),
    "logsumexp": lambda x: torch.logsumexp(x, (0, 1)),
    "sums": lambda x: (x.sum(), x.sum(1), x.prod(0), x.amax(1), x.amin(), (x > 0).any(0), x.mean()),
    "places": lambda x: (*x.max(1), x.argmax(), x.argmin(0), *x.round().min(-1)),
    "variances": lambda x: (x.var(1), x.std(), *torch.var_mean(x, -1)),
    "mixed scalars": lambda x: _mixed(x.mean(1, True), x.var(1, keepdim=True, correction=0), x),
    "three sweeps": lambda x: F.normalize(x.softmax(1), dim=1) + x.flatten().softmax(0).reshape(x.shape),
    "two outputs": lambda x: (x - x.mean(1, keepdim=True), x * x.mean(1, keepdim=True), x.mean(1)),
}


def _weights(shape: torch.Size) -> Tensor:
    return torch.linspace(0.5, 2.0, shape.numel(), dtype=F64).reshape(shape)


def _mixed(mean: Tensor, variance: Tensor, x: Tensor) -> Tensor:
    """Scalars of a row that are used per element, alone and inside one another."""
    scale = variance + 1
    return x * scale + scale * mean - torch.exp(-scale * mean) * x


SHAPES = ((2, 7, 11), (3, 101), (1, 4, 6, 9), (2, 24, 24), (5, 2, 2, 2, 2))
POLICIES = (_options(8), _options(1000, 1, 4), _options(64, 5, 2, cached=10**6))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.thinned(3)
def test_meaning(name: str, shape: tuple[int, ...]) -> None:
    made = region(FUNCTIONS[name], torch.randn(shape, dtype=F64))
    for options in POLICIES:
        made.check(made.passed(options))


PRIME = ((101, 2, 103), (2, 101, 103), (1, 1, 997), (2, 997))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", PRIME, ids=str)
@pytest.mark.thinned(3)
def test_meaning_of_axes_without_divisors(name: str, shape: tuple[int, ...]) -> None:
    """What is left behind equal pieces is merged element by element, the last of several extremes among it."""
    if name in ("batch norm", "group norm") and math.prod(shape) == max(shape):
        shape = (3, *shape[1:])  # neither takes one number of a channel
    x = torch.randn(shape, dtype=F64).round(decimals=1)
    made = region(FUNCTIONS[name], x)
    for options in POLICIES:
        made.check(made.passed(options))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["layer norm", "softmax", "logsumexp", "sums", "places"])
def test_values_that_are_not_finite_behind_equal_pieces(name: str, value: float) -> None:
    x = torch.randn(2, 101, dtype=F64)
    x[0, -1] = x[1, -2] = value
    made = region(FUNCTIONS[name], x)
    made.check(made.passed(_options(8)))


def test_an_axis_without_divisors_is_split() -> None:
    program = region(lambda x: x.sum(1), torch.randn(1, 999_983)).passed(_options(32, 8))
    partial, merge = program.kernels
    assert partial.row_count in range(32, 72)
    assert partial.col_count % 64 == 0
    assert partial.row_count < merge.col_count < partial.row_count + partial.col_count // 8


def _stored_and_summed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.sin().sum((0, 2, 3))


def test_parts_of_rows_that_begin_anywhere_are_equal() -> None:
    """Then they store what happens per element, too, in vectors as good as others: 187 x 187 has no divisor that a vector has."""
    made = region(
        lambda x, b: _stored_and_summed(x + b),
        torch.empty(51, 7, 187, 187, device="meta"),
        torch.empty(7, 1, 1, device="meta"),
    )
    stored, merged = made.passed(pass_options(DeviceFacts.h200())).kernels
    assert stored.stores
    assert stored.row_count * stored.col_count == 51 * 7 * 187 * 187
    assert merged.reads.isdisjoint(made.program.inputs)


def test_columns_that_nothing_tells_apart_are_one() -> None:
    """Their product has divisors that none of them has."""
    program = region(lambda x: x.sum(), torch.randn(47, 53, 256)).passed(_options(16, 8))
    assert program.kernels[0].col_count * program.kernels[0].row_count == 47 * 53 * 256


def _long(function: Callable[[Tensor], Any], rows: int = 2, cols: int = 48) -> Region:
    return region(function, torch.randn(rows, cols, dtype=F64))


def test_layer_norm_of_few_long_rows_is_three_kernels() -> None:
    made = _long(FUNCTIONS["layer norm"])
    program = made.passed(_options(8, 4))
    assert _ops(program) == [[ReduceOp.MOMENTS], [ReduceOp.MERGE_MOMENTS], []]
    partial, merge, apply = program.kernels
    assert (partial.row_count, partial.col_count) == (8, 12)
    assert (merge.row_count, merge.col_count) == (2, 4)
    assert apply.row_count == 96
    assert not any(isinstance(node, ReductionResult) for node in walk(*apply.roots))


def test_scalars_of_a_row_are_computed_once() -> None:
    """The merging kernel stores the mean and the reciprocal deviation; no element takes a square root."""
    merge, apply = _long(FUNCTIONS["layer norm"]).passed(_options(8, 4)).kernels[1:]
    assert len(merge.row_stores) == 2
    assert not [node for node in walk(*apply.roots) if getattr(getattr(node, "op", None), "value", "") == "rsqrt"]


@pytest.mark.parametrize("cached", [ONLINE, 10**6])
def test_online_softmax_is_merged_from_pairs(cached: int) -> None:
    """Of rows that would stay on the chip, too: pieces do not."""
    program = _long(lambda x: x.softmax(1)).passed(_options(8, 4, cached=cached))
    assert _ops(program) == [[ReduceOp.SOFTMAX], [ReduceOp.MERGE_SOFTMAX], []]


def test_two_sweeps_are_split_one_after_the_other() -> None:
    program = _long(lambda x: x / (x / x.amax(1, keepdim=True)).sum(1, keepdim=True)).passed(_options(8, 4))
    assert _ops(program) == [[ReduceOp.MAX], [ReduceOp.MAX], [ReduceOp.SUM], [ReduceOp.SUM], []]


@pytest.mark.parametrize(
    ("function", "shape", "kernels"),
    [
        (lambda x: x.softmax(1), (16, 1024, 256), 1),  # registers of blocks with few columns hold all of these
        (lambda x: (x - x.mean(1, True)) / x.std(1, keepdim=True), (4, 4096, 128), 1),
        (lambda x: x.softmax(0), (3072, 3318), 3),
        (lambda x: x.sum(1), (16, 1024, 256), 2),  # nothing is needed again
    ],
)
def test_columns_that_stay_on_the_chip_are_no_pieces(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], kernels: int
) -> None:
    made = region(function, torch.empty(shape, device="meta"))
    assert len(made.passed(pass_options(DeviceFacts.h200())).kernels) == kernels


def test_a_plain_reduction_is_two_kernels() -> None:
    program = _long(lambda x: x.sum(1)).passed(_options(8, 4))
    assert _ops(program) == [[ReduceOp.SUM], [ReduceOp.SUM]]


def test_outer_axes_are_pieces_as_they_are() -> None:
    """Batch norm over (n, h, w): each image is a piece."""
    made = region(FUNCTIONS["batch norm"], torch.randn(4, 2, 5, 7, dtype=F64))
    partial = made.passed(_options(8, 4)).kernels[0]
    assert (partial.row_count, partial.col_count) == (8, 35)


@pytest.mark.parametrize(
    ("rows", "cols", "options", "why"),
    [
        (8, 48, _options(8, 4), "as many rows as workers"),
        (2, 7, _options(8, 4), "rows shorter than two pieces"),
    ],
)
def test_left_alone(rows: int, cols: int, options: PassOptions, why: str) -> None:
    program = _long(lambda x: x.sum(1), rows, cols).passed(options)
    assert len(program.kernels) == 1, why


def test_pointwise_kernels_are_left_alone() -> None:
    assert len(_long(torch.relu).passed(_options(10**6, 1)).kernels) == 1


def test_rows_side_by_side_are_taken_together() -> None:
    """Where rows are contiguous one worker takes several of them, so more pieces are cut to keep all busy."""
    made = region(lambda x: x.sum(0), torch.randn(64, 8, dtype=F64))
    alone, together = made.passed(_options(16, 8, lanes=1)), made.passed(_options(16, 8, lanes=4))
    assert (alone.kernels[0].row_count, together.kernels[0].row_count) == (8 * 2, 8 * 8)
    made.check(alone)
    made.check(together)


@pytest.mark.parametrize(("beside", "pieces"), [(1, 16), (2, 64), (6, 16), (8, 64), (32, 64), (36, 8)])
def test_rows_side_by_side_in_whole_vectors_have_more_pieces(beside: int, pieces: int) -> None:
    policy = SplitPolicy(workers=16, least_piece=8, lanes=32, column_workers=64)
    made = region(lambda x: x.sum(0), torch.empty(1 << 16, beside))
    assert policy.pieces(made.program, made.program.kernels[0]) == pieces


def test_pieces_are_never_of_one_element() -> None:
    """They would be no reductions at all."""
    for workers, cols in ((3, 7), (5, 11), (5, 13), (4, 15), (12, 25), (4, 9), (6, 17)):
        program = _long(lambda x: x.sum(1), 1, cols).passed(_options(workers, 1))
        assert all(kernel.col_count > 1 for kernel in program.kernels)


def test_names_of_temporaries_never_meet_names_of_inputs() -> None:
    made = region(lambda x, y: F.layer_norm(x, (48,)) + y, *torch.randn(2, 2, 48, dtype=F64))
    (name, *_) = (buffer.name for buffer in made.passed(_options(8, 4)).buffers if buffer.role is Role.TEMP)
    program, builder = lower(made.graph, "region", ["x", name])
    buffers = run_passes(program, builder, _options(8, 4), check=True).buffers
    assert len({buffer.name for buffer in buffers}) == len(buffers) == 7


def test_without_splitting_nothing_is_left_over() -> None:
    assert len(_long(FUNCTIONS["layer norm"]).passed(NO_SPLIT).kernels) == 1


LAST = {"memory_format": torch.channels_last}
FIRST = {"memory_format": torch.contiguous_format}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_separated_layouts_mean_the_same(name: str) -> None:
    x = torch.randn(2, 6, 4, 5, dtype=F64)
    for given, made in ((LAST, FIRST), (FIRST, LAST)):

        def function(x: Tensor, made: dict[str, Any] = made) -> Any:
            results = FUNCTIONS[name](x)
            results = results if isinstance(results, tuple) else (results,)
            return tuple(r.clone(**made) if r.dim() == 4 else r for r in results)

        made_region = region(function, x.clone(**given))
        made_region.check(made_region.passed(TILES))


def _three_layouts(x: Tensor) -> tuple[Tensor, ...]:
    shares = x.softmax(1)
    return tuple((shares * factor).clone(**FIRST) for factor in (1, 2, 3))


@pytest.mark.parametrize(
    ("function", "shape", "layout", "least", "kernels"),
    [
        (lambda x: F.instance_norm(x).clone(**FIRST), (2, 8, 64, 9), LAST, 1, 2),
        (lambda x: F.instance_norm(x).clone(**FIRST), (2, 8, 64, 8), LAST, 1, 1),
        (lambda x: F.instance_norm(x).clone(**FIRST), (2, 8, 4, 5), LAST, 1, 1),  # whole rows fit the tiles of a block
        (lambda x: F.instance_norm(x).clone(**FIRST), (2, 8, 64, 9), LAST, 1 << 20, 1),  # too small for two launches
        (lambda x: F.instance_norm(x).clone(**LAST), (2, 8, 64, 5), LAST, 1, 1),  # all alike
        (lambda x: F.instance_norm(x), (2, 8, 64, 5), FIRST, 1, 1),
        (lambda x: x.softmax(1).clone(**FIRST), (2, 8, 4, 5), LAST, 1, 1),  # a block has several rows, whole
        (lambda x: x.softmax(1).clone(**FIRST), (2, 1024, 4, 5), LAST, 1, 1),
        (lambda x: x.softmax(1).clone(**FIRST), (2, 1025, 4, 5), LAST, 1, 2),
        (_three_layouts, (2, 600, 4, 5), LAST, 1, 1),
        (_three_layouts, (2, 800, 4, 5), LAST, 1, 2),  # three such tiles are too many
    ],
)
def test_reductions_stand_alone_where_reads_and_writes_are_laid_out_differently(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], layout: dict[str, Any], least: int, kernels: int
) -> None:
    made = region(function, torch.randn(shape, dtype=F64).clone(**layout))
    program = made.passed(replace(TILES, separate_from=least))
    assert [kernel.is_pointwise for kernel in program.kernels] == [False, True][:kernels]
    made.check(program)


@pytest.mark.parametrize(
    ("results", "writes"),
    [
        (lambda y: y.permute(0, 2, 3, 1).contiguous(), [1, 1]),
        (lambda y: (y, y.permute(0, 2, 3, 1).contiguous()), [1, 1]),  # a copy of what is stored
        (lambda y: (y * 2, (y + 1).clone(**LAST)), [2, 1]),
        (lambda y: (y, y * 2), [2]),
        (lambda y: y[:, :16].clone(**LAST), [1]),  # few channels: neighbours fill what they store
        (lambda y: (y.clone(**LAST), y.transpose(2, 3).clone(**LAST)), [1, 2]),  # two copies of one value
    ],
)
def test_stores_that_cross_windows_stand_alone(results: Callable[[Tensor], Any], writes: list[int]) -> None:
    """Output tiles of an image hold neighbours along its rows."""
    made = region(lambda x: results(F.max_pool2d(x, 3, 1, 1)), torch.randn(2, 20, 6, 7, dtype=F64))
    program = made.passed(replace(TILES, separate_from=1))
    assert [len(kernel.writes) for kernel in program.kernels] == writes
    made.check(program)
