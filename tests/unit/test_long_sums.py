"""Sums of which a GPU's thread adds up many numbers, on the host: equal numbers are rounded to one side in all threads alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.passes.split import SplitPolicy
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region

H200 = DeviceFacts.h200()


@needs_compiler
@pytest.mark.parametrize(
    ("function", "shape", "repeated", "kind"),
    [
        (lambda x: x.square().sum() * 0.1, (1, 3), (20011, 3), "LongSum"),  # columns by groups of threads
        (lambda x: x.square().sum(0) * 0.1, (1, 9), (4001, 9), "PairedSum"),
        (lambda x: x.sum(1) * 0.1, (3, 1), (3, 701), "Sum"),  # few enough a thread
        (lambda x: x.sum(1) * 0.1, (2, 1), (2, 70001), "LongSum"),  # columns by a block
    ],
)
def test_sums_of_equal_numbers(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], repeated: tuple[int, ...], kind: str
) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(43)) + 1
    whole = replace(pass_options(H200), split=SplitPolicy(workers=1, least_piece=1, lanes=1))
    program = region(function, x.expand(repeated)).passed(whole)
    source = render(program, H200)
    assert f"fp::{kind}<float>" in source.text
    (name,) = program.inputs
    (result,) = emulate(program, source, {name: x.numpy().reshape(-1)}).values()
    exact = function(x.double().expand(repeated)).numpy()
    assert np.abs(result / exact.reshape(-1) - 1).max() <= 4.8e-7
