"""Convolutions of float16 and bfloat16 as products of halves: what the kernels compute, from packed operands and from inputs as they lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusepass.codegen.generate import generate, pass_options
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorOptions, AnchorSource, generate_anchors
from fusepass.codegen.render import render
from fusepass.codegen.schedule_product import schedule_product
from fusepass.codegen.schedule_product.tiles import TILINGS, Tiling
from fusepass.codegen.search.space import search_space
from fusepass.errors import IRError
from tests import compile_cuda
from tests.support.convolutions import (
    DIRECT_HALVES,
    HALVED,
    Across,
    Case,
    Over,
    generated,
    generated_pooling,
    generated_reduction,
    program_of,
)
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import decode, encode, interpret
from tests.support.numpy_ops import Array
from tests.support.products import H200, ONE, tiling_id
from tests.support.regions import region, trace
from tests.support.values import check_values
from tests.unit.test_render_cuda import inputs_of

EVERY_HALVED = AnchorOptions(lambda program, kernel: True, AnchorSource.HALVES, warps=4)

TYPES = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}


def variants_of(case: Case) -> dict[str, Case]:
    """The case in both types and with the formats that input and result may have."""
    aligned = (-(-case.source[1] // 8) * 8,)
    found = {"float16": replace(case, dtype=DType.F16), "bfloat16": replace(case, dtype=DType.BF16)}
    for name, each in [*found.items()]:
        found[f"{name}, channels last"] = replace(each, channels_last=True, result_last=True)
        whole = replace(each, source=(case.source[0], *aligned, *case.source[2:]))
        found[f"{name}, whole places"] = replace(whole, channels_last=True, result_last=True)
        found[f"{name}, input channels last"] = replace(whole, channels_last=True)
    return found


CASES = {
    f"{name}, {way}": each
    for name, case in HALVED.items()
    for way, each in variants_of(replace(case, channels_last=False)).items()
}
CASES |= {
    **{
        f"1x1, {n}": replace(
            Case((2, 24, 5, 7), 20, (1, 1), (1, 1), (0, 0), (1, 1), dtype=DType.F16, pointwise=True),
            channels_last=a,
            result_last=b,
        )
        for n, a, b in (
            ("nchw", False, False),
            ("last", True, True),
            ("to last", False, True),
            ("from last", True, False),
        )
    },
    "neighbours, last": Case(
        (2, 32, 7, 29), 24, (3, 3), (1, 1), (1, 1), (1, 1), dtype=DType.F16, channels_last=True, result_last=True
    ),
    "neighbours, from last": Case(
        (2, 32, 7, 30), 20, (3, 3), (1, 1), (1, 1), (1, 1), dtype=DType.F16, channels_last=True
    ),
    "neighbours, to last": Case((2, 32, 7, 30), 40, (3, 3), (1, 1), (1, 1), (1, 1), dtype=DType.BF16, result_last=True),
    "neighbours, last, dilated": Case(
        (1, 64, 9, 60), 72, (2, 3), (1, 1), (0, 2), (2, 2), dtype=DType.BF16, channels_last=True, result_last=True
    ),
    "neighbours, last, 3d": Case(
        (2, 16, 3, 6, 40),
        16,
        (3, 1, 3),
        (1, 1, 1),
        (1, 0, 1),
        (1, 1, 1),
        dtype=DType.F16,
        channels_last=True,
        result_last=True,
    ),
    "neighbours, many": Case((2, 128, 5, 30), 20, (3, 3), (1, 1), (1, 1), (1, 1), dtype=DType.F16),
    "neighbours, many, last": Case(
        (2, 192, 5, 29), 24, (3, 3), (1, 1), (1, 1), (1, 1), dtype=DType.BF16, channels_last=True, result_last=True
    ),
    "neighbours, many, 3d": Case((1, 128, 3, 4, 40), 16, (3, 1, 3), (1, 1, 1), (1, 0, 1), (1, 1, 1), dtype=DType.F16),
    "neighbours, many, transposed": Case((1, 128, 4, 26), 12, (4, 4), (2, 2), (1, 1), (1, 1), True, dtype=DType.F16),
    "neighbours, many, 1d": Case((2, 128, 70), 40, (3,), (1,), (1,), (1,), dtype=DType.F16),
    "3 channels": Case((2, 3, 9, 12), 20, (7, 7), (2, 2), (3, 3), (1, 1), dtype=DType.F16),
    "3 channels last": Case(
        (2, 3, 9, 12), 20, (7, 7), (2, 2), (3, 3), (1, 1), dtype=DType.F16, channels_last=True, result_last=True
    ),
    "8 channels last, by 2": Case(
        (2, 8, 9, 12), 36, (3, 3), (2, 2), (1, 1), (1, 1), dtype=DType.BF16, channels_last=True, result_last=True
    ),
}


def halved(case: Case) -> Program:
    program = program_of(case)
    return generate_anchors(program, Builder(), EVERY_HALVED)


def operands(case: Case, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    given = {"x": torch.randn(case.source), "w": torch.randn(case.weight), "bias": torch.randn(case.out_channels)}
    return {name: tensor.to(TYPES[case.dtype]) for name, tensor in given.items()}


def memory(case: Case, given: dict[str, Tensor]) -> dict[str, Array]:
    found = {name: tensor.float().numpy() for name, tensor in given.items()}
    if case.channels_last:
        found["x"] = np.moveaxis(found["x"], 1, -1)
    return {name: encode(np.ascontiguousarray(array).ravel(), case.dtype) for name, array in found.items()}


def result(case: Case, found: Array) -> Array:
    samples, channels, *sizes = case.result
    values = decode(found, case.dtype)
    return (
        np.moveaxis(values.reshape(samples, *sizes, channels), -1, 1)
        if case.result_last
        else values.reshape(case.result)
    )


def assert_right(case: Case, given: dict[str, Tensor], found: Array) -> None:
    """Up to an ulp of the sum, rounded before the bias is added, and one of the result; sums in float32 have an error, too."""
    x, w, bias = (given[name].double() for name in ("x", "w", "bias"))
    total = torch.convolution(x, w, None, *case.geometry)  # type: ignore[call-overload]
    terms = torch.convolution(x.abs(), w.abs(), None, *case.geometry)  # type: ignore[call-overload]
    wide = (1, -1, *(1,) * len(case.kernel))
    exact = (total.to(TYPES[case.dtype]).double() + bias.view(wide)).relu() * 2
    ulp = {DType.F16: 2.0**-10, DType.BF16: 2.0**-7}[case.dtype]
    bound = 2 * ulp * total.abs() + ulp * exact + 1e-5 * terms
    assert (np.abs(result(case, found) - exact.numpy()) <= bound.numpy() + 1e-6).all()


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    case = CASES[name]
    program = halved(case)
    verify(program)
    assert not program.calls
    given = operands(case)
    assert_right(case, given, interpret(program, memory(case, given))["y"])


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("facts", [ONE], ids=["one multiprocessor"])
@pytest.mark.thinned(9)
def test_values_thread_by_thread(name: str, facts: object) -> None:
    case = CASES[name]
    program = halved(case)
    given = operands(case)
    assert_right(case, given, emulate(program, render(program, ONE), memory(case, given))["y"])


PIECES: dict[str, Case] = {
    "2d": Case((1, 512, 7, 7), 64, (3, 3), (1, 1), (1, 1), (1, 1), dtype=DType.F16),
    "1d": Case((1, 512, 40), 64, (3,), (1,), (0,), (1,), dtype=DType.BF16),
}


@needs_compiler
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", PIECES)
def test_values_of_sums_in_pieces(name: str, last: bool) -> None:
    """After all passes, as few tiles do not fill the device."""
    case = replace(PIECES[name], channels_last=last, result_last=last)
    program = generate(program_of(case), Builder(), H200, AnchorSource.HALVES).program
    verify(program)
    assert any(isinstance(kernel.anchor, Product) and kernel.anchor.pieces > 1 for kernel in program.kernels)
    given = operands(case)
    assert_right(case, given, emulate(program, render(program, H200), memory(case, given))["y"])


RUNS = [each for each in TILINGS if each.runs]


@needs_compiler
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if "neighbours, " in name[:12] and not case.result_last]
)
@pytest.mark.parametrize("tiling", [next(t for t in RUNS if t.columns == 128), RUNS[-1]], ids=tiling_id)
@pytest.mark.thinned(5)
def test_values_of_runs(name: str, tiling: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that take turns serve what lies in planes, all channels in a run."""
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", (tiling,))
    case = CASES[name]
    program = halved(case)
    kernel = program.kernels[-1]
    assert isinstance(kernel.anchor, Product)
    assert kernel.anchor.runs is not None
    if schedule_product(kernel, program, H200) is None:
        assert tiling.iterations
        assert tiling.chained or kernel.anchor.runs.are_parted
        return
    given = operands(case)
    assert_right(case, given, emulate(program, render(program, H200), memory(case, given))["y"])


@needs_compiler
@pytest.mark.parametrize(
    ("name", "over", "dtype"),
    [
        ("2d, odd channels, one by one", Over.LOGSUMEXP, DType.F16),
        ("transposed 3d, by 2", Over.SOFTMAX, DType.BF16),
        ("2d, neighbours", Over.NORMALISED, DType.F16),
    ],
)
def test_over_channels(name: str, over: Over, dtype: DType) -> None:
    program = generated_reduction(replace(HALVED[name], dtype=dtype, halves=True), over)
    assert any(isinstance(kernel.anchor, Product) and kernel.cols for kernel in program.kernels)
    check_values(program, H200, inputs_of(program), {DType.F16: 4e-3, DType.BF16: 3e-2}[dtype])


@needs_compiler
@pytest.mark.parametrize(
    ("name", "across"),
    [("2d", Across.LAYER), ("transposed, by 2 and 3, odd", Across.EACH), ("2d, neighbours", Across.BATCH)],
)
def test_over_positions(name: str, across: Across) -> None:
    program = generated_pooling(replace(HALVED[name], dtype=DType.F16, halves=True), across)
    assert any(isinstance(kernel.anchor, Product) and kernel.partials for kernel in program.kernels)
    check_values(program, H200, inputs_of(program), 4e-3)


def test_inputs_that_lie_channels_last_are_not_packed() -> None:
    """Unless channels fill no places, or places are to come in runs."""
    tiles = halved(CASES["neighbours, last"])
    (product,) = (kernel.anchor for kernel in tiles.kernels if isinstance(kernel.anchor, Product))
    assert product.left.buffer == "x"
    assert "fp::BorderedOperand<" in render(tiles, H200).text
    for name, packed in (("3 channels last", True), ("neighbours, from last", True), ("8 channels last, by 2", False)):
        assert len(halved(CASES[name]).kernels) == 2 + packed


def test_a_border_that_is_not_told_right_is_refused() -> None:
    program = halved(CASES["8 channels last, by 2"])
    *before, kernel = program.kernels
    assert isinstance(kernel.anchor, Product)
    high, wide = kernel.anchor.left.border
    for border in ((high, replace(wide, size=13)), ()):
        left = replace(kernel.anchor.left, border=border)
        broken = replace(kernel, anchor=replace(kernel.anchor, left=left))
        with pytest.raises(IRError, match="out of range"):
            verify(replace(program, kernels=(*before, broken)))


@pytest.mark.parametrize("name", ["8 channels last, by 2", "neighbours, last", "2d, neighbours, float16"])
def test_narrow_results_are_stored_in_vectors(name: str) -> None:
    """A bias is a vector, too, where columns are channels."""
    text = render(halved(CASES[name]), H200).text
    width = 4 if "by 2" in name else 8 if "last" in name else 2
    assert "fp::store_vector(y + " in text
    assert f"fp::as_vector<{width}>(room[" in text
    assert (f"= fp::load_vector<{width}>(bias" in text) is ("last" in name)


def tried(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    graph, _ = trace(model.to("meta").to(dtype), torch.empty(shape, device="meta", dtype=dtype))
    return [spec.name for spec in search_space(graph, H200, "fast")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_convolutions_are_tried_so(dtype: torch.dtype) -> None:
    name, product = "scaled halves anchor", "generated anchor"
    size = (128, 64, 56, 56)
    assert name in tried(nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU()), size, dtype)
    assert name in tried(nn.Sequential(nn.Conv2d(64, 64, 3, 2), nn.ReLU()), size, dtype)
    assert name in tried(nn.Sequential(nn.ConvTranspose2d(64, 64, 4, 2), nn.ReLU()), size, dtype)
    for channels, stride, tiled in ((64, 1, True), (64, 2, False), (128, 1, False)):
        model = nn.Sequential(nn.Conv2d(channels, 64, 3, stride), nn.ReLU())
        assert ("tiled scaled halves anchor" in tried(model, (128, channels, 56, 56), dtype)) is tiled
    assert name not in tried(nn.Sequential(nn.Conv2d(64, 64, 3, groups=2), nn.ReLU()), size, dtype)
    assert name not in tried(nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU()), (2, *size[1:]), dtype)
    alone = tried(nn.Sequential(nn.Conv2d(64, 256, 1), nn.ReLU()), size, dtype)
    assert product in alone
    assert name not in alone


@needs_compiler
@pytest.mark.parametrize("name", ["2d, float16", "neighbours, last", "8 channels last, by 2"])
def test_what_is_not_finite(name: str) -> None:
    """Numbers that are none, infinities, and sums that are too large for the type but not for float32."""
    case = replace(CASES[name], dtype=DType.F16)
    given = operands(case)
    given["w"] = given["w"].abs() + 1
    x = given["x"]
    x[0, 0, 0, 0], x[0, 1, 2, 5], x[-1, 2, -1, -1], x[-1, :, 4, 4] = float("nan"), float("inf"), float("-inf"), 6e4
    program = halved(case)
    found = result(case, emulate(program, render(program, ONE), memory(case, given))["y"])
    total = torch.convolution(*(given[each].float() for each in ("x", "w")), None, *case.geometry).half()  # type: ignore[call-overload]
    wanted = ((total + given["bias"].view(-1, 1, 1)).relu() * 2).numpy()
    assert np.isnan(wanted).any()
    assert np.isposinf(wanted).any()
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(found), kind(wanted))


@pytest.mark.parametrize(
    "name",
    ["neighbours, last", "neighbours, many, last", "8 channels last, by 2", "transposed, by 2, bfloat16, whole places"],
)
def test_what_is_left_for_nvcc(name: str) -> None:
    compile_cuda.keep(render(halved(CASES[name]), H200))


def direct(name: str) -> tuple[Case, Program]:
    """A case of few channels or groups, and its program: no operand is packed but weights of many channels, as floats."""
    case = DIRECT_HALVES[name]
    program = generated(case)
    verify(program)
    anchor = program.kernels[-1].anchor
    assert isinstance(anchor, Convolution)
    assert anchor.halves is None
    assert (anchor.precision is Precision.TF32) is (case.warps > 1 or anchor.packed is not None)
    assert all(buffer.dtype is DType.F32 for buffer in program.buffers if buffer.role is Role.TEMP)
    return case, program


@needs_compiler
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("name", DIRECT_HALVES)
@pytest.mark.thinned(5)
def test_few_channels_and_groups_are_multiplied_as_numbers_of_tf32(name: str, aligned: bool) -> None:
    case, program = direct(name)
    given = operands(case)
    source = render(program, ONE, aligned=aligned)
    found = emulate(program, source, memory(case, given), shift=int(not aligned))["y"]
    assert_right(case, given, found)


@needs_compiler
@pytest.mark.parametrize("name", ["rows of 16", "one warp", "2 groups, many channels"])
def test_few_channels_that_are_not_finite(name: str) -> None:
    case, program = direct(name)
    given = operands(case)
    x, w = given["x"].view(-1), given["w"].view(-1)
    x[5], x[-7], w[3] = float("inf"), float("nan"), -float("inf")
    found = result(case, emulate(program, render(program, ONE), memory(case, given))["y"])
    wanted = result(case, interpret(program, memory(case, given))["y"])
    assert not np.isfinite(wanted).all()
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))


@needs_compiler
@pytest.mark.parametrize("padding", [0, 1])
def test_windows_behind_an_input_that_lies_channels_last(padding: int) -> None:
    """Points of a window follow each other, which a border that is not stored does not: such an input is packed."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 16, 12, 14).half(), torch.randn(8, 16, 3, 3).half()
    made = region(lambda x, w: F.max_pool2d(F.conv2d(x, w, padding=padding), 2), x, w)
    given = made.program.inputs[0]
    lying = replace(made.program.buffer(given), strides=x.to(memory_format=torch.channels_last).stride())
    buffers = tuple(lying if buffer.name == given else buffer for buffer in made.program.buffers)
    made = replace(made, program=replace(made.program, buffers=buffers))
    program = made.passed(pass_options(ONE, AnchorSource.HALVES))
    verify(program)
    product = program.kernels[-1]
    assert isinstance(product.anchor, Product)
    assert product.col_count == 4
    assert (given in product.reads) is (padding == 0)
    memory = {
        name: encode(tensor.numpy().ravel(), DType.F16)
        for name, tensor in zip(made.program.inputs, (x.permute(0, 2, 3, 1).contiguous(), w), strict=True)
    }
    found = decode(emulate(program, render(program, ONE), memory)[program.outputs[0]], DType.F16)
    wanted = F.max_pool2d(F.conv2d(x.double(), w.double(), padding=padding), 2)
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=2e-3, atol=2e-3)
