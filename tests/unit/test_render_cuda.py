"""CUDA sources: their text, that nvcc takes them, and what they compute when every thread is run on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.product import Arithmetic, Product
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.render import describe, render, render_general
from tests import compile_cuda
from tests.support import kernels as k
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import STORAGE, decode, interpret
from tests.support.numpy_ops import Array

H200 = DeviceFacts.h200()
# Few rows already fill it and its cache is tiny, so small kernels get the schedules of large ones.
SMALL = replace(H200, multiprocessors=1, l2_bytes=4096)

PROGRAMS: dict[str, Callable[[], Program]] = {
    "one element": lambda: k.affine(1),
    "odd count": lambda: k.affine(10_003),
    "odd count of halves": lambda: k.affine(10_003, k.F16),
    "vectors with a tail": lambda: k.affine(4 * 2_503),
    "half": lambda: k.affine(16_392, k.F16),
    "bfloat16": lambda: k.affine(8 * 555, k.BF16),
    "double": lambda: k.affine(4_998, k.F64),
    "integers": lambda: k.affine(3_000, k.I64),
    "one bias per channel": lambda: k.channel_bias_gelu(4, 6, 92),
    "one bias per channel, odd": lambda: k.channel_bias_gelu(3, 5, 49),
    "one bias per column": lambda: k.last_axis_bias(33, 96),
    "one bias per odd column": lambda: k.last_axis_bias(64, 63),
    "transpose": lambda: k.transpose(40, 36),
    "kernels one after the other": lambda: k.chain(1_001, 4),
    "mixed layouts": lambda: k.mixed_layouts(2, 64, 16 * 16),
    "mixed layouts, few channels": lambda: k.mixed_layouts(3, 3, 35 * 9),
    "mixed layouts, odd": lambda: k.mixed_layouts(2, 67, 7 * 7),
    "mixed layouts, a pair": lambda: k.mixed_layouts(1, 2, 2),
    "mixed layouts, few places": lambda: k.mixed_layouts(2, 130, 4),
    "mixed layouts of halves": lambda: k.mixed_layouts(2, 72, 64, k.F16),
    "mixed layouts of bfloat16 and float": lambda: k.mixed_layouts(2, 24, 36, k.BF16, k.F32),
    "mixed layouts of doubles": lambda: k.mixed_layouts(2, 20, 36, k.F64),
    "mixed layouts of bytes": lambda: k.mixed_layouts(2, 96, 144, DType.U8),
    "rows that begin anywhere": lambda: k.mixed_layouts(2, 40, 15 * 17),
    "rows that begin at 16 bytes": lambda: k.mixed_layouts(3, 36, 14 * 14),
    "rows that begin anywhere, one of them": lambda: k.out_of_channels_last(3, 40, 15 * 17),
    "rows that begin anywhere, odd channels": lambda: k.out_of_channels_last(2, 33, 11 * 13),
    "rows that begin anywhere, halves": lambda: k.out_of_channels_last(2, 22, 17 * 19, k.F16),
    "rows that begin anywhere, halves of floats": lambda: k.out_of_channels_last(2, 24, 13 * 13, k.F32, k.F16),
    "rows that begin anywhere, bfloat16 and float": lambda: k.mixed_layouts(2, 24, 13 * 13, k.BF16, k.F32),
    "rows that begin anywhere, doubles": lambda: k.out_of_channels_last(2, 20, 9 * 9, k.F64),
    "rows that begin anywhere, bytes": lambda: k.out_of_channels_last(1, 24, 25 * 23, DType.U8),
    "rows that begin at 16 bytes, halves": lambda: k.mixed_layouts(2, 24, 20 * 20, k.F16),
    "tiles that overlap": lambda: k.mixed_layouts(2, 37, 1001),
    "tiles that overlap, halves": lambda: k.mixed_layouts(1, 33, 3001, k.F16),
    "tiles that overlap, vectors": lambda: k.out_of_channels_last(4, 32, 1021),
    "tiles that overlap, vectors of halves": lambda: k.out_of_channels_last(8, 32, 2049, k.BF16),
    "tiles that overlap, doubles": lambda: k.out_of_channels_last(2, 20, 331, k.F64),
    "tiles that overlap, bytes": lambda: k.out_of_channels_last(1, 40, 61 * 67, DType.U8),
    "tiles that overlap, bytes of floats": lambda: k.out_of_channels_last(2, 24, 45 * 47, k.F32, k.F16),
    "tiles that overlap at 16 bytes": lambda: k.out_of_channels_last(2, 64, 34 * 34),
    "few channels in a piece": lambda: k.into_channels_last(3, 3, 1021),
    "few channels in a piece, halves": lambda: k.into_channels_last(3, 5, 48 * 48, k.F16),
    "few channels out of a piece": lambda: k.out_of_channels_last(3, 3, 1021),
    "few channels out of a piece, halves": lambda: k.out_of_channels_last(4, 3, 31 * 33, k.F16),
    "few channels out of a piece, bytes": lambda: k.out_of_channels_last(4, 3, 31 * 33, DType.U8),
    "columns that begin anywhere, halves": lambda: k.into_channels_last(2, 72, 721, k.BF16),
    "columns that begin anywhere, bytes": lambda: k.into_channels_last(1, 144, 333, DType.U8),
    "into channels last": lambda: k.into_channels_last(3, 64, 16 * 64),
    "into channels last, tiles of two samples": lambda: k.into_channels_last(3, 40, 17 * 59),
    "few channels into last": lambda: k.into_channels_last(3, 3, 35 * 9),
    "few channels into last, vectors": lambda: k.into_channels_last(2, 8, 16 * 33),
    "into channels last, halves": lambda: k.into_channels_last(2, 136, 64, k.F16),
    "many channels last": lambda: k.mixed_layouts(1, 1100, 66),
    "concatenation of channels last": lambda: k.concatenate_channels_last(2, 6, 10, 35),
    "pooling of channels last": lambda: k.max_pool_channels_last(2, 36, 13, 3, 2),
    "pooling of channels last, padded": lambda: k.max_pool_channels_last(2, 24, 9, 3, 2, 1),
    "pooling of channels last, odd": lambda: k.max_pool_channels_last(2, 7, 9, 2, 2),
    "pooling into channels last": lambda: k.max_pool_channels_last(2, 24, 9, 3, 1, 1, into_last=True),
    "concatenation": lambda: k.concatenate(3, 6, 10, 64),
    "concatenation, odd": lambda: k.concatenate(3, 3, 2, 7),
    "pooling": lambda: k.max_pool(3, 16, 2, 2, 0),
    "pooling of windows that overlap": lambda: k.max_pool(3, 16, 5, 1, 2),
    "pooling of windows that overlap, no padding": lambda: k.max_pool(2, 18, 3, 1, 0),
    "pooling with padding": lambda: k.max_pool(2, 17, 3, 2, 1),
    "rows of 64": lambda: k.layer_norm(130, 64, with_gelu=True),
    "rows of 63": lambda: k.layer_norm(101, 63),
    "rows of 62": lambda: k.layer_norm(101, 62),
    "rows of 768": lambda: k.layer_norm(30, 768),
    "rows of 1000": lambda: k.layer_norm(25, 1000),
    "rows of 4096": lambda: k.layer_norm(12, 4096),
    "three rows of 4096": lambda: k.layer_norm(3, 4096),
    "rows of 20000": lambda: k.layer_norm(3, 20_000),
    "rows of 32768": lambda: k.layer_norm(2, 32_768),
    "rows in shared memory": lambda: k.layer_norm(2, 40_960),
    "odd rows in shared memory": lambda: k.layer_norm(2, 36_001),
    "rows of halves in shared memory": lambda: k.layer_norm(2, 81_920, k.F16),
    "rows read again": lambda: k.layer_norm(2, 70_000),
    "rows of halves": lambda: k.layer_norm(40, 1024, k.F16),
    "rows of bfloat16": lambda: k.layer_norm(21, 320, k.BF16),
    "softmax of 10": lambda: k.softmax_rows(205, 10),
    "softmax of 2": lambda: k.softmax_rows(500, 2),
    "softmax of 1": lambda: k.softmax_rows(50, 1),
    "softmax of one row": lambda: k.softmax_rows(1, 5000),
    "softmax of 8 channels": lambda: k.softmax_channels(3, 8, 36 * 36),
    "softmax of 16 channels": lambda: k.softmax_channels(2, 16, 23 * 23),
    "softmax of 64 channels": lambda: k.softmax_channels(4, 64, 16 * 16),
    "softmax of 100 channels": lambda: k.softmax_channels(2, 100, 10 * 10),
    "softmax of 1000 channels": lambda: k.softmax_channels(3, 1000, 7 * 7),
    "softmax of 3000 channels": lambda: k.softmax_channels(1, 3000, 36),
    "softmax of 6000 channels": lambda: k.softmax_channels(1, 6000, 36),
    "softmax of channels last": lambda: k.softmax_channels_last(3, 64, 20 * 20),
    "softmax of channels last, odd": lambda: k.softmax_channels_last(3, 11, 13 * 13),
    "softmax of channels last, halves": lambda: k.softmax_channels_last(2, 136, 16 * 16, k.F16),
    "norm over the width of channels last": lambda: k.width_norm_channels_last(3, 64, 64),
    "norm over a short width": lambda: k.width_norm_channels_last(50, 48, 10),
    "norm over an odd width": lambda: k.width_norm_channels_last(4, 67, 33),
    "norm over a long width": lambda: k.width_norm_channels_last(3, 40, 200),
    "norm over a width, halves": lambda: k.width_norm_channels_last(4, 64, 128, k.F16),
    "norm over a width, doubles": lambda: k.width_norm_channels_last(2, 32, 50, k.F64),
    "statistics per channel": lambda: k.batch_norm_stats(4, 6, 12 * 12),
    "statistics per channel, long": lambda: k.batch_norm_stats(5, 3, 60 * 60),
    "statistics per channel, odd": lambda: k.batch_norm_stats(5, 7, 11 * 11),
    "statistics over the batch": lambda: k.batch_norm_1d(256, 40),
    "statistics over a long batch": lambda: k.batch_norm_1d(5000, 36),
    "sum": lambda: k.row_reduction(10, 3000, ReduceOp.SUM),
    "sum of columns": lambda: k.row_reduction(103, 3000, ReduceOp.SUM, outer=True),
    "sum of short columns": lambda: k.row_reduction(1040, 9, ReduceOp.SUM, outer=True),
    "sum of nothing": lambda: k.row_reduction(70, 0, ReduceOp.SUM),
    "product": lambda: k.row_reduction(10, 77, ReduceOp.PROD, k.F64),
    "largest half": lambda: k.row_reduction(301, 256, ReduceOp.MAX, k.F16),
    "smallest of columns": lambda: k.row_reduction(1024, 64, ReduceOp.MIN, outer=True),
    "any": lambda: k.row_reduction(64, 1000, ReduceOp.MAX, k.BOOL),
    "sum of integers": lambda: k.row_reduction(6, 1001, ReduceOp.SUM, k.I64),
    "argmax": lambda: k.row_reduction(40, 1000, ReduceOp.ARGMAX),
    "argmin of columns": lambda: k.row_reduction(100, 130, ReduceOp.ARGMIN, outer=True),
    "long argmax": lambda: k.row_reduction(2, 20_000, ReduceOp.ARGMAX),
    "long moments": lambda: k.row_reduction(2, 65_536, ReduceOp.MOMENTS),
    "long moments with a tail": lambda: k.row_reduction(2, 65_548, ReduceOp.MOMENTS),
    "long moments of columns": lambda: k.row_reduction(1040, 700, ReduceOp.MOMENTS, outer=True),
    "long softmax state": lambda: k.row_reduction(3, 50_000, ReduceOp.SOFTMAX),
    "normalisation in two kernels": lambda: k.batch_norm_2d(3, 6, 64),
    "merged moments": lambda: k.merge_moments(64, 33),
    "merged moments of one row": lambda: k.merge_moments(1, 264),
    "merged moments, many": lambda: k.merge_moments(2, 3000),
}


def inputs_of(program: Program, seed: int = 0) -> dict[str, Array]:
    """Memory for the inputs: values that tell positions apart and that halves can hold."""
    random = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for buffer in program.buffers:
        if buffer.role is not Role.INPUT:
            continue
        if buffer.dtype is DType.BOOL:
            made[buffer.name] = random.random(buffer.extent) < 0.001
        elif buffer.dtype.is_float:
            values = random.standard_normal(buffer.extent).astype(np.float32) + 1.5
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            made[buffer.name] = bits if buffer.dtype is DType.BF16 else values.astype(STORAGE[buffer.dtype])
        else:
            made[buffer.name] = random.integers(-9, 9, buffer.extent).astype(STORAGE[buffer.dtype])
    return made


def assert_close(program: Program, got: dict[str, Array], wanted: dict[str, Array]) -> None:
    for name in program.outputs:
        dtype = program.buffer(name).dtype
        tolerance = {DType.F16: 2e-3, DType.BF16: 1.6e-2, DType.F64: 1e-12}.get(dtype, 2e-5)
        anchors = [kernel.anchor for kernel in program.kernels]
        if any(isinstance(anchor, Product) and anchor.arithmetic is Arithmetic.TF32 for anchor in anchors):
            tolerance = 4e-3
        if any(isinstance(anchor, Product) and anchor.arithmetic is Arithmetic.HALVES for anchor in anchors):
            tolerance = max(tolerance, 1e-3)  # sums of a thousand terms, some of which cancel
        pieces = [kernel.anchor for kernel in program.kernels if kernel.partials is not None]
        if any(isinstance(anchor, Convolution) and program.buffer(anchor.source).dtype.is_half for anchor in pieces):
            tolerance = max(tolerance, 1e-3)  # a result that rounds to its neighbour is a term of sums
        np.testing.assert_allclose(
            decode(got[name], dtype).astype(np.float64),
            decode(wanted[name], dtype).astype(np.float64),
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )


@needs_compiler
@pytest.mark.parametrize(
    "facts", [pytest.param(SMALL, id="filled"), pytest.param(H200, id="empty", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.thinned(8)
def test_values(name: str, facts: DeviceFacts) -> None:
    program = PROGRAMS[name]()
    inputs = inputs_of(program)
    got = emulate(program, render(program, facts), inputs)
    assert_close(program, got, interpret(program, inputs))


@needs_compiler
@pytest.mark.parametrize(
    "name", ["vectors with a tail", "rows of 768", "softmax of 8 channels", "concatenation", "mixed layouts"]
)
def test_unaligned_inputs(name: str) -> None:
    program = PROGRAMS[name]()
    inputs = inputs_of(program)
    got = emulate(program, render(program, SMALL, aligned=False), inputs, shift=1)
    assert_close(program, got, interpret(program, inputs))


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        "one bias per channel",
        "rows of 1000",
        "softmax of 100 channels",
        "pooling of windows that overlap",
        "pooling with padding",
        "mixed layouts",
    ],
)
def test_wide_indices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule._MAX_INT", 0)
    program = PROGRAMS[name]()
    source = render(program, SMALL)
    assert "const int64_t" in source.text
    inputs = inputs_of(program)
    assert_close(program, emulate(program, source, inputs), interpret(program, inputs))


def test_the_second_reader_of_a_large_buffer_goes_backwards() -> None:
    program = k.batch_norm_2d(3, 6, 64)
    text = render(program, SMALL).text
    assert text.count("gridDim.x - 1 - blockIdx.x") == 1
    assert "gridDim" not in text.partition("__global__ void __launch_bounds__(256) bn_apply")[0]
    assert "Reuse::none" not in text
    assert "gridDim" not in render(program, H200).text


def test_the_text_reads_well() -> None:
    text = render(k.layer_norm(130, 64), H200).text
    assert "// layer_norm: native_layer_norm\n// rows [r:130], columns [c:64]\n// inner, 130 rows x 64 columns" in text
    assert "const float add_1 = (((kept_0[v] - add_0) * rsqrt_0) * weight_in_0[v]) + bias_in_0[v];" in text
    assert "\t" not in text
    assert max(map(len, text.splitlines())) < 160


def test_states_of_windows_are_no_arrays_of_arrays() -> None:
    assert (
        "fp::Max<float> max_0[16];" in render(k.max_pool(128, 56, 3, 1, 1), H200).text
    )  # nvcc begins but the first of these right


def test_nothing_is_launched_for_nothing() -> None:
    assert "fp::launch" not in render(k.affine(0), H200).text
    assert "fp::launch" in render(k.row_reduction(70, 0, ReduceOp.SUM), H200).text


def test_several_launches_can_be_replayed() -> None:
    several = render(k.chain(1_001, 2), H200)
    assert several.replay == "replay_chain"
    assert 'extern "C" int replay_chain(' in several.text
    assert render(k.in_teams(k.layer_norm(4, 600), 2, 2), H200).replay is not None  # memory is filled first
    one = render(k.affine(100), H200)
    assert one.replay is None
    assert "replay" not in one.text
    general = render_general(k.chain(1_001, 2), H200)
    assert general.replay is None


@pytest.mark.parametrize(
    "name",
    [
        "half",
        "rows of bfloat16",
        "concatenation",
        "mixed layouts of bfloat16 and float",
        "pooling of channels last",
        "pooling",
        "long argmax",
        "rows in shared memory",
        "softmax of 8 channels",
    ],
)
def test_what_is_left_for_nvcc(name: str) -> None:
    compile_cuda.keep(render(PROGRAMS[name](), H200))


@needs_compiler
@pytest.mark.parametrize(("samples", "size"), [(6, 4 * 3077), (4, 4 * 1024), (2, 4000)])
def test_what_samples_share_is_read_for_several_at_once(
    samples: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusepass.codegen.schedule.shape._LEAST_REPEATED", 1)
    program = k.last_axis_bias(samples, size)
    assert "vectors apart" in describe(program, program.kernels[0], SMALL)
    inputs = inputs_of(program)
    assert_close(program, emulate(program, render(program, SMALL), inputs), interpret(program, inputs))
