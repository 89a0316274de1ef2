"""Operators that only move elements: the rendered CUDA text, run on the host, gives eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import TILES, memory_of, region
from tests.unit.test_render_cuda import SMALL

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "channels last": lambda x: x.clone(memory_format=torch.channels_last),
    "channels behind": lambda x: x.movedim(1, -1).clone(memory_format=torch.contiguous_format),
    "channels ahead": lambda x: x.movedim(-1, 1).clone(memory_format=torch.contiguous_format),
    "transpose": lambda x: x.transpose(1, 2).reshape(-1),
    "samples last": lambda x: x.transpose(0, -1).clone(memory_format=torch.contiguous_format),
    "pixel_shuffle": lambda x: F.pixel_shuffle(torch.cat([x] * 4, 1), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)), 2),
    "channel_shuffle": lambda x: F.channel_shuffle(torch.cat([x] * 3, 1), 3),
    "cat": lambda x: torch.cat([x, x[:, :1], x], 1),
    "cat last": lambda x: torch.cat([x, x[..., 1:], x], -1),
    "stack": lambda x: torch.stack([x, x.flip(0), x], -1),
    "roll": lambda x: x.roll((1, 2), (1, -1)),
    "flip": lambda x: x.flip(1, -1),
    "repeat": lambda x: x.repeat(1, 2, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(3, -1),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "triangle": lambda x: x.tril(),
    "windows": lambda x: x.unfold(1, 1, 1).unfold(2, 1, 1).clone(memory_format=torch.contiguous_format),
    "every second": lambda x: x[..., ::2].clone(memory_format=torch.contiguous_format),
    "expand": lambda x: x[:, None].expand(-1, 3, -1, -1, -1).clone(memory_format=torch.contiguous_format),
}


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits at all, NaNs of all kinds among them."""
    if dtype is torch.bool:
        return torch.randint(2, shape).bool()
    if not dtype.is_floating_point:
        return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, shape, dtype=dtype)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return bits(shape, whole).view(dtype)


@st.composite
def inputs(draw: Any) -> Tensor:
    """Four dimensions that lie in any order, with gaps or without."""
    samples = st.one_of(st.integers(1, 3), st.sampled_from([2, 4]))  # which the elements of a vector may be of in turn
    shape = draw(st.tuples(samples, st.integers(1, 70), st.integers(1, 12), st.integers(1, 40)))
    order = draw(st.sampled_from([(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 3, 2)]))
    gap = draw(st.sampled_from([0, 0, 1, 3]))
    torch.manual_seed(draw(st.integers(0, 99)))
    sizes = [shape[dim] for dim in order]
    sizes[-1] += gap
    made = bits(tuple(sizes), draw(st.sampled_from(DTYPES)))
    return made[..., gap:].permute([order.index(dim) for dim in range(4)])


@needs_compiler
@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(COPIES)), inputs(), st.booleans())
def test_elements_keep_their_bits(name: str, x: Tensor, aligned: bool) -> None:
    made = region(COPIES[name], x)
    program = made.passed(TILES)
    got = emulate(program, render(program, SMALL, aligned=aligned), made.memory(program), shift=0 if aligned else 1)
    (wanted,) = made.eager()
    (result,) = (got[output] for output in program.outputs)
    assert np.array_equal(result.view(np.uint8), memory_of(wanted).view(np.uint8))
