"""Weights that wait in shared memory for rows which take most of a multiprocessor's registers: when, and what the kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.render import render
from fusepass.codegen.schedule import ranking, schedule, weights
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule_general import generalised
from tests.support import kernels as k
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region, tensor_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=2, l2_bytes=1 << 20)
BF16 = torch.bfloat16


def _plan(
    function: Callable[..., Tensor], columns: int, dtype: torch.dtype, *weights: int, facts: DeviceFacts = H200
) -> Rows:
    """The schedule of the last kernel of `function` of rows, and of as many vectors as `weights` have lengths."""
    others = [torch.empty(length, device="meta") for length in weights]
    made = region(function, torch.empty((4096, columns), device="meta", dtype=dtype), *others)
    program = made.passed(pass_options(facts))
    plan = schedule(program.kernels[-1], program, facts)
    assert isinstance(plan, Rows)
    return plan


@pytest.mark.parametrize(
    ("columns", "dtype", "steps"),
    [
        (32_768, torch.float32, 4),
        (50_257, torch.float32, 4),
        (40_960, BF16, 6),
        (38_001, BF16, 6),
        (24_576, torch.float32, 0),  # registers for the weights of several steps
        (16_384, torch.float32, 0),  # two rows on a multiprocessor
        (32_000, BF16, 0),
        (50_257, BF16, 0),
    ],
)
def test_choice(columns: int, dtype: torch.dtype, steps: int) -> None:
    plan = _plan(nn.LayerNorm(columns, device="meta", dtype=dtype), columns, dtype)
    assert (plan.staged.steps, len(plan.staged.buffers)) == (steps, 2) if plan.staged else steps == 0
    assert plan.shared_bytes == 2 * steps * plan.lanes * 16 <= 64 << 10


def test_one_weight_comes_as_fast_without() -> None:
    assert not _plan(nn.RMSNorm(40_000, device="meta"), 40_000, torch.float32).staged


def test_bulk_copies_need_hopper() -> None:
    norm = nn.LayerNorm(40_000, device="meta")
    assert not _plan(norm, 40_000, torch.float32, facts=replace(H200, arch="sm_80")).staged


def test_what_a_sweep_reads_is_not_staged() -> None:
    """It is needed before the copies are awaited."""
    n = 40_000
    plan = _plan(lambda x, w, b: F.layer_norm(x * w, (n,), w, b), n, torch.float32, n, n)
    assert not plan.staged


def test_weights_that_begin_between_vectors_are_not_staged() -> None:
    n = 40_000
    plan = _plan(lambda x, w, b: F.layer_norm(x, (n,), w[1:], b), n, torch.float32, n + 1, n)
    assert not plan.staged


def test_other_schedules_and_those_for_several_sizes() -> None:
    program = k.layer_norm(4096, 40_000)
    (kernel,) = program.kernels
    plans = [each.plan for each in ranking(kernel, program, H200)]
    assert all(isinstance(plan, Rows) and (plan.shared_bytes or not plan.staged) for plan in plans)
    plan = generalised(schedule(kernel, program, H200), kernel, coarse=False)
    assert isinstance(plan, Rows)
    assert (plan.staged, plan.shared_bytes) == (None, 0)


def test_text() -> None:
    text = render(k.layer_norm(4096, 40_000), H200).text
    assert text.count("fp::begin_long_copy(") == 2
    assert text.index("fp::begin_long_copy(") < text.index("__syncthreads()") < text.index("fp::await_phase(")
    assert "u < 4 ? fp::as_vector<4>(weight_staged[(lane + u * 512) * 4]) : fp::load_vector<4>(weight + col)" in text
    assert '#include "fp_barriers.cuh"' in text


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(5, 32_768, torch.float32), (17, 33_003, torch.float32), (5, 40_960, BF16), (35, 37_003, BF16)],
)
def test_values(rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_LEAST_TIMES", 1)  # so that few rows have weights laid out
    monkeypatch.setattr(weights, "_LAUNCH", 0.0)
    torch.manual_seed(0)
    norm = nn.LayerNorm(columns).to(dtype)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    facts = replace(SMALL, l2_bytes=1 << 10)
    made = region(norm, torch.randn((rows, columns)).to(dtype))
    program = made.passed(pass_options(facts))
    assert len(program.kernels) == (2 if columns % 8 else 1)
    plan = schedule(program.kernels[-1], program, facts)
    assert isinstance(plan, Rows)
    assert plan.staged
    got = emulate(program, render(program, facts), made.memory(program))
    (name,) = program.outputs
    bound = 4e-2 if dtype is BF16 else 1e-5
    wanted = made.run(program)[0]
    torch.testing.assert_close(tensor_of(got[name], program.buffer(name)), wanted, rtol=bound, atol=bound)
