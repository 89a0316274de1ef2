"""Depthwise convolutions as windows: what the kernels compute on a GPU (every thread run on the host) and on a CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.passes.depthwise import depthwise_of
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule_convolution import preferred, serves
from fusepass.codegen.source import Target
from tests.support.convolutions import DEPTHWISE, Case, generated, program_of
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import decode, interpret
from tests.support.native import run_native
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)


@needs_compiler
@pytest.mark.parametrize("name", DEPTHWISE)
@pytest.mark.parametrize("facts", [SMALL, DeviceFacts.cpu(1)], ids=["cuda", "cpu"])
@pytest.mark.thinned(5)
def test_depthwise(name: str, facts: DeviceFacts) -> None:
    case = DEPTHWISE[name]
    program = generated(case)
    verify(program)
    assert not program.calls
    assert not preferred(program, program.kernels[0], H200)
    assert serves(program, program.kernels[0], H200)
    inputs = inputs_of(program)
    if facts.target is Target.CPU:
        got = run_native(program, inputs, facts)["y"]
    else:
        got = emulate(program, render(program, facts), inputs)["y"]
    x, w, bias = (torch.from_numpy(inputs[name]) for name in ("x", "w", "bias"))
    source = program.buffer("x")
    exact = torch.convolution(
        x.as_strided(source.shape, source.strides).double(), w.view(case.weight).double(), bias.double(), *case.geometry
    )
    wanted = (exact.relu() * 2).numpy().reshape(-1)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("name", "output_tiles"),
    [
        ("depthwise", "images of 9 x 13"),
        ("depthwise, small images", "images of 16 x 24"),
        ("depthwise, bands", "vectors of 4, 8 per thread, 192 threads, patches of 96 x 64"),
        ("depthwise, odd", "patches of"),
        ("depthwise, wide", "patches of"),
        ("depthwise, wide, vectors", "patches of"),
        ("depthwise, every second column", "images of 24 x 16"),
        ("depthwise, every second row", "images of 16 x 28"),
        ("depthwise, strided and dilated", ""),  # few points of windows for each element
        ("depthwise, 3d", ""),
        ("depthwise, 3d, no border", "patches of 6 images of 3 x 4 x 6"),
        ("depthwise, 1d", "patches of 2 images of 6 x 200"),
        ("depthwise, 1d, odd", "patches of"),
        ("depthwise, 1d, one sample", "patches of"),
        ("depthwise, 1d, steps", "patches of"),
        ("depthwise, 1d, short rows", "patches of"),
        ("depthwise, large windows", "patches of"),
        ("depthwise, 3d, large windows", "patches of"),
        ("depthwise, transposed, steps of one", "patches of"),
        ("depthwise, transposed, copies", "patches of"),
        ("depthwise, 3d, planes", "patches of"),
        ("depthwise, 3d, every second plane", "patches of"),
    ],
)
def test_who_stages_its_input(name: str, output_tiles: str) -> None:
    program = generated(DEPTHWISE[name])
    found = describe(program, program.kernels[0], SMALL)
    assert output_tiles in found
    assert found.startswith("patch") is bool(output_tiles)


def test_a_transposed_one_reads_along_its_rows() -> None:
    """Which tap and place an element has is no affine function of its position; that neighbours read neighbours is known."""
    case = Case((16, 64, 128, 128), 64, (4, 4), (2, 2), (1, 1), (1, 1), True, groups=64)
    program = generated(case)
    assert describe(program, program.kernels[0], H200).startswith("pointwise")


@needs_compiler
def test_what_is_staged_may_start_anywhere() -> None:
    program = generated(DEPTHWISE["depthwise, small images"])
    inputs = inputs_of(program)
    aligned = emulate(program, render(program, SMALL), inputs)["y"]
    anywhere = render(program, SMALL, aligned=False)
    assert "begin_copy_bytes<4>" in anywhere.text
    np.testing.assert_array_equal(emulate(program, anywhere, inputs, shift=1)["y"], aligned)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "twice"),
    [("depthwise, small images", False), ("depthwise, 7 x 7", True), ("depthwise, large windows", True)],
)
def test_weights_that_are_not_finite_do_not_meet_the_border(name: str, twice: bool) -> None:
    """Where the code is there twice, zeros beside the input are added first, and left out once a sum is not a number."""
    case = DEPTHWISE[name]
    program, border = generated(case), case.padding[0]
    inputs = inputs_of(program)
    inputs["w"][0] = np.inf  # the first channel's upper left point
    source = render(program, SMALL)
    assert ("bool again" in source.text) is twice
    got = emulate(program, source, inputs)["y"].reshape(case.source)
    assert np.isfinite(got[:, 0, :border]).all()
    assert np.isfinite(got[:, 0, :, :border]).all()
    assert np.isinf(got[:, 0, border:, border:]).any()
    wanted = interpret(program, inputs)["y"].reshape(case.source)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F64])
@pytest.mark.parametrize("name", ["depthwise", "depthwise, odd", "depthwise, wide"])
@pytest.mark.thinned(5)
def test_depthwise_of_other_types_rounds_once(name: str, dtype: DType) -> None:
    assert_rounded_once(replace(DEPTHWISE[name], dtype=dtype))


def assert_rounded_once(case: Case) -> None:
    """The convolution alone, run on the host, is within a unit of the last place of its type."""
    program, dtype = generated(case, chain=False), case.dtype
    verify(program)
    inputs = inputs_of(program)
    got = emulate(program, render(program, SMALL), inputs)["conv_out"]
    wanted = decode(interpret(program, inputs)["conv_out"], dtype)
    bits = {DType.F16: 10, DType.BF16: 7, DType.F64: 40}[
        dtype
    ]  # a unit of the last place, where sums round differently
    np.testing.assert_allclose(decode(got, dtype), wanted, rtol=2.0**-bits, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "case",
    [
        replace(DEPTHWISE["depthwise"], groups=3),
        replace(DEPTHWISE["depthwise, transposed"], groups=2),
        replace(DEPTHWISE["depthwise, transposed"], dilation=(1, 3)),  # an element's taps lie apart
    ],
)
def test_what_is_no_window_is_a_convolution(case: Case) -> None:
    program = program_of(case)
    assert depthwise_of(program, program.calls[0]) is None
    assert isinstance(generated(case).kernels[0].anchor, Convolution)


@pytest.mark.parametrize("name", ["depthwise, 3d", "depthwise, 3d, no border", "depthwise, transposed"])
def test_it_is_generated_where_generated_code_is_asked_for(name: str) -> None:
    made = generate(program_of(DEPTHWISE[name]), Builder(), H200, AnchorSource.GENERATED)
    assert not made.program.calls
