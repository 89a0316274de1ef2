"""Convolutions as products of their tensors: what the kernels compute, and when they are tried."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Program
from fusepass.codegen.passes.anchors import AnchorOptions, AnchorSource, generate_anchors
from fusepass.codegen.render import render
from fusepass.codegen.search.candidate import CandidateSpec
from fusepass.codegen.search.space import search_space
from tests.support.convolutions import (
    PATCHES,
    POINTWISE,
    Across,
    Case,
    Over,
    generated,
    generated_pooling,
    program_of,
    reduced,
)
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import decode, interpret
from tests.support.regions import trace
from tests.support.values import check_values
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()

EVERY = AnchorOptions(lambda program, kernel: True, warps=4)


def check(program: Program) -> None:
    assert not program.calls
    check_values(program, H200, inputs_of(program), 3e-6)


@needs_compiler
@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.thinned(5)
def test_values(name: str) -> None:
    """Beside the library's convolution, which the program has before its convolution is replaced."""
    case = POINTWISE[name]
    program = generated(case)
    (kernel,) = program.kernels
    assert isinstance(kernel.anchor, Product)
    assert kernel.anchor.precision is case.precision
    check(program)
    inputs = inputs_of(program)
    if case.precision is Precision.FLOAT32:
        x = torch.from_numpy(inputs["x"].reshape(case.source) if not case.channels_last else _back(case, inputs["x"]))
        weight, bias = torch.from_numpy(inputs["w"]).view(case.weight), torch.from_numpy(inputs["bias"])
        wanted = 2 * torch.convolution(x.double(), weight.double(), bias.double(), *case.geometry).relu()  # type: ignore[call-overload]
        torch.testing.assert_close(torch.from_numpy(interpret(program, inputs)["y"]).view(case.result).double(), wanted)


@needs_compiler
@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.thinned(3)
def test_output_tiles(name: str) -> None:
    """Rows of the result are channels, or, where these are neighbours in memory, the output tiles of all samples."""
    case = PATCHES[name]
    program = generated(case)
    (kernel,) = program.kernels
    assert isinstance(kernel.anchor, Product)
    assert kernel.anchor.left.buffer == ("x" if case.result_last else "w")
    inputs = inputs_of(program)
    got, wanted = (
        decode(found["y"], case.dtype)
        for found in (emulate(program, render(program, H200), inputs), interpret(program, inputs))
    )
    ulp = {DType.F16: 2.0**-10, DType.BF16: 2.0**-7}.get(case.dtype, 3e-6)
    np.testing.assert_allclose(got, wanted, rtol=ulp, atol=3e-6 * np.abs(wanted).max())


@pytest.mark.parametrize(("channels", "kernel"), [(3, 4), (3, 8), (3, 16), (12, 4)])
def test_patches_of_few_channels_whose_weights_a_block_has_room_for_are_a_convolution(
    channels: int, kernel: int
) -> None:
    case = Case((8, channels, 96, 96), 96, (kernel, kernel), (kernel, kernel), (0, 0), (1, 1), pointwise=True, warps=4)
    program = generated(case, facts=H200)
    assert isinstance(program.kernels[-1].anchor, Convolution) is (channels == 3 and kernel == 4)


def _back(case: Case, memory: np.ndarray) -> np.ndarray:
    samples, channels, *spatial = case.source
    return np.ascontiguousarray(np.moveaxis(memory.reshape(samples, *spatial, channels), -1, 1))


@needs_compiler
@pytest.mark.parametrize("across", [Across.EACH, Across.BATCH, Across.ALL])
def test_reductions_over_positions_are_in_the_kernel(across: Across) -> None:
    program = generated_pooling(POINTWISE["2d, whole vectors, TF32"], across)
    (kernel,) = (kernel for kernel in program.kernels if isinstance(kernel.anchor, Product))
    assert kernel.partials is not None
    check(program)


def test_what_reduces_over_channels_goes_before() -> None:
    case = replace(POINTWISE["2d"], warps=4)
    program = generate_anchors(reduced(case, Over.LOGSUMEXP), Builder(), EVERY)
    assert not any(isinstance(kernel.anchor, Product) for kernel in program.kernels)


@pytest.mark.parametrize(
    "case",
    [
        replace(POINTWISE["2d"], kernel=(1, 2)),
        replace(POINTWISE["2d"], stride=(1, 2)),
        replace(POINTWISE["2d"], padding=(1, 0)),
        replace(POINTWISE["2d, whole input"], padding=(1, 0), kernel=(5, 4)),
        replace(POINTWISE["2d, whole input"], channels_last=True),  # whose terms lie otherwise than the weight's
        replace(POINTWISE["2d, transposed, one position"], padding=(1, 1)),
        replace(POINTWISE["2d, transposed, one position"], output_padding=(1, 0)),
        replace(POINTWISE["2d, transposed, one position"], dilation=(2, 1)),
        replace(PATCHES["2d"], padding=(1, 0)),
        replace(PATCHES["2d"], stride=(4, 5)),
        replace(PATCHES["2d"], dilation=(1, 2)),
        replace(PATCHES["2d"], groups=2, source=(2, 40, 8, 20), out_channels=10),
        replace(PATCHES["2d"], channels_last=True),
        replace(PATCHES["2d"], kernel=(4, 3), stride=(4, 3)),  # rows of 12 bytes
    ],
)
def test_what_is_no_product_of_its_tensors_is_none(case: Case) -> None:
    program = generate_anchors(program_of(case), Builder(), EVERY)
    assert not any(isinstance(kernel.anchor, Product) for kernel in program.kernels)


def test_positions_must_be_one_dimension_in_memory() -> None:
    program = program_of(POINTWISE["2d"])
    source = program.buffer("x")
    strided = replace(source, strides=(*source.strides[:2], 2 * source.strides[2], source.strides[3]))
    buffers = tuple(strided if buffer is source else buffer for buffer in program.buffers)
    program = generate_anchors(replace(program, buffers=buffers), Builder(), EVERY)
    assert not any(isinstance(kernel.anchor, Product) for kernel in program.kernels)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv2d(512, 64, 4), (64, 512, 4, 4)),
        (nn.ConvTranspose2d(100, 512, 4), (256, 100, 1, 1)),
        (nn.Conv2d(256, 64, 1), (64, 256, 1, 1)),
        (nn.Conv2d(3, 64, 14, 14), (2, 3, 56, 56)),
    ],
)
def test_convolutions_of_whole_tensors_are_tried_as_products(model: nn.Module, shape: tuple[int, ...]) -> None:
    graph, _ = trace(nn.Sequential(model, nn.ReLU()).to("meta"), torch.empty(shape, device="meta"))
    assert AnchorSource.GENERATED in {spec.anchor for spec in search_space(graph, H200, "fast")}


def tried(kernel: int) -> tuple[CandidateSpec, ...]:
    """What is tried for a convolution of 64 to 32 channels with a kernel of that size."""
    model = nn.Sequential(nn.Conv2d(64, 32, kernel, device="meta"), nn.ReLU())
    graph, _ = trace(model, torch.empty(8, 64, 56, 56, device="meta"))
    return search_space(graph, H200, "fast")


def test_where_the_library_is_to_work_channels_last_the_product_of_the_tensors_is_tried_too() -> None:
    wanted = CandidateSpec(AnchorFormat.CALLER, AnchorSource.GENERATED)
    found = tried(1)
    assert found[0].anchor_format is AnchorFormat.CHANNELS_LAST
    assert wanted in found
    assert wanted not in tried(3)
