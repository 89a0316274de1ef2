"""Blocks that overlap by a sector where rows begin anywhere: every element is stored, by one block, in whole sectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.render import describe, render
from tests.support.emulate import emulate
from tests.support.regions import region, tensor_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=1, l2_bytes=4096)

Case = tuple[Callable[[Tensor], Any], tuple[int, ...], torch.dtype, str]
CASES: dict[str, Case] = {
    "columns of a thread": (lambda x: x.log_softmax(1), (3, 5, 1025), torch.float32, "8 rows also the next block's"),
    "shared columns": (lambda x: x.softmax(1), (3, 65, 333), torch.float32, "8 rows also the next block's"),
    "pairs": (lambda x: x.softmax(1), (3, 64, 1026), torch.float32, "vectors of 2"),
    "halves": (lambda x: x.softmax(1), (2, 5, 2047), torch.float16, "16 rows also the next block's"),
    "once per row, too": (
        lambda x: (x - x.amax(1, keepdim=True), x.amax(1)),
        (2, 40, 801),
        torch.float32,
        "8 rows also the next block's",
    ),
    "bytes": (lambda x: x - x.amax(1, keepdim=True), (3, 65, 333), torch.uint8, ""),
    "short runs": (lambda x: x.softmax(1), (40, 65, 33), torch.float32, ""),
    "rows of whole sectors": (lambda x: x.softmax(1), (3, 65, 336), torch.float32, ""),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(5)
def test_values(name: str) -> None:
    function, shape, dtype, said = CASES[name]
    made = region(function, (8 * torch.randn(shape)).to(dtype))
    program = made.passed(pass_options(SMALL))
    source = render(program, SMALL)
    plan = describe(program, program.kernels[0], SMALL)
    assert said in plan
    assert ("also the next" in plan) == bool(said)
    results = emulate(program, source, made.memory(program))
    for output, want in zip(program.outputs, made.eager(), strict=True):
        torch.testing.assert_close(tensor_of(results[output], program.buffer(output)), want)


def test_sectors_are_stored_whole() -> None:
    """The blocks that the schedule and the condition of a store give each sector of a row's neighbours to, counted by hand."""
    rows, cols, lanes, sector = 701, 3, 32, 8
    own = lanes - sector
    stored = np.zeros((cols, rows), int)
    for block in range(-(-rows // own)):
        for lane in range(lanes):
            row = block * own + lane
            for col in range(cols) if row < rows else ():
                if 0 <= lane - min((col * rows + row) % sector, row) < own:
                    stored[col, row] += 1
    assert (stored == 1).all()
