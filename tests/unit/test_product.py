"""Matrix products as kernels: what the kernels compute (every thread run on the host), how they are laid out, and when they are chosen."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.product import Arithmetic, Product
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorOptions
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule_product import (
    ProductSchedule,
    preferred,
    product_length,
    schedule_product,
    serves,
)
from fusepass.codegen.schedule_product.tiles import TILINGS, Tiling
from fusepass.errors import IRError
from fusepass.numerics.check import compare
from tests import compile_cuda
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.machine_code import told_by_ptxas
from tests.support.numpy_ops import Array
from tests.support.products import BF16, CASES, F16, F32, H200, ONE, TILED, Case, assert_close, generated, tiling_id
from tests.support.regions import NO_SPLIT, memory_of, region, tensor_of
from tests.support.thinned import thinned
from tests.unit.test_render_cuda import inputs_of


def run(program: Program, facts: DeviceFacts, inputs: dict[str, Array], *, aligned: bool = True) -> dict[str, Array]:
    return emulate(program, render(program, facts, aligned=aligned), inputs, shift=0 if aligned else 1)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(5)
def test_values(name: str) -> None:
    case = CASES[name]
    program = generated(case)
    verify(program)
    assert not program.calls
    inputs = inputs_of(program)
    assert_close(case, program, run(program, ONE, inputs), interpret(program, inputs))


@needs_compiler
@pytest.mark.parametrize("name", ["linear", "plain", "both turned", "half", "half, turned", "bfloat16"])
@pytest.mark.thinned(3)
def test_values_where_nothing_is_aligned(name: str) -> None:
    case = CASES[name]
    program = generated(case)
    inputs = inputs_of(program)
    assert_close(case, program, run(program, ONE, inputs, aligned=False), interpret(program, inputs))


def with_tiling(monkeypatch: pytest.MonkeyPatch, tiling: Tiling, program: Program) -> bool:
    """Leave `tiling` alone to choose from; says whether it serves `program`."""
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", (tiling,))
    return schedule_product(program.kernels[0], program, ONE) is not None


@needs_compiler
@pytest.mark.parametrize(
    "tiling", thinned([each for each in TILINGS if not (each.runs or each.teams)], 5), ids=tiling_id
)
@pytest.mark.thinned(6)
def test_values_of_each_tile(tiling: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    served = 0
    for case in TILED.values():
        program = generated(case)
        if with_tiling(monkeypatch, tiling, program):
            served += 1
            inputs = inputs_of(program)
            assert_close(case, program, run(program, ONE, inputs), interpret(program, inputs))
    assert served >= (1 if tiling.groups else len(TILED))


@needs_compiler
def test_a_device_with_little_shared_memory_gets_fewer_stages() -> None:
    little = replace(ONE, shared_bytes_per_block=48 << 10)
    case = CASES["linear"]
    program = generated(case)
    plan = schedule_product(program.kernels[0], program, little)
    assert plan is not None
    assert plan.shared_bytes <= 48 << 10
    inputs = inputs_of(program)
    assert_close(case, program, run(program, little, inputs), interpret(program, inputs))


ACCURATE = {
    "float32, few terms": Case(48, 40, 8),
    "float32": Case(48, 40, 300),
    "float32, many terms": Case(32, 32, 3000),
    "float32, in pieces": Case(32, 32, 3000, length=512),
    "half": Case(48, 40, 300, dtype=F16),
    "bfloat16, in pieces": Case(48, 40, 512, dtype=BF16, length=128),
}


@needs_compiler
@pytest.mark.parametrize("centre", [0.0, 1.5])
@pytest.mark.parametrize("name", ACCURATE)
@pytest.mark.thinned(5)
def test_as_exact_as_float32(name: str, centre: float) -> None:
    """The error against float64 is at most twice that of float32 sums, term by term as cuBLAS adds them."""
    case = ACCURATE[name]
    program = generated(case, chain=False)
    torch.manual_seed(1)
    dtype = {F16: torch.float16, BF16: torch.bfloat16}.get(case.dtype, torch.float32)
    a = (torch.randn(case.rows, case.inner) + centre).to(dtype)
    w = (torch.randn(case.columns, case.inner) + centre).to(dtype)
    found = run(program, ONE, {"a": memory_of(a), "w": memory_of(w)})["mm_out"]
    actual = tensor_of(found, program.buffer("mm_out"))
    plain = torch.zeros(case.rows, case.columns)
    for k in range(case.inner):
        plain += a[:, k, None].float() * w[None, :, k].float()
    judged = compare(actual, plain.to(dtype), a.double() @ w.double().t())
    assert judged.ok, judged.explain()


BY_WARPS = ["linear", "turned, odd", "TF32", "in uneven pieces", "bfloat16, turned and odd"]
BY_GROUPS = ["linear, odd", "plain", "TF32", "bfloat16, turned and odd"]


@needs_compiler
@pytest.mark.parametrize(("name", "groups"), [*((n, False) for n in BY_WARPS), *((n, True) for n in BY_GROUPS)])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, "two infinities", "largest", "all ones"])
@pytest.mark.thinned(5)
def test_what_is_not_finite_spreads_as_in_plain_arithmetic(
    name: str, groups: bool, bad: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tuple(tiling for tiling in TILINGS if tiling.groups is groups)
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", chosen)
    case = CASES[name]
    program = generated(case, chain=False)
    torch.manual_seed(2)
    dtype = {F16: torch.float16, BF16: torch.bfloat16}.get(case.dtype, torch.float32)
    a, w = torch.randn(case.rows, case.inner), torch.randn(case.columns, case.inner)
    w[1] = 0  # a product with an infinity is no number
    if bad == "two infinities":
        a[3, 7], a[3, 9], a[4, 2] = torch.inf, -torch.inf, -torch.inf
    elif bad == "all ones":  # a NaN that becomes a number when it is rounded up
        a.view(torch.int32)[3, 7] = 0x7FFFFFFF
    elif bad == "largest":
        a[3], w[2] = 0, 0
        a[3, 7], w[2, 7] = torch.finfo(dtype).max, 1.0
    else:
        a[3, 7] = bad
    a, w = a.to(dtype), w.to(dtype)
    stored = [
        tensor if not down else tensor.t().contiguous().t()
        for tensor, down in ((a, case.left_down), (w, case.right_across))
    ]
    inputs = {name: memory_of(tensor) for name, tensor in zip("aw", stored, strict=True)}
    actual = tensor_of(run(program, ONE, inputs)["mm_out"], program.buffer("mm_out")).float()
    wanted = (a.double() @ w.double().t()).to(dtype).float()
    assert torch.equal(actual.isnan(), wanted.isnan())
    assert torch.equal(actual.isposinf(), wanted.isposinf())
    assert torch.equal(actual.isneginf(), wanted.isneginf())
    assert wanted.isfinite().any()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(x)) + y


def _scaled(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(bias, a, b, beta=0.5, alpha=2.0).relu()


ABSORBED: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "linear": (nn.Sequential(nn.Linear(6, 5), nn.GELU()), (torch.randn(4, 6),)),
    "linear of a sequence": (nn.Sequential(nn.Linear(6, 5), nn.GELU()), (torch.randn(2, 3, 6),)),
    "with a residual": (Residual(), (torch.randn(2, 3, 6), torch.randn(2, 3, 5))),
    "with a residual of other strides": (Residual(), (torch.randn(4, 6), torch.randn(5, 4).t())),
    "one sample": (nn.Sequential(nn.Linear(6, 5), nn.ReLU()), (torch.randn(1, 6),)),
    "half": (nn.Sequential(nn.Linear(6, 5), nn.ReLU()).half(), (torch.randn(4, 6).half(),)),
    "bfloat16 of a sequence": (nn.Sequential(nn.Linear(6, 5), nn.GELU()).bfloat16(), (torch.randn(2, 3, 6).bfloat16(),)),
    "a batch": (lambda a, b: torch.bmm(a, b).tanh(), (torch.randn(2, 3, 6), torch.randn(2, 6, 4))),
    "a turned batch": (lambda a, b: torch.bmm(a, b.transpose(1, 2)).tanh(), (torch.randn(2, 3, 6), torch.randn(2, 4, 6))),
    "scaled sum": (_scaled, (torch.randn(2, 1, 4), torch.randn(2, 3, 6), torch.randn(2, 6, 4))),
    "scaled sum of halves": (_scaled, (torch.randn(2, 3, 1).half(), torch.randn(2, 3, 6).half(), torch.randn(2, 6, 4).half())),
}  # fmt: skip

ALWAYS = replace(NO_SPLIT, anchors=AnchorOptions(lambda program, kernel: True))
IN_PIECES = replace(ALWAYS, product_length=lambda program, kernel: 2)


@pytest.mark.parametrize("name", ABSORBED)
def test_what_follows_is_the_epilogue(name: str) -> None:
    model, inputs = ABSORBED[name]
    made = region(model, *inputs)
    program = made.passed(ALWAYS)
    assert not program.calls
    (kernel,) = program.kernels
    assert isinstance(kernel.anchor, Product)
    made.check(program, tolerance=4e-3 if inputs[0].dtype is torch.float16 else None)
    pieces = made.passed(IN_PIECES)
    assert [kernel.anchor is None for kernel in pieces.kernels] == [False, True]
    made.check(pieces, tolerance=4e-3 if inputs[0].dtype is torch.float16 else None)


def test_what_cannot_be_the_epilogue_reads_the_result() -> None:
    made = region(nn.Sequential(nn.Linear(6, 5), nn.Softmax(1)), torch.randn(4, 6))
    program = made.passed(ALWAYS)
    assert [kernel.anchor is None for kernel in program.kernels] == [False, True]
    made.check(program)


def test_what_no_kernel_does_stays_with_the_library() -> None:
    doubles = region(nn.Sequential(nn.Linear(6, 5), nn.ReLU()).double(), torch.randn(4, 6, dtype=torch.float64))
    assert [call.target for call in doubles.passed(ALWAYS).calls][-1] == "aten.mm.default"
    empty = region(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), torch.randn(0, 6))
    assert [call.target for call in empty.passed(ALWAYS).calls][-1] == "aten.mm.default"
    refused = region(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), torch.randn(4, 6))
    assert refused.passed(NO_SPLIT).calls == refused.program.calls


def test_the_setting_says_whether_float32_is_rounded() -> None:
    model, x = nn.Sequential(nn.Linear(64, 68), nn.ReLU()), torch.randn(72, 64)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    found = []
    try:
        for allowed in (False, True):
            matmul.allow_tf32 = allowed
            made = region(model, x)
            assert ("TF32 allowed" in program_text(made.program)) is allowed
            anchor = made.passed(ALWAYS).kernels[0].anchor
            assert isinstance(anchor, Product)
            found.append(anchor.arithmetic)
            few = region(model, x[:4]).passed(ALWAYS).kernels[0].anchor
            assert isinstance(few, Product)
            assert few.arithmetic is Arithmetic.TF32_THREE, "the library may take another kernel for few rows"
    finally:
        matmul.allow_tf32 = before
    assert found == [Arithmetic.TF32_THREE, Arithmetic.TF32]


def test_text_and_rules() -> None:
    program = generated(Case(20, 40, 520, length=128))
    assert (
        "mm_out_sum: product of a strides (0,520,1) by w strides (0,520,1), 520 terms, 5 pieces of 128, TF32 x 3"
        in (program_text(program))
    )
    (kernel, merge) = program.kernels
    assert isinstance(kernel.anchor, Product)
    beyond = replace(kernel.anchor, left=replace(kernel.anchor.left, row=521))
    for broken, fault in (
        (replace(kernel, anchor=beyond), "reads a out of range"),
        (replace(kernel, rows=kernel.rows[1:]), "5 pieces, batch, row and column"),
        (replace(kernel, anchor=replace(kernel.anchor, dtype=F16)), "no buffer of f16"),
    ):
        with pytest.raises(IRError, match=fault):
            verify(replace(program, kernels=(broken, merge)))


def test_a_tile_fits_its_device() -> None:
    for case in CASES.values():
        program = generated(case)
        plan = schedule_product(program.kernels[0], program, H200)
        assert plan is not None
        assert plan.shared_bytes <= H200.shared_bytes_per_block
        assert plan.threads * plan.resident <= H200.max_threads
        arithmetic = "TF32" if case.tf32 else "TF32 x 3" if case.dtype is DType.F32 else "halves"
        assert describe(program, program.kernels[0], H200).endswith(arithmetic)


def test_few_terms_leave_room_for_more_blocks() -> None:
    """A block has nothing to do while its numbers come, or its results leave: others have, and few panels take little memory."""

    def plan_of(case: Case) -> ProductSchedule:
        program = generated(case)
        plan = schedule_product(program.kernels[0], program, H200)
        assert plan is not None
        return plan

    for case, most in (
        (Case(16, 1 << 18, 24, left_down=True), 16),
        (Case(1 << 18, 64, 64), 64),
        (Case(1 << 17, 1664, 16, dtype=F16), 64),
    ):
        few = plan_of(replace(case, tf32=case.dtype is F32))
        assert few.tiling.rows <= most
        assert 4 * few.shared_bytes <= H200.shared_bytes_per_block
    assert plan_of(Case(1 << 17, 1664, 640, dtype=F16)).tiling.rows >= 128


def test_chosen_where_the_estimate_is_clear() -> None:
    def chosen(case: Case, facts: DeviceFacts = H200) -> bool:
        program = generated(case)
        assert serves(program, program.kernels[0], facts) is (facts.capability >= 80)
        return preferred(program, program.kernels[0], facts)

    large = Case(1024, 8192, 8192)
    assert chosen(large)
    assert not chosen(replace(large, tf32=True))
    assert not chosen(replace(large, dtype=F16))
    assert not chosen(replace(large, rows=16))
    assert not chosen(replace(large, inner=128))
    assert not chosen(large, replace(H200, arch="sm_80"))
    assert not chosen(large, replace(H200, arch="sm_75"))


def test_sums_in_pieces_fill_the_device() -> None:
    def blocks(rows: int, columns: int, inner: int) -> tuple[int, int]:
        whole = generated(Case(rows, columns, inner))
        length = product_length(whole, whole.kernels[0], H200)
        program = generated(Case(rows, columns, inner, length=length))
        plan = schedule_product(program.kernels[0], program, H200)
        assert plan is not None
        return length, plan.blocks

    assert blocks(4096, 4096, 4096)[0] == 4096
    assert blocks(4096, 4096, 64)[0] == 64
    for rows, columns, inner in ((1, 4096, 4096), (16, 4096, 4096), (256, 256, 8192), (64, 1000, 2048)):
        length, count = blocks(rows, columns, inner)
        assert length < inner
        assert count >= 0.9 * H200.multiprocessors


def test_places_beyond_32_bits() -> None:
    program = generated(Case(70_000, 64, 40_000))
    plan = schedule_product(program.kernels[0], program, H200)
    assert plan is not None
    assert plan.wide
    assert "fp::Operand<float, int64_t, 70000, 40000, 40000, 1, true, 4>" in render(program, H200).text


@needs_compiler
def test_values_with_wide_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule_product._MAX_INT", 1)
    case = CASES["a batch, in pieces"]
    program = generated(case)
    inputs = inputs_of(program)
    assert_close(case, program, run(program, ONE, inputs), interpret(program, inputs))


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "linear, odd",
        "both turned",
        "in uneven pieces",
        "TF32",
        "half",
        "half, odd",
        "bfloat16, turned and odd",
    ],
)
def test_what_is_left_for_nvcc(name: str) -> None:
    compile_cuda.keep(render(generated(CASES[name]), H200))


@pytest.mark.parametrize(
    "tiling", [each for each in TILINGS if each.groups and not (each.runs or each.teams)], ids=tiling_id
)
@pytest.mark.thinned(10)
def test_groups_keep_their_sums_in_registers(tiling: Tiling, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where ptxas moves sums while products run, it lets the products run one by one, and says so."""
    large = Case(1024, 1024, 1024)
    for case in (large, replace(large, right_across=True), replace(large, tf32=True), replace(large, dtype=BF16)):
        program = generated(case)
        if not with_tiling(monkeypatch, tiling, program):
            continue
        source = render(program, H200)
        assert "fp::GroupMultiplier" in source.text
        told = told_by_ptxas(source, tmp_path)
        assert "C75" not in told, told
        spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", told)]
        assert spilled, told
        assert not any(spilled), told
