"""Sums over all of what is computed row by row: one kernel has the rows, a second one their sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import region

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


@needs_compiler
@pytest.mark.parametrize("name", ["divergence", "planes of a sample"])
def test_emulated(name: str) -> None:
    made = region(NESTED[name], torch.randn(66, 256), torch.randn(66, 256))
    program = made.passed(pass_options(H200))
    memory = made.memory(program)
    got, wanted = emulate(program, render(program, H200), memory), interpret(program, memory)
    for output in program.outputs:
        np.testing.assert_allclose(got[output], wanted[output], rtol=1e-5, atol=1e-5)
