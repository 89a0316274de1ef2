"""What threads hold of a row between its phases: numbers as they were loaded, or what was computed of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.dataflow import Dataflow, kept_in_memory, kept_values, most_words, rematerialised
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.twopass import split_statistics
from fusepass.codegen.render import describe, render
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region, tensor_of

H200 = DeviceFacts.h200()
Function = Callable[[Tensor], Tensor]


def _norms_of_shares(x: Tensor) -> Tensor:
    """A softmax and two normalisations: each of five phases needs the shares."""
    return F.layer_norm(F.layer_norm(x.softmax(-1), x.shape[-1:]), x.shape[-1:])


@pytest.mark.parametrize(
    ("function", "again", "words"),
    [
        (lambda x: F.layer_norm(x, x.shape[-1:]), 0, 1),
        (lambda x: x.log_softmax(-1), 0, 1),
        (lambda x: x.softmax(-1), 1, 1),  # an exponential for the sum, and for the result
        (_norms_of_shares, 9, 1),  # of six exponentials and five quotients, one each is the first
        (lambda x: x.softmax(-1) + (x - x.mean(-1, True)), 1, 2),  # the exponential and the number itself
    ],
)
def test_what_phases_need(function: Function, again: int, words: int) -> None:
    made = region(function, torch.empty(4096, 1024, dtype=torch.float16, device="meta"))
    (kernel,) = made.passed(pass_options(H200)).kernels
    kernel = split_statistics(kernel, Builder())
    dataflow = Dataflow()
    assert rematerialised(kernel, dataflow, kept_in_memory(kernel, dataflow)) == again
    assert most_words(kernel, dataflow) == words


def test_a_value_is_held_from_the_first_phase_to_the_last_that_needs_it() -> None:
    made = region(_norms_of_shares, torch.empty(4096, 1024, device="meta"))
    (kernel,) = made.passed(pass_options(H200)).kernels
    spans = [(kept.first, kept.last) for kept in kept_values(kernel, Dataflow())]
    assert spans[0] == (0, 1)  # what was loaded, until there is its exponential
    assert all(first < last for first, last in spans)
    assert len(spans) > most_words(kernel, Dataflow())


@pytest.mark.parametrize(
    ("function", "columns", "packed"),
    [
        (lambda x: x.softmax(-1), 1024, True),
        (lambda x: F.layer_norm(x, x.shape[-1:]), 1024, True),
        (_norms_of_shares, 1024, False),
        (_norms_of_shares, 32_768, True),  # threads have no registers for so many floats
    ],
)
def test_halves_stay_packed_where_little_is_computed_again(function: Function, columns: int, packed: bool) -> None:
    made = region(function, torch.empty(4096, columns, dtype=torch.float16, device="meta"))
    program = made.passed(pass_options(H200))
    assert describe(program, program.kernels[0], H200).endswith(", packed") is packed


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [40, 1024, 1003])
@pytest.mark.thinned(3)
def test_values(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, columns).to(dtype)
    x[1, 3], x[2, 5], x[3] = torch.nan, torch.inf, -torch.inf
    facts = replace(H200, multiprocessors=2, l2_bytes=1 << 20)
    made = region(_norms_of_shares, x)
    program = made.passed(pass_options(facts))
    memory = emulate(program, render(program, facts), made.memory(program))
    (name,), (exact,) = program.outputs, made.exact()
    got = tensor_of(memory[name], program.buffer(name)).double()
    assert torch.equal(got.isnan(), exact.isnan())
    torch.testing.assert_close(got, exact.double(), rtol=2 * torch.finfo(dtype).eps, atol=2e-3, equal_nan=True)
