"""Convolutions of several groups of channels as kernels: what these compute, what they leave to others, and when they are chosen."""

from __future__ import annotations

import functools
import itertools
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorOptions, AnchorSource, generate_anchors
from fusepass.codegen.render import render
from fusepass.codegen.schedule_convolution import preferred, schedule_convolution, serves
from fusepass.codegen.toolchain import include_directory
from fusepass.errors import IRError
from tests.support.convolutions import GROUPED, Across, Case, Over, generated, generated_pooling, program_of, reduced
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import region
from tests.support.thinned import thinned
from tests.support.values import check_values
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)


def anchor_of(program: Program) -> Convolution:
    (anchor,) = [kernel.anchor for kernel in program.kernels if isinstance(kernel.anchor, Convolution)]
    return anchor


def check(program: Program) -> None:
    assert not program.calls
    assert anchor_of(program).groups > 1
    check_values(program, SMALL, inputs_of(program), 3e-6)


@needs_compiler
@pytest.mark.parametrize(("name", "precision", "warps"), thinned(itertools.product(GROUPED, Precision, (4, 1)), 11))
def test_values(name: str, precision: Precision, warps: int) -> None:
    check(generated(replace(GROUPED[name], precision=precision, warps=warps)))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "across", "warps"),
    thinned(
        [
            ("2 groups, transposed 3d", Across.EACH, 4),
            *itertools.product(("2 groups, 2d", "2 groups of many channels"), Across, (1, 4)),
        ],
        20,
    ),
)
def test_reductions_over_positions(name: str, across: Across, warps: int) -> None:
    program = generated_pooling(replace(GROUPED[name], warps=warps), across, SMALL)
    assert any(kernel.partials is not None for kernel in program.kernels)
    check(program)


@pytest.mark.parametrize("over", Over)
def test_reductions_over_channels_are_left(over: Over) -> None:
    """No block has the channels of several groups."""
    serving = AnchorOptions(functools.partial(serves, facts=H200))
    for case in (GROUPED["2 groups, 2d"], GROUPED["2 groups of many channels"]):
        program = generate_anchors(reduced(case, over), Builder(), serving)
        verify(program)
        assert all(kernel.anchor is None or kernel.is_pointwise for kernel in program.kernels)
        assert anchor_of(program).groups == 2


@needs_compiler
def test_pooled_phases() -> None:
    """A bias is added to the channels of each group before the largest is taken."""

    def model(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.conv_transpose2d(x, w, bias, stride=2, padding=1, groups=3), 2)

    made = region(model, torch.empty(2, 12, 5, 9), torch.empty(12, 3, 4, 4), torch.empty(9))
    program = generate_anchors(made.program, made.builder, AnchorOptions(functools.partial(serves, facts=H200)))
    assert anchor_of(program).pooled is not None
    check(program)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "precision"),
    thinned(
        itertools.product(
            ("2 groups, 2d", "2 groups of many channels", "5 groups of one channel, transposed"), Precision
        ),
        5,
    ),
)
@pytest.mark.parametrize("bits", [0x7F800000, 0x7FC00000])
def test_what_is_not_finite_stays_in_its_group(name: str, precision: Precision, bits: int) -> None:
    program = generated(replace(GROUPED[name], precision=precision, warps=4), chain=False)
    inputs = inputs_of(program)
    inputs["x"][37] = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        wanted = interpret(program, inputs)["conv_out"].astype(np.float32)
    got = emulate(program, render(program, SMALL), inputs)["conv_out"]
    assert not np.isfinite(wanted).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted))


LARGE: dict[str, Case] = {
    "transposed 2d": Case((16, 32, 128, 256), 64, (3, 5), (2, 3), (1, 2), (2, 1), True, groups=4),
    "2d": Case((64, 64, 128, 128), 64, (3, 3), (1, 1), (1, 1), (1, 1), groups=8),
    "2d, many channels": Case((32, 256, 28, 28), 256, (3, 3), (1, 1), (1, 1), (1, 1), groups=4),
}


@pytest.mark.parametrize("name", LARGE)
def test_chosen_by_measurement_alone(name: str) -> None:
    case = LARGE[name]
    assert not generate(program_of(case), Builder(), H200, AnchorSource.PREFERRED).generates_anchor
    assert generate(program_of(case), Builder(), H200, AnchorSource.GENERATED).generates_anchor
    halves = generate(program_of(case), Builder(), H200, AnchorSource.HALVES)
    assert halves.generates_anchor
    assert anchor_of(halves.program).halves is None
    program = generated(case)
    assert serves(program, program.kernels[-1], H200)
    assert not preferred(program, program.kernels[-1], H200)


def test_a_block_works_on_one_group() -> None:
    for case in (*LARGE.values(), *GROUPED.values()):
        program = generated(case)
        plan = schedule_convolution(program.kernels[-1], program, H200)
        assert plan is not None
        assert plan.channel_blocks % case.groups == 0
        assert plan.blocks % plan.channel_blocks == 0


def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    program = generated(GROUPED["2 groups, 2d"])
    (kernel,) = program.kernels
    broken = replace(program, kernels=(replace(kernel, anchor=replace(anchor_of(program), groups=3)),))
    assert "3 groups" in program_text(broken)
    with pytest.raises(IRError, match="3 groups of 8 channels"):
        verify(broken)


@pytest.mark.parametrize(("name", "arch"), [("transposed 2d", "90a"), ("2d", "80"), ("2d, many channels", "90a")])
def test_nvcc_takes_the_source(name: str, arch: str, tmp_path: Path) -> None:
    """ptxas says where it makes products wait, and what does not fit registers."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    source, cubin = tmp_path / "source.cu", tmp_path / "source.cubin"
    program = generated(replace(LARGE[name], precision=Precision.TF32, warps=4 if arch == "90a" else 1))
    source.write_text(render(program, H200).text)
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [nvcc, "-O3", "-std=c++17", target, f"-I{include_directory()}", "-Xptxas=-v", "-cubin", "-o", str(cubin)]
    said = subprocess.run([*command, str(source)], capture_output=True, text=True, check=True).stderr
    assert "serialized" not in said
    assert "0 bytes spill stores, 0 bytes spill loads" in said
