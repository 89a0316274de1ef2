"""Rows that the blocks of a cluster share: when, and what they compute when every thread of all blocks runs on the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.errors import IRError
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import region, tensor_of

H200 = DeviceFacts.h200()
A100 = replace(H200, arch="sm_80")
SMALL = replace(H200, multiprocessors=2, l2_bytes=1 << 20, shared_bytes_per_block=3 << 10)


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _passed(
    function: Callable[[Tensor], Tensor], rows: int, cols: int, facts: DeviceFacts, dtype: torch.dtype = torch.float32
) -> Program:
    return region(function, torch.empty(rows, cols, device="meta", dtype=dtype)).passed(pass_options(facts))


@pytest.mark.parametrize(
    ("rows", "cols", "cluster"),
    [
        (1024, 32_768, 1),  # one block holds it
        (1024, 49_152, 1),
        (1024, 65_536, 2),
        (1024, 65_537, 2),
        (1024, 100_277, 2),
        (8, 65_536, 1),  # too few rows: they are split
        (512, 131_072, 1),  # too long
    ],
)
def test_when(rows: int, cols: int, cluster: int) -> None:
    program = _passed(_softmax, rows, cols, H200)
    assert program.kernels[0].cluster == cluster
    if cluster > 1:
        (kernel,) = program.kernels
        plan = schedule(kernel, program, H200)
        assert plan.blocks == rows * cluster
        assert isinstance(plan, Rows)
        assert plan.cluster is not None
        assert plan.keep.in_registers
        assert plan.lanes * plan.unroll >= plan.cluster.part
        assert (cluster - 1) * plan.cluster.part < plan.vectors(cols) <= cluster * plan.cluster.part
        assert f"fp::launch_clusters<region_0>({cluster}, {plan.blocks}," in render(program, H200).text
        plan = schedule(kernel, program, H200, aligned=False)
        assert isinstance(plan, Rows)
        assert plan.cluster is not None
        assert plan.cluster.members == cluster


def test_a_ring_is_better() -> None:
    assert _passed(lambda x: F.layer_norm(x, x.shape[1:]), 1024, 65_536, H200).kernels[0].cluster == 1


def test_other_devices_have_no_clusters() -> None:
    assert all(kernel.cluster == 1 for kernel in _passed(_softmax, 1024, 65_536, A100).kernels)


def test_a_cluster_is_of_a_size_that_devices_have() -> None:
    program = _passed(_softmax, 1024, 65_536, H200)
    (kernel,) = program.kernels
    with pytest.raises(IRError, match="cluster of 3 blocks"):
        verify(replace(program, kernels=(replace(kernel, cluster=3),)))


@needs_compiler
@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (_softmax, (3, 1400), torch.float32),
        (nn.LayerNorm(1501).to(torch.bfloat16), (3, 1501), torch.bfloat16),
        (nn.LayerNorm(1536).to(torch.float16), (3, 1536), torch.float16),
        (lambda x: (F.layer_norm(x, (1301,)).softmax(-1), x.mean(-1)), (3, 1301), torch.float32),
    ],
)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.thinned(5)
def test_values(
    function: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    aligned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With so little room that short rows are shared."""
    for name, value in {
        "lanes._WORDS": 8,
        "lanes._PACKED": (),
        "lanes._WEIGHTED_WORDS": 0,
        "lanes._FEW_THREADS": 128,
        "lanes._FEW_WORDS": 0,
        "cluster._LANES": 64,
        "cluster._WORDS": 4,
    }.items():
        monkeypatch.setattr(sys.modules[f"fusepass.codegen.schedule.{name.split('.')[0]}"], name.split(".")[1], value)
    torch.manual_seed(0)
    made = region(function, torch.randn(shape).to(dtype))
    program = made.passed(pass_options(SMALL))
    assert any("clusters of" in describe(program, kernel, SMALL) for kernel in program.kernels)
    got = emulate(program, render(program, SMALL, aligned=aligned), made.memory(program), shift=0 if aligned else 1)
    for name, wanted in zip(program.outputs, made.run(program), strict=True):
        bound = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[wanted.dtype]
        torch.testing.assert_close(tensor_of(got[name], program.buffer(name)), wanted, rtol=bound, atol=bound)
