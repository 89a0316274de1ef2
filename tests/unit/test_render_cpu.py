"""CPU sources: their text, and what they compute once built, against the reference interpreter."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fusepass.codegen import toolchain
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.ir.program import Kernel, Program, Role, Store
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule_cpu import Walk, cpu_schedule
from tests.support import kernels as k
from tests.support import odd_kernels as odd
from tests.support.interpret import STORAGE, decode, encode, interpret
from tests.support.native import compile_command, run_native
from tests.support.numpy_ops import Array

CPU = DeviceFacts.cpu(cores=2)
REDUCTIONS = (
    ReduceOp.SUM,
    ReduceOp.PROD,
    ReduceOp.MAX,
    ReduceOp.MIN,
    ReduceOp.MOMENTS,
    ReduceOp.SOFTMAX,
    ReduceOp.ARGMAX,
    ReduceOp.ARGMIN,
)


def per_row(program: Callable[[ReduceOp], Program]) -> dict[str, Callable[[], Program]]:
    return {op.value: (lambda op=op: program(op)) for op in REDUCTIONS}


PROGRAMS: dict[str, Callable[[], Program]] = {
    "scalar": odd.scalar,
    "nothing": lambda: k.affine(0),
    "one element": lambda: k.affine(1),
    "odd count": lambda: k.affine(10_003),
    "threads": lambda: k.affine(70_001),
    "half": lambda: k.affine(16_391, k.F16),
    "bfloat16": lambda: k.affine(8 * 555 + 3, k.BF16),
    "double": lambda: k.affine(4_999, k.F64),
    "integers": lambda: k.affine(3_000, k.I64),
    "every type": lambda: odd.every_type(53),
    "awkward names": lambda: odd.awkward_names(100, 40),
    "logic": lambda: odd.logic(1000),
    "strided": lambda: odd.strided(37, 45),
    "pixel shuffle": lambda: odd.shuffle(13, 3),
    "pieces of a long axis": lambda: k.last_axis_bias(3, 20_001),
    "one bias per channel": lambda: k.channel_bias_gelu(4, 6, 92),
    "one bias per channel, odd": lambda: k.channel_bias_gelu(3, 5, 49),
    "one bias per column": lambda: k.last_axis_bias(33, 96),
    "transpose": lambda: k.transpose(40, 36),
    "concatenation": lambda: k.concatenate(3, 6, 10, 64),
    "concatenation, odd": lambda: k.concatenate(3, 3, 2, 7),
    "pooling": lambda: k.max_pool(3, 16, 2, 2, 0),
    "pooling with padding": lambda: k.max_pool(2, 17, 3, 2, 1),
    "pooling with a large window": lambda: k.max_pool(2, 17, 7, 2, 3),
    "rows of 64": lambda: k.layer_norm(130, 64, with_gelu=True),
    "rows of 63": lambda: k.layer_norm(101, 63),
    "rows of 8": lambda: k.layer_norm(501, 8),
    "rows of 768": lambda: k.layer_norm(30, 768),
    "rows of 20000": lambda: k.layer_norm(3, 20_000),
    "rows that do not stay": lambda: k.layer_norm(2, 70_001),
    "rows of halves": lambda: k.layer_norm(40, 1024, k.F16),
    "rows of bfloat16": lambda: k.layer_norm(21, 320, k.BF16),
    "long rows of halves": lambda: k.layer_norm(3, 70_001, k.F16),
    "softmax of 10": lambda: k.softmax_rows(205, 10),
    "softmax of 2": lambda: k.softmax_rows(500, 2),
    "softmax of 1": lambda: k.softmax_rows(50, 1),
    "softmax of one row": lambda: k.softmax_rows(1, 5000),
    "softmax of 8 channels": lambda: k.softmax_channels(3, 8, 36 * 36),
    "softmax of 16 channels": lambda: k.softmax_channels(2, 16, 23 * 23),
    "softmax of 100 channels": lambda: k.softmax_channels(2, 100, 10 * 10),
    "softmax of 3000 channels": lambda: k.softmax_channels(1, 3000, 36),
    "softmax of 9000 channels": lambda: k.softmax_channels(1, 9000, 36),
    "softmax in three sweeps": lambda: odd.split(k.softmax_rows(40, 2500)),
    "softmax of channels in three sweeps": lambda: odd.split(k.softmax_channels(2, 100, 10 * 10)),
    "softmax of many channels in three sweeps": lambda: odd.split(k.softmax_channels(1, 9000, 36)),
    "gelu before two sweeps": lambda: odd.split(k.layer_norm(40, 100, with_gelu=True)),
    "statistics per channel": lambda: k.batch_norm_stats(4, 6, 12 * 12),
    "statistics per channel, odd": lambda: k.batch_norm_stats(5, 7, 11 * 11),
    "statistics over the batch": lambda: k.batch_norm_1d(256, 40),
    "statistics over a long batch": lambda: k.batch_norm_1d(9000, 36),
    "sum of nothing": lambda: k.row_reduction(70, 0, ReduceOp.SUM),
    "largest of nothing": lambda: k.row_reduction(70, 0, ReduceOp.MAX, outer=True),
    "product": lambda: k.row_reduction(10, 77, ReduceOp.PROD, k.F64),
    "largest half": lambda: k.row_reduction(301, 256, ReduceOp.MAX, k.F16),
    "any": lambda: k.row_reduction(64, 1000, ReduceOp.MAX, k.BOOL),
    "all of columns": lambda: k.row_reduction(64, 100, ReduceOp.MIN, k.BOOL, outer=True),
    "sum of integers": lambda: k.row_reduction(6, 1001, ReduceOp.SUM, k.I64),
    "sum of doubles": lambda: k.row_reduction(6, 10_001, ReduceOp.SUM, k.F64),
    "normalisation in two kernels": lambda: k.batch_norm_2d(3, 6, 64),
    "merged moments": lambda: k.merge_moments(64, 33),
    "merged moments of one row": lambda: k.merge_moments(1, 264),
    "columns of three axes": lambda: odd.grid_sum((5, 3, 4, 7), (1, 2, 3)),
    "columns apart from each other": lambda: odd.grid_sum((3, 5, 4, 70), (0, 2)),
    "columns around a row": lambda: odd.grid_sum((6, 5, 300), (0, 2)),
    "columns of short axes": lambda: odd.grid_sum((40, 5, 3), (1, 2)),
    "rows inside columns": lambda: odd.grid_sum((3, 50, 9), (0, 1)),
    "axes of one point": lambda: odd.grid_sum((1, 6, 1, 5), (2, 3)),
    "one row of one": lambda: odd.grid_sum((1, 1), (1,)),
    **{f"{n} of rows": f for n, f in per_row(lambda op: k.row_reduction(37, 1111, op)).items()},
    **{f"{n} of long rows": f for n, f in per_row(lambda op: k.row_reduction(2, 9999, op)).items()},
    **{f"{n} of columns": f for n, f in per_row(lambda op: k.row_reduction(103, 333, op, outer=True)).items()},
    **{f"{n} of short rows": f for n, f in per_row(lambda op: k.row_reduction(210, 5, op)).items()},
}


def inputs_of(program: Program, seed: int = 0) -> dict[str, Array]:
    """Memory for the inputs: values that tell positions apart."""
    random = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for buffer in program.buffers:
        if buffer.role is not Role.INPUT:
            continue
        if buffer.dtype is DType.BOOL:
            made[buffer.name] = random.random(buffer.extent) < 0.5
        elif buffer.dtype.is_float:
            made[buffer.name] = encode(1 + random.standard_normal(buffer.extent) / 4, buffer.dtype)
        else:
            low = 0 if buffer.dtype is DType.U8 else -99
            made[buffer.name] = random.integers(low, 99, buffer.extent).astype(STORAGE[buffer.dtype])
    return made


def check(program: Program, inputs: dict[str, Array] | None = None, facts: DeviceFacts = CPU) -> None:
    """The built program writes what the interpreter writes, and nothing else."""
    inputs = inputs or inputs_of(program)
    got, wanted = run_native(program, inputs, facts), interpret(program, inputs)
    for name, want in wanted.items():
        dtype = program.buffer(name).dtype
        tolerance = {DType.F16: 1e-3, DType.BF16: 8e-3, DType.F64: 1e-12}.get(dtype, 4e-6)
        if not dtype.is_float:
            np.testing.assert_array_equal(got[name], want, err_msg=name)
            continue
        scale = np.nanmax(np.abs(decode(want, dtype)), initial=1, where=np.isfinite(decode(want, dtype)))
        np.testing.assert_allclose(
            decode(got[name], dtype),
            decode(want, dtype),
            rtol=tolerance * (20 if name == "part0" and "Prod" in str(program.kernels) else 1),
            atol=tolerance * min(scale, 8),
            err_msg=name,
        )


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.thinned(5)
def test_values(name: str) -> None:
    check(PROGRAMS[name]())


@pytest.mark.parametrize("name", ["one bias per channel", "softmax of 8 channels", "pieces of a long axis", "threads"])
def test_many_cores(name: str) -> None:
    check(PROGRAMS[name](), facts=DeviceFacts.cpu(cores=64))


@pytest.mark.parametrize("name", ["pixel shuffle", "pooling with padding", "argmax", "concatenation"])
def test_wide_indices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = {"argmax": lambda: k.row_reduction(7, 100, ReduceOp.ARGMAX)}.get(name, PROGRAMS.get(name))
    assert program is not None
    assert "for (int " in render(program(), CPU).text
    monkeypatch.setattr("fusepass.codegen.schedule_cpu._MAX_INT", 0)
    assert "for (int " not in render(program(), CPU).text
    check(program())


@pytest.mark.parametrize("kept", [0, 1 << 30], ids=["read again", "kept"])
@pytest.mark.parametrize(
    "name",
    ["rows of halves", "softmax in three sweeps", "softmax of channels in three sweeps", "columns around a row"],
)
def test_keeping_changes_nothing(name: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule_cpu._KEPT_BYTES", kept)
    program = PROGRAMS[name]()
    assert ("kept_0" in render(program, CPU).text) == (kept > 0)
    check(program)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize(
    "op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.SOFTMAX, ReduceOp.ARGMAX, ReduceOp.ARGMIN]
)
@pytest.mark.thinned(3)
def test_special_values(op: ReduceOp, outer: bool) -> None:
    program = k.row_reduction(70, 100, op, outer=outer)
    x = np.random.default_rng(1).standard_normal((70, 100)).astype(np.float32)
    x[3, 50], x[4, 0], x[5, 99], x[6, 7] = np.nan, np.nan, -np.inf, np.inf
    x[7] = -np.inf
    x[8, [3, 60]] = np.nan
    check(program, {"x": np.ascontiguousarray(x.T if outer else x).reshape(-1)})


def test_a_long_sum_is_accurate() -> None:
    x = np.random.default_rng(2).random(1_000_000).astype(np.float32)
    got = run_native(k.row_reduction(1, 1_000_000, ReduceOp.SUM), {"x": x})["part0"][0]
    assert abs(got / x.astype(np.float64).sum() - 1) < 1.2e-7


@pytest.mark.invariant(17)
def test_the_same_bits_on_every_run() -> None:
    for name in ("rows of 768", "softmax of 100 channels", "Sum of long rows"):
        program = PROGRAMS[name]()
        inputs = inputs_of(program)
        first, second = run_native(program, inputs), run_native(program, inputs)
        assert all(first[output].tobytes() == second[output].tobytes() for output in program.outputs)


# ---- Schedules and text


@pytest.mark.parametrize(
    ("program", "walk", "width"),
    [
        (lambda: k.affine(100), Walk.POINTWISE, 1),
        (lambda: k.layer_norm(100, 64), Walk.INNER, 1),
        (lambda: k.layer_norm(100, 16), Walk.OUTER, 32),
        (lambda: k.layer_norm(3, 16), Walk.INNER, 1),
        (lambda: odd.split(k.softmax_channels(2, 64, 4096)), Walk.OUTER, 64),
        (lambda: k.softmax_channels(2, 64, 4096), Walk.OUTER, 256),
        (lambda: k.softmax_channels(2, 64, 49), Walk.OUTER, 32),
        (lambda: k.row_reduction(4096, 500, ReduceOp.SUM, outer=True), Walk.OUTER, 256),
        (lambda: k.batch_norm_stats(5, 7, 121), Walk.INNER, 1),
    ],
)
def test_walks(program: Callable[[], Program], walk: Walk, width: int) -> None:
    made = program()
    plan = cpu_schedule(made.kernels[0], made, CPU)
    assert (plan.walk, plan.width) == (walk, width)


def test_little_work_stays_on_one_thread() -> None:
    assert "parallel" not in render(k.affine(32_768), CPU).text
    assert "#pragma omp parallel for simd schedule(static)" in render(k.affine(32_769), CPU).text


def test_the_text_reads_well() -> None:
    source = render(k.layer_norm(130, 64), CPU)
    assert source.entry == "run_layer_norm"
    of_others = {"fp_scan.h", "fp_list.h", "fp_host_defines.h", "fp_standalone.h", "fp_fingerprint.h"}
    assert {*source.headers} | of_others == {p.name for p in toolchain.include_directory().glob("*.h")}
    assert (
        "// layer_norm: native_layer_norm\n// 130 rows of 64 columns: inner, rows in blocks of 64, one thread"
        in source.text
    )
    assert "moments.push(64, x + 64 * r);" in source.text
    assert "\t" not in source.text
    assert max(map(len, source.text.splitlines())) < 160


def test_describe_says_what_the_source_says() -> None:
    program = odd.split(k.softmax_channels(20, 64, 49))
    line = describe(program, program.kernels[0], CPU)
    loops = "outer, 56 rows side by side in panels of 16, threads share the rows, values kept on the stack"
    assert line == f"20 x 49 rows of 64 columns: {loops}"
    assert line in render(program, CPU).text


def test_nothing_is_called_for_nothing() -> None:
    text = render(k.affine(0), CPU).text
    assert "affine(" not in text.partition('extern "C"')[2].replace("run_affine(", "")


@pytest.mark.parametrize(
    "name", ["half", "logic", "every type", "rows of 64", "softmax of 100 channels", "pixel shuffle", "scalar"]
)
def test_there_is_nothing_to_warn_of(name: str, tmp_path: Path) -> None:
    source = render(PROGRAMS[name](), CPU)
    path = tmp_path / "source.cpp"
    path.write_text(source.text)
    command = compile_command(source, path, tmp_path / "source.o")
    done = subprocess.run([*command, "-Wall", "-Wextra", "-Werror"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def reach(b: Builder) -> Expr:
    x = b.load("x", axis_index(Axis("i", 4096)), k.F32)
    below = b.apply(Op.EXPM1, x)
    positive = b.apply(Op.GT, x, b.const(0.0, k.F32), dtype=k.BOOL)
    return b.apply(Op.WHERE, positive, x, below, dtype=k.F32)


def chain(value: Callable[[Builder], Expr], dtype: DType) -> Program:
    b, i = Builder(), Axis("i", 4096)
    kernel = Kernel("chain", (i,), (), (), (), (Store("y", axis_index(i), value(b)),))
    return k.program(
        "chain", [k.buffer("x", Role.INPUT, [4096], dtype), k.buffer("y", Role.OUTPUT, [4096], dtype)], kernel
    )


@pytest.mark.skipif("x86_64" not in toolchain.cpu_identity(), reason="counts vector instructions of x86")
@pytest.mark.parametrize(
    "program",
    [
        lambda: k.affine(4096),
        lambda: k.affine(4096, k.F16),
        lambda: k.affine(4096, k.BF16),
        lambda: k.channel_bias_gelu(3, 5, 490),
        lambda: chain(reach, k.F32),
    ],
    ids=["float", "half", "bfloat16", "gelu", "elu"],
)
def test_gcc_vectorises(program: Callable[[], Program], tmp_path: Path) -> None:
    source = render(program(), CPU)
    path = tmp_path / "source.cpp"
    path.write_text(source.text)
    command = compile_command(source, path, tmp_path / "source.o")
    done = subprocess.run([*command, "-fopt-info-vec"], capture_output=True, text=True, check=False)
    if "g++" not in Path(command[0]).resolve().name:
        pytest.skip("the compiler is not GCC")
    head = next(i for i, line in enumerate(source.text.splitlines(), 1) if "#pragma omp simd" in line)
    loops = {int(n) for n in re.findall(r"source\.cpp:(\d+):\d+: optimized: +loop vectorized", done.stderr)}
    assert any(head <= line <= head + 8 for line in loops), done.stderr


def test_facts_do_not_leak_into_names() -> None:
    assert render(k.affine(10), CPU).text == render(k.affine(10), replace(CPU, name="another")).text
