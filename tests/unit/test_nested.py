"""Sums over all of what is computed row by row: one kernel has the rows, a second one their sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import Gather
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.passes.pipeline import run_passes
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import region, trace

H200 = DeviceFacts.h200()
NESTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divergence": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "entropy": lambda x, y: -(x.softmax(-1) * x.log_softmax(-1)).sum(),
    "distance": lambda x, y: ((x.softmax(-1) - y.softmax(-1)) ** 2).mean(),
    "mean of a norm": lambda x, y: F.layer_norm(x, (x.shape[-1],)).mean(),
    "variance of a norm": lambda x, y: F.layer_norm(x, (x.shape[-1],)).var(),
    "maximum": lambda x, y: x.softmax(-1).amax(),
    "columns": lambda x, y: F.batch_norm(x, None, None, training=True).abs().sum(),
    "planes": lambda x, y: F.instance_norm(x.view(6, -1, 4, 16)).relu().sum(),
    "planes of a sample": lambda x, y: F.group_norm(x.view(6, -1, 4, 16), 4).relu().mean((1, 2, 3)),
}
APART: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "along the rows": lambda x, y: x.softmax(-1).sum(0),
    "other rows": lambda x, y: (x.softmax(-1) * y.softmax(0)).sum(),
    "the place of an extreme": lambda x, y: x.softmax(-1).argmax(),
}
"""What reads the rows again, or is one of few that do."""


@pytest.mark.parametrize("name", NESTED)
def test_rows_are_read_once(name: str) -> None:
    made = region(NESTED[name], torch.randn(66, 256), torch.randn(66, 256))
    passed = made.passed(pass_options(H200))
    assert len(passed.kernels) == 2
    assert not passed.kernels[1].reads & {*passed.inputs}
    made.check(passed, tolerance=1e-5)


@pytest.mark.parametrize("name", APART)
def test_what_is_read_again(name: str) -> None:
    made = region(APART[name], torch.randn(66, 256), torch.randn(66, 256))
    passed = made.passed(pass_options(H200))
    assert any(kernel.reads & {*passed.inputs} for kernel in passed.kernels[1:])
    made.check(passed, tolerance=1e-5)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "rows": (lambda x, t: F.cross_entropy(x, t), (300, 20)),
    "smoothed and weighted": (
        lambda x, t: F.cross_entropy(x, t, x[0].exp(), ignore_index=3, label_smoothing=0.1),
        (300, 20),
    ),
    "pixels": (lambda x, t: F.cross_entropy(x, t), (3, 20, 12, 10)),
    "likelihoods of samples": (lambda x, t: x.log_softmax(1).gather(1, t[:, None]).sum(), (300, 20)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_short_rows_is_computed_where_the_row_is(name: str) -> None:
    """What is summed over the batch is one number of each row, if not the weights; the element that a class names is found in the row."""
    function, shape = LOSSES[name]
    x, t = torch.randn(shape), torch.randint(20, (shape[0], *shape[2:]))
    made = region(function, x, t)
    passed = made.passed(pass_options(H200))
    readers = [kernel for kernel in passed.kernels if passed.inputs[0] in kernel.reads]
    assert sum(kernel.col_count == 20 for kernel in readers) == 1
    assert all(kernel.row_count * kernel.col_count < x.numel() for kernel in readers if kernel.col_count != 20)
    made.check(passed, tolerance=1e-5)


def test_the_classes_of_long_rows_are_looked_up_when_all_rows_are_summed() -> None:
    made = region(F.cross_entropy, torch.randn(40, 5000), torch.randint(5000, (40,)))
    passed = made.passed(pass_options(H200))
    assert not any(isinstance(node, Gather) for node in passed.kernels[0].nodes)
    made.check(passed, tolerance=1e-5)


def test_a_class_out_of_range_is_reported_where_the_row_is() -> None:
    model = Loss()
    good, bad = torch.tensor([0, 3, 1]), torch.tensor([0, 4, 1])
    x = torch.randn(3, 4)
    fused = fusepass.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(fused(x, good), model(x, good))
        with pytest.raises(IndexError, match="out of bounds"):
            fused(x, bad)


class Loss(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target)


def pooled_twice(x: Tensor, w: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(F.max_pool2d(F.conv2d(x, w, padding=1).relu(), 2), (3, 5))


def test_kernels_with_a_convolution_stay_as_they_are() -> None:
    """The mean of one element that is left of a pool is none that the convolution's rows have to do with."""
    graph, _ = trace(pooled_twice, torch.randn(2, 32, 6, 10), torch.randn(16, 32, 3, 3))
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    program, builder = lower(graph, "region", names, tf32=True)
    options = pass_options(replace(H200, multiprocessors=1), AnchorSource.HALVES)
    passed = run_passes(program, builder, options, check=True)
    assert [kernel.anchor is not None for kernel in passed.kernels].count(True) == 1


@needs_compiler
@pytest.mark.parametrize("name", ["divergence", "planes of a sample"])
def test_emulated(name: str) -> None:
    made = region(NESTED[name], torch.randn(66, 256), torch.randn(66, 256))
    program = made.passed(pass_options(H200))
    memory = made.memory(program)
    got, wanted = emulate(program, render(program, H200), memory), interpret(program, memory)
    for output in program.outputs:
        np.testing.assert_allclose(got[output], wanted[output], rtol=1e-5, atol=1e-5)
