"""Pooling in one to three dimensions: padding, dilation, rounding and counting in every combination allowed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.ir.expr import Load, Window, walk
from fusepass.codegen.lowering.tensor import Unsupported
from fusepass.codegen.passes.rewrite import divisions, indices
from tests.support.regions import NO_SPLIT, Functional, region

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE_MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
ADAPTIVE_AVERAGE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
SHAPES = {1: (2, 3, 11), 2: (2, 2, 9, 8), 3: (1, 2, 7, 6, 5)}
INPUTS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "contiguous": lambda shape: torch.randn(shape),
    "reversed": lambda shape: torch.randn(shape[::-1]).permute(*range(len(shape) - 1, -1, -1)),
    "no batch": lambda shape: torch.randn(shape[1:]),
    "special": lambda shape: _special(torch.randn(shape)),
}


CASES = [(1, "contiguous"), (3, "reversed"), *((2, layout) for layout in INPUTS)]


def _special(x: Tensor) -> Tensor:
    x.view(-1)[[3, 9, 20]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return x


def _windows() -> Iterator[tuple[int, int | None, int, bool]]:
    for size, stride, ceil in itertools.product((1, 2, 3), (None, 1, 2, 3), (False, True)):
        for padding in range(size // 2 + 1):
            yield size, stride, padding, ceil


@pytest.mark.parametrize(("rank", "layout"), CASES)
def test_max(rank: int, layout: str) -> None:
    pool = MAX[rank]
    region(
        lambda x: [pool(x, k, s, p, 1 + k % 2, c) for k, s, p, c in _windows()],
        INPUTS[layout](SHAPES[rank]).double(),
    ).check()


@pytest.mark.parametrize(("rank", "layout"), CASES)
def test_average(rank: int, layout: str) -> None:
    pool: Callable[..., Tensor] = AVERAGE[rank]

    def pools(x: Tensor) -> list[Tensor]:
        found = [pool(x, k, s, p, c, counted) for k, s, p, c in _windows() for counted in {False, p > 0}]
        return found if rank == 1 else [*found, pool(x, 3, 2, 1, True, False, 5), pool(x, 2, 1, 1, divisor_override=3)]

    region(pools, INPUTS[layout](SHAPES[rank]).double()).check()


@pytest.mark.parametrize(("rank", "layout"), CASES)
def test_adaptive(rank: int, layout: str) -> None:
    """Window sizes that divide, that do not, and outputs longer than the input."""
    x = INPUTS[layout](SHAPES[rank]).double()
    region(
        lambda x: [pool[rank](x, n) for pool in (ADAPTIVE_MAX, ADAPTIVE_AVERAGE) for n in (1, 2, 3, 4, 12)], x
    ).check()


def test_adaptive_to_nothing() -> None:
    region(lambda x: (F.adaptive_avg_pool2d(x, 0), F.adaptive_max_pool2d(x, 0)), torch.randn(2, 3, 4, 5)).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_types(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 8, 7).to(dtype)
    made = region(lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, 3)), x)
    made.check()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8], ids=str)
def test_maximum_of_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0, 100, (1, 2, 5, 5)).to(dtype) - (0 if dtype is torch.uint8 else 50)
    region(lambda x: F.max_pool2d(x, 3, 2, 1), x).check()


def test_channels_last() -> None:
    x = torch.randn(2, 3, 8, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
    pools = Functional(
        lambda x: (
            F.max_pool2d(x, (3, 2), (2, 1), (1, 0)), F.avg_pool2d(x, (3, 2), (2, 1), (1, 0)),
            F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, None)), F.adaptive_max_pool2d(x, (None, 2)),
        )
    )  # fmt: skip
    region(pools, x).check()


def test_lp_pool() -> None:
    region(lambda x: (F.lp_pool1d(x, 2.0, 2), F.lp_pool1d(x, 3.0, 3, 2)), torch.rand(2, 3, 9)).check()


def test_a_pool_of_a_pool_is_stored_between() -> None:
    """Nested windows would compute the inner one again for every tap of the outer."""
    x = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    made = region(lambda x: F.max_pool2d(F.gelu(F.avg_pool2d(x, 2, 1)) + 1, 3, 2, 1) * 2, x)
    assert [kernel.is_pointwise for kernel in made.program.kernels] == [True, True]
    made.check()
    passed = made.passed(NO_SPLIT)
    assert len(passed.kernels) == 2
    made.check(passed)


@pytest.mark.parametrize(
    ("pools", "kernels"),
    [
        (lambda x: F.avg_pool2d(F.gelu(x), 3, 1), 2),
        (lambda x: F.avg_pool2d(F.gelu(x), 3, 3), 1),
        (lambda x: F.avg_pool2d(x * 2 + 1, 3, 1), 2),
        (lambda x: F.avg_pool2d(x * 2, 3, 1), 1),
        (lambda x: F.avg_pool2d(x, 3, 1), 1),
    ],
)
def test_what_windows_share_is_computed_once_if_it_takes_long(pools: Callable[[Tensor], Any], kernels: int) -> None:
    made = region(pools, torch.randn(1, 2, 30, 30))
    assert len(made.program.kernels) == kernels
    made.check(made.passed(NO_SPLIT))


@pytest.mark.parametrize(
    "pools",
    [
        lambda x: F.adaptive_avg_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
        lambda x: F.adaptive_max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 9, padding=4, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 9, padding=4, count_include_pad=False),
        lambda x: F.max_pool2d(x, (8, 9), (7, 10), (4, 3)),
        lambda x: F.gelu(F.avg_pool3d(x.unsqueeze(1), (1, 10, 10))) * 2,
    ],
)
def test_large_windows_are_rows(pools: Callable[[Tensor], Any]) -> None:
    """One thread would go through each of them."""
    x = torch.randn(2, 3, 22, 25, dtype=torch.float64)
    x[0, 0, 3, 4], x[1, 1, 20, 20] = float("nan"), float("-inf")
    made = region(pools, x)
    assert not made.program.kernels[0].is_pointwise
    made.check()
    made.check(made.passed(NO_SPLIT))


def test_large_windows_that_overlap_are_none() -> None:
    made = region(lambda x: F.max_pool2d(x, 9, 1, 4), torch.randn(1, 2, 22, 25))
    assert made.program.kernels[0].is_pointwise


@pytest.mark.parametrize(
    "pools",
    [
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        lambda x: F.adaptive_avg_pool2d(x, (3, 7)),
        lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    ],
)
def test_how_many_points_count_is_arithmetic(pools: Callable[[Tensor], Any]) -> None:
    """No window goes through points but to read them."""
    program = region(pools, torch.empty(2, 3, 22, 25, device="meta")).program
    windows = [node for kernel in program.kernels for node in kernel.nodes if isinstance(node, Window)]
    assert all(any(isinstance(below, Load) for below in walk(window)) for window in windows)


def _positions(x: Tensor) -> Tensor:
    """Numbers of which many are equal, some NaN, and whole windows the lowest there are."""
    x = x.round()
    x.view(-1)[3::17], x.view(-1)[5::23] = float("nan"), float("inf")
    x[..., :3, :3] = -float("inf")
    return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.thinned(4)
def test_positions_of_maxima(rank: int, dtype: torch.dtype) -> None:
    """The first of equal ones, the last NaN, as PyTorch's kernels have it."""
    pool, adaptive, shape = MAX[rank], ADAPTIVE_MAX[rank], SHAPES[rank]
    torch.manual_seed(rank)
    x = torch.randint(-3, 4, shape, dtype=dtype) if dtype is torch.int32 else _positions(torch.randn(shape)).to(dtype)

    def pools(x: Tensor) -> list[Tensor]:
        made = [pool(x, k, s, p, 1 + k % 2, c, return_indices=True) for k, s, p, c in _windows()]
        if x.dtype is not torch.int32:
            made += [adaptive(x, size, return_indices=True) for size in (1, 2, 3)]
        return [tensor for pair in made for tensor in pair]

    for found, want in zip(region(pools, x).run(), pools(x), strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("reads", [0, 1])
@pytest.mark.parametrize(
    ("function", "kernels"),
    [(lambda x: x.relu(), 1), (lambda x: x.clamp(-1, 1).half().float(), 1), (lambda x: x * 0.3 + 1, 2), (F.gelu, 2)],
)
def test_one_kernel_finds_maxima_and_positions(function: Callable[[Tensor], Tensor], kernels: int, reads: int) -> None:
    """Of what is computed: what may round otherwise when it is computed again is stored first."""
    made = region(lambda x: F.max_pool2d(function(x), 2, return_indices=True)[reads:], torch.randn(2, 3, 8, 8))
    assert len(made.passed(NO_SPLIT).kernels) == kernels
    made.check()


def test_average_of_integers_is_refused() -> None:
    with pytest.raises(Unsupported, match="average pooling of integers"):
        region(lambda x: F.avg_pool2d(x, 2), torch.ones(1, 2, 4, 4, dtype=torch.int64))


def _stores_its_input(function: Callable[..., Tensor], dtype: torch.dtype, *, cuda: bool) -> bool:
    x, scale = torch.empty(2, 8, 20, 24, dtype=dtype, device="meta"), torch.empty(8, dtype=dtype, device="meta")
    return any(buffer.name.endswith("pool2d_input") for buffer in region(function, x, scale, cuda=cuda).program.buffers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_the_same_for_an_image_costs_nothing_in_tiles(dtype: torch.dtype) -> None:
    def function(x: Tensor, scale: Tensor) -> Tensor:
        return F.avg_pool2d(F.group_norm(x, 2, scale, scale), 3, 1, 1)

    assert not _stores_its_input(function, dtype, cuda=True)
    assert _stores_its_input(function, dtype, cuda=False)


def test_a_function_is_computed_again_in_tiles_where_memory_takes_longer() -> None:
    def function(x: Tensor, scale: Tensor) -> Tensor:
        return F.avg_pool2d(F.gelu(x), 3, 1, 1)

    def across(x: Tensor, scale: Tensor) -> Tensor:
        return F.avg_pool2d(F.gelu(x.mT), 3, 1, 1)

    assert not _stores_its_input(function, torch.float32, cuda=True)
    assert _stores_its_input(function, torch.float32, cuda=False)
    assert not _stores_its_input(function, torch.float16, cuda=True)
    assert _stores_its_input(across, torch.float32, cuda=True)  # no tiles


def test_a_border_leaves_no_quotients_behind() -> None:
    """Windows that reach over the border of what was reshaped: inside, each place has one row and one column."""
    made = region(lambda x: F.max_pool2d(x.flatten(1).view(2, 6, 9, 11), 3, 1, 1), torch.randn(2, 2, 27, 11))
    (kernel,) = made.passed().kernels
    assert not [atom for index in indices(kernel) for atom in divisions(index)]
    made.check(made.passed())
