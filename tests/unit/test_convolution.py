"""Convolutions as kernels: their geometry, what the kernels compute (every thread run on the host), and when they are chosen."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest

from fusepass.codegen.build import check_compiles
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Role
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorSource, generate_anchors
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule_convolution import preferred, schedule_convolution, serves
from tests.support.convolutions import CASES, Case, generated, program_of
from tests.support.emulate import emulate
from tests.support.interpret import interpret
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)  # its blocks take several tiles one after another

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    program = generated(CASES[name])
    verify(program)
    assert not program.calls
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=2e-6, atol=2e-6 * np.abs(wanted["y"]).max())


@needs_compiler
def test_the_result_itself_is_stored_where_it_is_wanted() -> None:
    program = generated(CASES["2d"], chain=False)
    verify(program)
    assert program.buffer("conv_out").role is Role.OUTPUT
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    np.testing.assert_allclose(got["conv_out"], wanted["conv_out"], rtol=2e-6, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3.4e38])
def test_what_is_not_finite_spreads_as_in_plain_arithmetic(bad: float) -> None:
    program = generated(CASES["2d, 8 to 40 channels"], chain=False)
    inputs = inputs_of(program)
    inputs["x"][37] = bad
    with np.errstate(all="ignore"):
        wanted = interpret(program, inputs)["conv_out"].astype(np.float32)
    got = emulate(program, render(program, SMALL), inputs)["conv_out"]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted))


def test_phases_cover_each_tap_of_each_element_once() -> None:
    anchor = Convolution("c", "x", "w", (2, 3), (1, 2), (1, 2), transposed=True)
    kernel, result = (3, 4), (7, 8)
    seen = set()
    for phase in anchor.phases(kernel, result):
        for tap in phase.taps:
            for position in itertools.product(range(4), range(3)):
                at = [p * s + r for p, s, r in zip(position, anchor.spread, phase.start, strict=True)]
                source = [p + o for p, o in zip(position, tap.offset, strict=True)]
                assert [
                    o == i * s - p + k * d
                    for o, i, s, p, k, d in zip(
                        at, source, anchor.stride, anchor.padding, tap.place, anchor.dilation, strict=True
                    )
                ] == [True, True]
                seen.add((*at, *tap.place))
    reachable = {
        (*at, *place)
        for at in itertools.product(range(8), range(9))
        for place in itertools.product(*map(range, kernel))
        if all((o + p - k * d) % s == 0 for o, p, k, d, s in zip(at, (1, 2), place, (1, 2), (2, 3), strict=True))
    }
    assert seen == reachable


def test_chosen_for_few_channels_only() -> None:
    def served(case: Case, facts: DeviceFacts = H200) -> bool:
        program = generated(case)
        return preferred(program, program.kernels[0], facts)

    def possible(case: Case, facts: DeviceFacts = H200) -> bool:
        program = generated(case)
        return serves(program, program.kernels[0], facts)

    few = Case((128, 8, 64, 64), 64, (3, 3), (1, 1), (0, 0), (1, 1))
    assert served(few)
    assert not served(more := replace(few, source=(128, 16, 64, 64)))
    assert possible(more)
    scattered = replace(few, source=(128, 16, 64, 64), stride=(2, 2), transposed=True)
    assert served(scattered)
    assert not served(replace(scattered, source=(128, 32, 64, 64)))
    assert not served(replace(scattered, stride=(1, 1)))
    assert not served(few, replace(H200, arch="sm_75"))
    assert not possible(few, replace(H200, arch="sm_75"))
    huge = replace(few, source=(1, 8, 4096, 64), kernel=(60, 60))  # weights beyond shared memory
    assert not served(huge)
    assert not possible(huge)


@pytest.mark.parametrize(
    ("channels", "anchor", "generates"),
    [
        (8, AnchorSource.PREFERRED, True),
        (8, AnchorSource.LIBRARY, False),
        (8, AnchorSource.GENERATED, True),
        (16, AnchorSource.PREFERRED, False),
        (16, AnchorSource.GENERATED, True),
    ],
)
def test_who_computes_the_anchor_may_be_said(channels: int, anchor: AnchorSource, generates: bool) -> None:
    case = Case((128, channels, 64, 64), 64, (3, 3), (1, 1), (0, 0), (1, 1))
    assert generate(program_of(case), Builder(), H200, anchor).generates_anchor is generates


def test_what_no_kernel_does_stays_with_the_library() -> None:
    program = program_of(CASES["2d"])
    (call,) = program.calls
    grouped = replace(program, calls=(replace(call, args=(*call.args[:-1], 3)),))
    assert generate_anchors(grouped, Builder(), lambda program, kernel: True) == grouped


def test_a_tile_fits_its_device() -> None:
    for name in CASES:
        program = generated(CASES[name])
        plan = schedule_convolution(program.kernels[0], program, H200)
        assert plan is not None
        assert plan.shared_bytes <= H200.shared_bytes_per_block
        assert plan.blocks % plan.channel_blocks == 0
        assert "TF32 x 3" in describe(program, program.kernels[0], H200)


@pytest.mark.parametrize("name", ["2d", "3d, padded", "transposed 3d"])
def test_nvcc_takes_the_source(name: str) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    check_compiles(render(generated(CASES[name]), H200))
