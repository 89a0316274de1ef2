"""Depthwise convolutions of whose result a chain reads parts: what reads them is computed with the windows, in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import region
from tests.unit.test_render_cuda import inputs_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=1)

Model = Callable[[Tensor, Tensor, Tensor], Tensor]


def conv1d(x: Tensor, w: Tensor, b: Tensor, padding: int) -> Tensor:
    return F.conv1d(x, w, b, padding=padding, groups=x.shape[1])


def conv2d(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x, w, b, padding=1, groups=x.shape[1])


PARTS: dict[str, tuple[Model, tuple[int, ...], tuple[int, ...]]] = {
    "all but the end": (lambda x, w, b: F.silu(conv1d(x, w, b, 3)[..., :-3]), (2, 6, 40), (6, 1, 4)),
    "all but both ends": (lambda x, w, b: conv1d(x, w, b, 8)[..., 4:-4] * 2, (3, 4, 60), (4, 1, 9)),
    "one sample": (lambda x, w, b: F.silu(conv1d(x, w, b, 3)[..., :-3]), (1, 6, 40), (6, 1, 4)),
    "gated halves of the channels": (lambda x, w, b: F.glu(conv2d(x, w, b), 1), (2, 8, 9, 12), (8, 1, 3, 3)),
    "every second row": (lambda x, w, b: torch.tanh(conv2d(x, w, b)[:, :, ::2]), (2, 4, 10, 12), (4, 1, 3, 3)),
    "an image without its border": (
        lambda x, w, b: conv2d(x, w, b)[..., 1:-1, 1:-1].relu(),
        (2, 4, 10, 14),
        (4, 1, 3, 3),
    ),
    "from the end": (lambda x, w, b: conv1d(x, w, b, 1).flip(2) + 1, (2, 4, 30), (4, 1, 3)),
}
WHOLE: dict[str, tuple[Model, tuple[int, ...], tuple[int, ...]]] = {
    "read twice": (
        lambda x, w, b: (lambda y: y[..., 1:] - y[..., :-1])(conv1d(x, w, b, 1)),
        (2, 4, 30),
        (4, 1, 3),
    ),
    "reduced": (lambda x, w, b: conv1d(x, w, b, 3)[..., :-3].mean(2), (2, 4, 30), (4, 1, 4)),
    "a window over it": (lambda x, w, b: F.max_pool1d(conv1d(x, w, b, 1), 3, 1), (2, 4, 30), (4, 1, 3)),
}


@needs_compiler
@pytest.mark.parametrize("name", [*PARTS, *WHOLE])
@pytest.mark.thinned(5)
def test_values(name: str) -> None:
    function, *shapes = (PARTS | WHOLE)[name]
    x, w = (torch.randn(shape) for shape in shapes)
    made = region(function, x, w, torch.randn(shapes[0][1]))
    program = made.passed(pass_options(SMALL, AnchorSource.GENERATED))
    assert not program.calls
    assert (len(program.kernels) == 1) is (name in PARTS)
    made.check(program, tolerance=1e-5)
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    for output in program.outputs:
        np.testing.assert_allclose(got[output], wanted[output], rtol=1e-5, atol=1e-5)


def test_loads_of_a_causal_convolution_are_shared() -> None:
    """Four results of four points need seven elements: one access for four of them and three single ones."""
    function, *shapes = PARTS["all but the end"]
    x, w = (torch.empty(shape, device="meta") for shape in shapes)
    made = region(function, x, w, torch.empty(shapes[0][1], device="meta"))
    program = made.passed(pass_options(SMALL, AnchorSource.GENERATED))
    text = render(program, SMALL).text
    assert text.count("fp::load_vector<4>(arg0_1") == 1
