"""Convolutions by scaled halves whose weights stay in registers: what the kernels compute, every thread run on the host, and how they are laid out."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import MOST_REGISTER_STATIONARY, ROWS
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.render import describe, render
from fusepass.codegen.render.cuda.contraction.convolution.chunk_tiles import BINADES
from fusepass.codegen.schedule_convolution import preferred, schedule_convolution, serves
from fusepass.codegen.schedule_convolution.chunks import ChunkSchedule
from fusepass.codegen.schedule_convolution.register_stationary import LANES, RegisterStationarySchedule, held_registers
from fusepass.codegen.schedule_convolution.tiles import anchor_of
from fusepass.codegen.toolchain import include_directory
from tests.support.convolutions import (
    CASES,
    LARGE,
    Across,
    Case,
    Over,
    generated,
    generated_pooling,
    generated_reduction,
    multiplying,
)
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.thinned import thinned
from tests.support.values import check_values
from tests.unit.test_chunks import keeps_digits_of_quiet_channels, spreads
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)  # its blocks take several tiles one after another


HELD = {
    "3d": Case((2, 3, 6, 9, 10), 16, (3, 3, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    "padded": Case((2, 1, 12, 70), 20, (3, 7), (1, 1), (2, 3), (1, 1)),
    "1d": Case((3, 5, 50), 7, (4,), (1,), (2,), (1,)),
    "transposed": Case((1, 1, 9, 20), 8, (5, 4), (1, 1), (1, 1), (1, 1), True),
    "2d": Case((1, 8, 9, 20), 30, (3, 3), (1, 1), (1, 1), (1, 1)),
    "one channel of a word none, dilated": Case((2, 3, 12, 70), 20, (3, 5), (1, 1), (2, 4), (1, 2)),
    "channels last": Case((2, 6, 9, 10), 16, (3, 3), (1, 1), (1, 1), (1, 1), channels_last=True),
    "3d, many channels": Case((1, 10, 5, 6, 40), 9, (3, 1, 2), (1, 1, 1), (1, 0, 1), (1, 1, 1)),
}


def held(case: Case, precision: Precision = Precision.FLOAT32) -> Case:
    return replace(case, precision=precision, halves=True, held=True)


def planned(program: Program, facts: DeviceFacts = SMALL) -> RegisterStationarySchedule:
    plan = schedule_convolution(multiplying(program), program, facts)
    assert isinstance(plan, RegisterStationarySchedule)
    return plan


def check(program: Program, tolerance: float = 2e-6) -> RegisterStationarySchedule:
    plan = planned(program)
    check_values(program, SMALL, inputs_of(program), tolerance)
    return plan


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), thinned(itertools.product(HELD, Precision), 3))
@pytest.mark.thinned(3)
def test_values(name: str, precision: Precision) -> None:
    check(generated(held(HELD[name], precision)))


@needs_compiler
@pytest.mark.parametrize(("name", "across"), thinned(itertools.product(("3d", "2d"), Across), 5))
def test_reductions_over_positions(name: str, across: Across) -> None:
    program = generated_pooling(held(HELD[name]), across, SMALL)
    assert multiplying(program).partials is not None
    check(program, 1e-5)


@needs_compiler
@pytest.mark.parametrize("over", thinned([Over.LOGSUMEXP, Over.NORMALISED, Over.ARGMAX], 3))
def test_reductions_over_channels(over: Over) -> None:
    program = generated_reduction(held(HELD["2d"]), over)
    assert multiplying(program).cols
    check(program, 1e-5)


_AXIS = st.tuples(*(st.integers(1, 20), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3)))


@needs_compiler
@settings(max_examples=4, deadline=None)
@given(
    st.lists(_AXIS, min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(1, 32),
    st.booleans(),
    st.sampled_from(Precision),
)
def test_any_geometry(
    axes: list[tuple[int, ...]], channels: int, out: int, transposed: bool, precision: Precision
) -> None:
    sizes, kernel, padding, dilation = zip(*axes, strict=True)
    ones, missing = (1,) * len(axes), (0,) * len(axes) if transposed else ()
    case = Case((2, channels, *sizes), out, kernel, ones, padding, dilation, transposed, missing)
    try:
        assume(all(case.result))
    except RuntimeError:  # the kernel is larger than what it should cover
        assume(False)
    program = generated(held(case, precision), facts=SMALL)
    assume(anchor_of(multiplying(program)).held)
    check(program, 4e-6)


@needs_compiler
@pytest.mark.parametrize(("bits", "where"), thinned(itertools.product([0x7F800000, 0xFFFFFFFF, 0x7F7FC99E], "xw"), 2))
def test_what_is_not_finite_spreads_as_in_plain_arithmetic(bits: int, where: str) -> None:
    """An infinity, NaN, and a number that is finite but beyond what sums of it can be."""
    spreads(generated(held(HELD["3d" if where == "w" else "2d"]), chain=False), bits, where)


@needs_compiler
def test_what_is_not_finite_is_reduced() -> None:
    program = generated_pooling(held(HELD["3d"]), Across.EACH, SMALL)
    planned(program)
    inputs = inputs_of(program)
    inputs[program.inputs[0]][777] = np.nan
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    for name in program.outputs:
        assert np.isnan(wanted[name]).any()
        bound = 1e-5 * np.abs(wanted[name][np.isfinite(wanted[name])]).max()
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5, atol=bound, err_msg=name)


@needs_compiler
def test_channels_of_other_sizes_cost_no_digits() -> None:
    program = generated(held(HELD["3d"]), chain=False)
    inputs, shape = inputs_of(program), program.buffer("x").shape
    scales = np.float32(2.0) ** np.array([-12, 0, 5], np.float32)
    inputs["x"].reshape(shape)[:] *= scales[None, :, None, None, None]
    inputs["w"].reshape(program.buffer("w").shape)[:] /= scales[None, :, None, None, None]
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    np.testing.assert_allclose(got["conv_out"], wanted["conv_out"], atol=2e-6 * np.abs(wanted["conv_out"]).max())


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), [("2d", Precision.TF32), ("3d", Precision.FLOAT32)])
def test_a_channel_that_is_far_smaller_than_another_keeps_its_digits(name: str, precision: Precision) -> None:
    keeps_digits_of_quiet_channels(held(HELD[name], precision), BINADES)


def test_every_weight_is_met_once() -> None:
    for name, case in HELD.items():
        plan = planned(generated(held(case)))
        met = [each for quarter in plan.quarters for pair in quarter for each in (pair.first, pair.second) if each]
        (phase,) = plan.on.phases
        assert sorted(met) == sorted(itertools.product(range(len(phase.taps)), range(plan.channels))), name
        assert all(len(quarter) == LANES for quarter in plan.quarters)
        last = plan.tile_bytes // 4 - plan.on.extent[-1] * (plan.on.tile[0] if len(plan.on.tile) == 1 else 1)
        assert all(0 <= place < last or len(plan.on.tile) == 1 for places in plan.places for place in places), name


@pytest.mark.parametrize(
    ("name", "precision"),
    [("3d, 3 to 16", Precision.TF32), ("3d, 8 to 32", Precision.TF32), ("3d, 8 to 32", Precision.FLOAT32)],
)
def test_a_schedule_fits_the_device(name: str, precision: Precision) -> None:
    program = generated(held(LARGE[name], precision))
    plan = planned(program, H200)
    assert held_registers(plan) <= MOST_REGISTER_STATIONARY
    assert plan.resident * plan.shared_bytes <= H200.shared_bytes_per_block
    assert plan.covered >= program.buffer("w").shape[0] > plan.covered - ROWS * plan.rows
    words = describe(program, multiplying(program), H200)
    assert "weights in registers" in words
    assert ("halves x 3" in words) is (plan.parts == 2)
    assert "in registers" in program_text(program)


def test_chosen_by_measurement_alone_and_for_few_output_channels() -> None:
    program = generated(held(HELD["2d"]))
    assert serves(program, multiplying(program), H200)
    assert not preferred(program, multiplying(program), H200)
    assert not serves(program, multiplying(program), replace(H200, arch="sm_100"))
    many = generated(held(CASES["2d, 8 to 40 channels"]))
    assert isinstance(schedule_convolution(multiplying(many), many, H200), ChunkSchedule)
    scattered = generated(held(CASES["transposed 2d"]))
    assert not anchor_of(multiplying(scattered)).held


def test_weights_that_fit_without_zeros_alone_stay_in_registers_where_nothing_is_stored() -> None:
    """Four taps of three channels: 12 products of neighbours, 16 of two channels, of which one channel is none."""
    case = held(LARGE["3d, 3 to 16"])
    assert not anchor_of(multiplying(generated(case, facts=H200))).held
    assert anchor_of(multiplying(generated_pooling(case, Across.EACH))).held


@pytest.mark.parametrize(
    ("name", "precision"),
    thinned([("3d, 3 to 16", Precision.TF32), ("3d, 8 to 32", Precision.TF32), ("3d, 8 to 32", Precision.FLOAT32)], 3),
)
def test_registers_suffice(name: str, precision: Precision, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    for program in (
        generated(held(LARGE[name], precision)),
        generated_pooling(held(LARGE[name], precision), Across.EACH),
    ):
        source = tmp_path / "kernel.cu"
        source.write_text(render(program, H200).text)
        flags = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", f"-I{include_directory()}"]
        command = [nvcc, *flags, "-cubin", "-o", str(tmp_path / "kernel.cubin"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        spilled = [line for line in done.stderr.splitlines() if "spill stores" in line]
        assert spilled
        assert all(" 0 bytes spill stores" in line for line in spilled), done.stderr
