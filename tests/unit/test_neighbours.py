"""Windows over neighbours: what several share is loaded once, in whole accesses, and the values are eager's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.render import describe, render
from tests.support.emulate import emulate
from tests.support.regions import region, tensor_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1, l2_bytes=4096)

Case = tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype, int, int]
# a function, the shape and type of its input, the vectors that results are written in, and the loads of a row of windows
CASES: dict[str, Case] = {
    "overlapping, a border": (lambda x: F.max_pool2d(x, 3, 2, 1), (8, 12, 8, 32), torch.float32, 2, 1),
    "overlapping, three axes": (lambda x: F.avg_pool3d(x, 3, 2, 1), (4, 9, 5, 6, 32), torch.float32, 2, 1),
    "what is there counted": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        (8, 12, 8, 32),
        torch.float32,
        2,
        1,
    ),
    "side by side, halves": (lambda x: F.max_pool2d(x, 2), (8, 24, 8, 64), torch.float16, 4, 1),
    "computed points": (lambda x: F.max_pool2d(torch.relu(1 - 2 * x), 2).exp(), (8, 12, 8, 32), torch.float32, 2, 1),
    "neighbours": (lambda x: F.avg_pool1d(x, 5, 1, 2), (8, 24, 64), torch.float32, 4, 3),
    "neighbours, bfloat16": (lambda x: F.avg_pool1d(x, 3, 2, 1), (8, 64, 64), torch.bfloat16, 4, 1),
    "rows that begin anywhere": (lambda x: F.max_pool2d(x, 3, 2, 1), (8, 12, 9, 33), torch.float32, 1, 0),
    "a row that ends before its windows": (
        lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        (8, 12, 8, 31),
        torch.float32,
        1,
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    function, shape, dtype, width, accesses = CASES[name]
    x = torch.randn(shape).to(dtype)
    x.view(-1)[torch.randint(x.numel(), (5,))] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1.0]).to(dtype)
    made = region(function, x)
    program = made.passed(pass_options(SMALL))
    source = render(program, SMALL)
    said = describe(program, program.kernels[0], SMALL)
    assert (f"vectors of {width}" if width > 1 else "single elements") in said
    assert source.text.count("fp::load_vector<") == accesses
    results = emulate(program, source, made.memory(program))
    got = tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0]))
    torch.testing.assert_close(got, made.eager()[0], equal_nan=True)


ROWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype, str]] = {
    "an access": (lambda x: F.avg_pool2d(x, 4), (8, 4, 12, 28), torch.float32, "fp::load_vector<4>"),
    "two accesses": (lambda x: F.avg_pool2d(x, 8), (8, 4, 24, 56), torch.float32, "fp::load_run<8, 4>"),
    "an access of halves": (lambda x: F.max_pool2d(x, 8), (8, 4, 24, 56), torch.float16, "fp::load_vector<8>"),
    "three accesses of halves": (
        lambda x: F.avg_pool2d(x, (2, 24)), (8, 4, 6, 72), torch.bfloat16, "fp::load_run<24, 8>"
    ),
    "pairs": (lambda x: F.max_pool2d(x, 6), (8, 4, 12, 30), torch.float32, "fp::load_run<6, 2>"),
    "pairs of halves, of whole rows": (lambda x: F.avg_pool2d(x, 6), (8, 4, 12, 48), torch.float16, "fp::load_run<6, 2>"),
    "more points than are unrolled": (
        lambda x: F.max_pool3d(x, (3, 6, 4), (1, 6, 4)), (4, 3, 8, 12, 12), torch.float32, "fp::load_vector<4>"
    ),
    "odd, of whole rows": (lambda x: F.avg_pool2d(x, 5), (8, 4, 15, 40), torch.float32, ""),
    "rows that begin anywhere": (lambda x: F.avg_pool2d(x, 8), (8, 4, 24, 57), torch.float32, ""),
    "too many registers": (lambda x: F.avg_pool1d(x, 32), (8, 4, 96), torch.float32, ""),
}  # fmt: skip
"""Windows of single results whose rows are these accesses, if any."""


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_windows_that_share_nothing(name: str) -> None:
    function, shape, dtype, access = ROWS[name]
    x = torch.randn(shape).to(dtype)
    x.view(-1)[torch.randint(x.numel(), (5,))] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1.0]).to(dtype)
    made = region(function, x)
    program = made.passed(pass_options(SMALL))
    source = render(program, SMALL)
    assert "single elements" in describe(program, program.kernels[0], SMALL)
    assert set(re.findall(r"fp::load_\w+<[\d, ]+>", source.text)) == ({access} if access else set())
    results = emulate(program, source, made.memory(program))
    got = tensor_of(results[program.outputs[0]], program.buffer(program.outputs[0]))
    torch.testing.assert_close(got, made.eager()[0], equal_nan=True)
    assert "fp::load_" not in render(program, SMALL, aligned=False).text


def test_inputs_that_begin_anywhere_are_read_element_by_element() -> None:
    made = region(lambda x: F.max_pool2d(x, 3, 2, 1), torch.empty(8, 12, 8, 32, device="meta"))
    program = made.passed(pass_options(SMALL))
    assert "load_vector" not in render(program, SMALL, aligned=False).text
