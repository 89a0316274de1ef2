"""Reductions that share work: one reading of the values serves a sum and a variance, or both halves of a softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.program import Program
from fusepass.codegen.passes.pipeline import PassOptions
from fusepass.codegen.passes.split import SplitPolicy
from tests.support.regions import NO_SPLIT, region

LONG = PassOptions(SplitPolicy(1, 1, 1), longest_cached_row=8)


def _reduction_loop(program: Program) -> list[list[ReduceOp]]:
    (kernel,) = program.kernels
    return [[reduction.op for reduction in reduction_loop] for reduction_loop in kernel.reduction_loops]


SHARED: dict[str, tuple[Callable[[Tensor], Any], list[list[ReduceOp]]]] = {
    "mean beside variance": (lambda x: (x.mean(1), x.var(1)), [[ReduceOp.SUM, ReduceOp.MOMENTS]]),
    "the same sum twice": (lambda x: (x.sum(1), x.sum(1) * 2), [[ReduceOp.SUM]]),
    "two variances": (lambda x: (x.var(1), x.var(1, correction=0)), [[ReduceOp.MOMENTS]]),
    "layer norm and a variance": (
        lambda x: F.layer_norm(x, (12,)) + x.var(1, keepdim=True), [[ReduceOp.MOMENTS]]
    ),
    "sums of different values": (lambda x: (x.sum(1), (x * x).sum(1)), [[ReduceOp.SUM, ReduceOp.SUM]]),
    "sum and maximum": (lambda x: (x.sum(1), x.amax(1)), [[ReduceOp.SUM, ReduceOp.MAX]]),
    "sum of one, variance of another": (lambda x: (x.sum(1), (x * 2).var(1)), [[ReduceOp.SUM, ReduceOp.MOMENTS]]),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_shared(name: str) -> None:
    function, reduction_loops = SHARED[name]
    made = region(function, torch.randn(4, 12, dtype=torch.float64))
    program = made.passed(NO_SPLIT)
    assert _reduction_loop(program) == reduction_loops
    made.check(program)


def test_a_mean_beside_a_variance_may_be_infinite() -> None:
    rows = torch.randn(3, 12, dtype=torch.float64)
    rows[1, 5] = float("inf")
    made = region(lambda x: (x.mean(1), x.var(1)), rows)
    made.check(made.passed(NO_SPLIT))


ONLINE: dict[str, tuple[Callable[[Tensor], Any], list[list[ReduceOp]]]] = {
    "softmax": (lambda x: x.softmax(1), [[ReduceOp.SOFTMAX]]),
    "log_softmax": (lambda x: F.gelu(x).log_softmax(1), [[ReduceOp.SOFTMAX]]),
    "softmax and its maximum": (lambda x: x.softmax(1) * x.amax(1, True), [[ReduceOp.SOFTMAX]]),
    "softmax of a softmax": (lambda x: x.softmax(1).softmax(1), [[ReduceOp.SOFTMAX], [ReduceOp.SOFTMAX]]),
    "softmax beside a sum": (lambda x: x.softmax(1) + x.sum(1, True), [[ReduceOp.SOFTMAX, ReduceOp.SUM]]),
    "sum of exp(x - max(x)) + 1": (
        lambda x: ((x - x.amax(1, True)).exp() + 1).sum(1), [[ReduceOp.MAX], [ReduceOp.SUM]]
    ),
    "another shift": (lambda x: (x - x.amin(1, True)).exp().sum(1), [[ReduceOp.MIN], [ReduceOp.SUM]]),
    "another function": (lambda x: (x - x.amax(1, True)).tanh().sum(1), [[ReduceOp.MAX], [ReduceOp.SUM]]),
    "another value's maximum beside its own": (
        lambda x: (x - (2 * x).amax(1, True)).exp().sum(1) + x.amax(1),
        [[ReduceOp.MAX, ReduceOp.MAX], [ReduceOp.SUM]],
    ),
    "maximum of another value": (
        lambda x: (x - (2 * x).amax(1, True)).exp().sum(1), [[ReduceOp.MAX], [ReduceOp.SUM]]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONLINE)
def test_online(name: str) -> None:
    function, reduction_loops = ONLINE[name]
    made = region(function, torch.randn(4, 12, dtype=torch.float64))
    program = made.passed(LONG)
    assert _reduction_loop(program) == reduction_loops
    made.check(program)


def test_short_rows_keep_two_sweeps() -> None:
    """They stay on chip, where a second reduction loop is cheaper than rescaling."""
    made = region(lambda x: x.softmax(1), torch.randn(4, 8))
    assert _reduction_loop(made.passed(LONG)) == [[ReduceOp.MAX], [ReduceOp.SUM]]


def test_rows_without_a_finite_value() -> None:
    rows = torch.full((3, 12), -float("inf"), dtype=torch.float64)
    rows[1, 3] = 2.0
    rows[2, 5] = float("nan")
    made = region(lambda x: (x.softmax(1), x.log_softmax(1)), rows)
    made.check(made.passed(LONG))
