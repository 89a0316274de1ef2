"""Kernels that walk the same rows become one, and only those: how many are left, and that they mean the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusepass.codegen.ir.program import Program, Role
from tests.support.regions import NO_SPLIT, region

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """A model, its input, and what is left of it.

    Attributes:
        kernels: the number of reductions in each reduction loop of each kernel; () for a pointwise kernel.
        temporaries: how many buffers are written by one kernel for another.
    """

    model: Callable[..., Any]
    shape: tuple[int, ...]
    kernels: tuple[tuple[int, ...], ...]
    temporaries: int = 0
    channels_last: bool = False


def _sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).double()


class Then(nn.Module):
    """A module and a function of its result."""

    def __init__(self, module: nn.Module, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.module = module.double()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.module(x))


def _less(x: Tensor, rows: Tensor) -> Tensor:
    return x - rows - rows.roll(1, 0)


FUSED: dict[str, Case] = {
    "few points of different inputs": Case(lambda x, y: (torch.relu(x), torch.relu(y)), (4, 9), ((),)),
    "two halves": Case(lambda x: (x[:2].relu(), x[2:].relu()), (4, 9), ((),)),
    "layer norm": Case(_sequence(nn.LayerNorm(12)), (5, 3, 12), ((1,),)),
    "layer norm over three dimensions": Case(_sequence(nn.LayerNorm((4, 3, 5))), (2, 4, 3, 5), ((1,),)),
    "layer norm and gelu": Case(_sequence(nn.LayerNorm(12), nn.GELU()), (5, 12), ((1,),)),
    "group norm": Case(_sequence(nn.GroupNorm(2, 6), nn.ReLU()), (2, 6, 3, 4), ((1,),)),
    "group norm channels_last": Case(_sequence(nn.GroupNorm(2, 6)), (2, 6, 3, 4), ((1,),), channels_last=True),
    "conv, group norm channels_last": Case(
        _sequence(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6), nn.Hardswish()), (2, 3, 6, 5), ((1,),), channels_last=True
    ),
    "conv, instance norm": Case(_sequence(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)), (2, 3, 6, 5), ((1,),)),
    "linear, group norm, mish": Case(_sequence(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Mish()), (3, 6), ((1,),)),
    "batch norm, training": Case(
        _sequence(nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()), (3, 4, 5, 2), ((1,),)
    ),
    "batch norm, running statistics": Case(
        _sequence(nn.BatchNorm2d(4)), (3, 4, 5, 2), ((1,),)
    ),  # which counts batches, too
    "batch norm, evaluation": Case(
        _sequence(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), (2, 3, 5, 5), ((),)
    ),
    "softmax": Case(lambda x: x.softmax(-1), (4, 9), ((1, 1),)),
    "softmax over channels": Case(lambda x: F.gelu(x).softmax(1), (2, 5, 3, 4), ((1, 1),)),
    "log_softmax": Case(lambda x: x.log_softmax(1), (4, 9), ((1, 1),)),
    "logsumexp": Case(lambda x: F.hardswish(x).logsumexp(1), (4, 9, 2), ((1, 1),)),
    "subtract the mean": Case(lambda x: x - x.mean((2, 3), keepdim=True), (2, 3, 4, 5), ((1,),)),
    "mean of a norm": Case(Then(nn.GroupNorm(2, 6), lambda x: x.mean((1, 2, 3))), (2, 6, 3, 4), ((1, 1), (1,)), 1),
    "mean of a norm's rows": Case(Then(nn.LayerNorm(12), lambda x: x.mean(-1)), (4, 12), ((1, 1),)),
    "norm of a softmax": Case(
        Then(nn.LayerNorm(12), lambda x: F.layer_norm(x.softmax(-1), (12,))), (4, 12), ((1, 1, 1, 1),)
    ),
    "normalize": Case(lambda x: F.normalize(x, dim=1), (4, 9), ((1,),)),
    "residual": Case(lambda x: x + F.layer_norm(F.gelu(x) + x, (12,)), (4, 12), ((1,),)),
    "two statistics": Case(lambda x: (x - x.amin(1, True)) / (x.amax(1, True) - x.amin(1, True)), (4, 9), ((2,),)),
    "two outputs of one input": Case(lambda x: (torch.relu(x), torch.sigmoid(x) * 2), (4, 9), ((),)),
    "two rows of one input": Case(lambda x: (x.sum(1), x.amax(1)), (4, 9), ((2,),)),
    "two rows beside each other": Case(lambda x: torch.cat((x.mean(-1), x.amax(-1)), 1), (3, 4, 9), ((2,),)),
    "three rows stacked": Case(
        lambda x: torch.stack((x.amin((2, 3)), x.mean((2, 3)).relu(), x.amax((2, 3))), 2), (2, 3, 4, 5), ((3,),)
    ),
    "two channels beside each other": Case(
        lambda x: torch.cat((x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1), (2, 5, 3, 4), ((2,),)
    ),
    "columns beside each other": Case(lambda x: torch.cat((x.sum(0), x.amax(0) * 2)), (9, 4), ((2,),)),
    "a value and its sum": Case(lambda x: (F.gelu(x), F.gelu(x).sum(1)), (4, 9), ((1,),)),
    "a value and its norm": Case(lambda x: (x + x.sin(), F.layer_norm(x + x.sin(), (12,))), (4, 12), ((1,),)),
    "a window of rows": Case(lambda x: F.avg_pool1d(x - x.mean(2, keepdim=True), 3, 1, 1), (2, 4, 9), ((1,),)),
    "what is read, otherwise": Case(lambda x: (x.softmax(1), x.relu(), x.exp() + 1), (4, 9), ((1, 1),)),
    "pointwise beside rows of one element": Case(lambda x: (x.relu(), x.sum(1)), (5, 1), ((),)),
    "sum of everything": Case(lambda x: x * x.sum(), (4, 9), ((1,),)),
    "variance and mean": Case(lambda x: (x.var(1), x.mean(1)), (4, 9), ((2,),)),
    "maximum and its place": Case(lambda x: tuple(x.max(1)), (4, 9), ((1,),)),
    "max pool, softmax": Case(lambda x: F.max_pool2d(x, 2).softmax(1), (2, 4, 6, 6), ((1, 1),)),
    "bias, pool, norm": Case(Then(nn.GroupNorm(2, 4), torch.tanh), (2, 4, 6, 6), ((1,),)),
    "a pool that is read twice": Case(
        lambda x: (lambda pooled: (x - pooled, pooled.relu()))(F.avg_pool1d(x, 5, 1, 2)), (1, 513, 512), ((),)
    ),
    "rows of one element": Case(lambda x: x - x.mean(1, keepdim=True), (5, 1), ((),)),
    "one row": Case(lambda x: x.flatten().softmax(0), (3, 4), ((1, 1),)),
}

APART: dict[str, Case] = {
    "rows and columns": Case(lambda x: x - x.mean(0, keepdim=True) - x.mean(1, keepdim=True), (4, 9), ((1,), (1,)), 1),
    "transposed rows": Case(lambda x: x.softmax(1).t().softmax(1), (4, 9), ((1, 1), (1, 1)), 2),
    "another row's value": Case(lambda x: x - x.mean(1, keepdim=True).roll(1, 0), (4, 9), ((1,), ()), 1),
    "its own and another row's value": Case(lambda x: _less(x, x.mean(1, keepdim=True)), (4, 9), ((1,), ()), 1),
    "the rows in reverse": Case(lambda x: x - x.mean(1, keepdim=True).flip(0), (4, 9), ((1,), ()), 1),
    "some of the rows": Case(lambda x: x[:2] - x.mean(1, keepdim=True)[:2], (4, 9), ((1,), ()), 1),
    "a row beside the input": Case(lambda x: torch.cat((x.sum(1, True), x), 1), (4, 9), ((1,), ()), 1),
    "rows of two inputs beside each other, different inputs": Case(
        lambda x, y: torch.cat((x.sum(1, True), y.amax(1, True)), 1), (4, 9), ((1,), (1,), ()), 2
    ),
    "a row between zeros": Case(lambda x: F.pad(x.sum(1, True), (1, 1)), (4, 9), ((1,), ()), 1),
    "a padded softmax": Case(lambda x: F.pad(x.softmax(1), (1, 1)), (4, 9), ((1, 1), ()), 2),
    "wider rows": Case(
        lambda x: F.layer_norm(F.batch_norm(x, None, None, training=True), (4, 5)),
        (6, 4, 5),
        ((1,), (1,)),
        2,
    ),
    "many points of different inputs": Case(lambda x, y: (torch.relu(x), torch.relu(y)), (513, 512), ((), ())),
    "windows of different sizes": Case(
        lambda x: (F.avg_pool1d(x, 5, 1, 2), F.max_pool1d(x, 3, 1, 1)), (1, 513, 512), ((), ())
    ),
    "another order of different inputs": Case(lambda x, y: (torch.relu(x), torch.relu(y.t()).t()), (4, 9), ((),)),
    "a long row and its sum": Case(lambda x: (x.relu(), x.sum(1)), (2, 8193), ((), (1,))),
    "a norm and what is written across": Case(
        lambda x: (x.mT.contiguous().relu(), F.layer_norm(x, (9,))), (2, 4, 9), ((), (1,))
    ),
    "a value for another norm": Case(
        lambda x: (F.layer_norm(x, (9,)), x[:, :4].relu()), (4, 9), ((1,), ())
    ),
    "different lengths": Case(lambda x: (x.relu(), x[:, :4].relu()), (4, 9), ((), ())),
    "batch norm, pool, softmax": Case(
        lambda x: F.max_pool2d(F.batch_norm(x, None, None, training=True), 2).softmax(1), (3, 4, 6, 6), ((1,), (1, 1)), 2
    ),
}  # fmt: skip


def _reduction_loop(program: Program) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(len(reduction_loop) for reduction_loop in kernel.reduction_loops) for kernel in program.kernels)


def _temporaries(program: Program) -> int:
    return sum(buffer.role is Role.TEMP for buffer in program.buffers)


@pytest.mark.parametrize("name", [*FUSED, *APART])
@pytest.mark.thinned(2)
def test_kernels_left(name: str) -> None:
    case = (FUSED | APART)[name]
    inputs = [torch.randn(case.shape, dtype=F64) for _ in range(2 if name.endswith("different inputs") else 1)]
    if case.channels_last:
        inputs = [x.to(memory_format=torch.channels_last) for x in inputs]
    made = region(case.model, *inputs)
    program = made.passed(NO_SPLIT)
    assert _reduction_loop(program) == case.kernels
    assert _temporaries(program) == case.temporaries
    made.check(program)


def test_a_value_that_an_intermediate_kernel_needs_is_written_before_it() -> None:
    """Column means come from row means; both are used by what follows."""

    def function(x: Tensor) -> Tensor:
        rows = x.mean(1, keepdim=True)
        columns = (x - rows).mean(0, keepdim=True)
        return (x - rows) * columns

    made = region(function, torch.randn(4, 9, dtype=F64))
    program = made.passed(NO_SPLIT)
    made.check(program)
    assert _reduction_loop(program) == ((1,), (1,))
    written: set[str] = set()
    for kernel in program.kernels:
        assert not [name for name in kernel.reads - written if program.buffer(name).role is Role.TEMP]
        written |= kernel.writes


def test_running_statistics_join_the_reduction() -> None:
    made = region(_sequence(nn.BatchNorm2d(4, momentum=0.3)), torch.randn(3, 4, 5, 2, dtype=F64))
    program = made.passed(NO_SPLIT)
    reducing = next(kernel for kernel in program.kernels if kernel.reduction_loops)
    assert {store.buffer for store in reducing.row_stores} == {"out0", "out1"}
    assert {store.buffer for store in reducing.stores} == {"out3"}


def test_every_reduction_is_in_the_earliest_sweep_that_it_can_be_in() -> None:
    def function(x: Tensor) -> Tensor:
        top = x.amax(1, keepdim=True)
        return (x - top).exp().sum(1, keepdim=True) + x.sum(1, keepdim=True) + (x * 2).sum(1, keepdim=True) * x

    made = region(function, torch.randn(4, 9, dtype=F64))
    program = made.passed(NO_SPLIT)
    assert _reduction_loop(program) == ((3, 1),)
    made.check(program)


def test_origins_are_kept_in_order() -> None:
    made = region(lambda x: (x - x.mean(1, keepdim=True)).relu(), torch.randn(4, 9, dtype=F64))
    (kernel,) = made.passed(NO_SPLIT).kernels
    assert kernel.origin == ("mean", "relu")
    assert kernel.name == "region_0"
