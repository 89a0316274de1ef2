"""Sums of which a GPU's thread adds up many numbers, on the host: equal numbers are rounded to one side in all threads alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region

H200 = DeviceFacts.h200()


@needs_compiler
@pytest.mark.parametrize(
    ("function", "shape", "repeated", "long"),
    [
        (lambda x: x.square().sum() * 0.1, (1, 3), (20011, 3), True),  # columns by groups of threads
        (lambda x: x.square().sum(0) * 0.1, (1, 5), (4001, 5), True),
        (lambda x: x.sum(1) * 0.1, (3, 1), (3, 701), False),  # few enough a thread
        (lambda x: x.sum(1) * 0.1, (2, 1), (2, 70001), True),  # columns by a block
    ],
)
def test_sums_of_equal_numbers(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], repeated: tuple[int, ...], long: bool
) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(43)) + 1
    program = region(function, x.expand(repeated)).passed(pass_options(H200))
    source = render(program, H200)
    assert ("LongSum" in source.text) is long
    (name,) = program.inputs
    (result,) = emulate(program, source, {name: x.numpy().reshape(-1)}).values()
    exact = function(x.double().expand(repeated)).numpy()
    assert np.abs(result / exact.reshape(-1) - 1).max() <= 4.8e-7
