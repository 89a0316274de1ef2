"""Convolutions by scaled halves whose weights stay in registers: what the kernels compute, every thread run on the host, and how they are laid out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import MOST_REGISTER_STATIONARY
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.render import describe, render
from fusepass.codegen.render.cuda.contraction.convolution.chunk_tiles import BINADES
from fusepass.codegen.schedule_convolution import preferred, schedule_convolution, serves
from fusepass.codegen.schedule_convolution.chunks import ChunkSchedule
from fusepass.codegen.schedule_convolution.register_stationary import (
    NEIGHBOURS,
    STEP_RUNS,
    RegisterStationarySchedule,
)
from fusepass.codegen.schedule_convolution.tiles import anchor_of
from tests.support.convolutions import CASES, LARGE, Across, Case, generated, generated_pooling, multiplying
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.machine_code import told_by_ptxas
from tests.support.thinned import thinned
from tests.support.values import check_values
from tests.unit.test_chunks import quiet_inputs
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)  # its blocks take several tiles one after another

HELD = {
    "3d": Case((2, 3, 6, 9, 10), 16, (3, 3, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    "padded": Case((2, 1, 12, 70), 20, (3, 7), (1, 1), (2, 3), (1, 1)),
    "1d": Case((3, 5, 50), 7, (4,), (1,), (2,), (1,)),
    "transposed": Case((1, 1, 9, 20), 8, (5, 4), (1, 1), (1, 1), (1, 1), True),
    "2d": Case((1, 8, 9, 20), 30, (3, 3), (1, 1), (1, 1), (1, 1)),
    "channels last": Case((2, 6, 9, 10), 16, (3, 3), (1, 1), (1, 1), (1, 1), channels_last=True),
    "3d, many channels": Case((1, 10, 5, 6, 40), 9, (3, 1, 2), (1, 1, 1), (1, 0, 1), (1, 1, 1)),
    "four taps": Case((2, 3, 6, 9, 10), 16, (4, 4, 4), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    "many rows": Case((2, 3, 9, 15, 35), 20, (4, 4, 4), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    "eight numbers of a tap": Case((1, 1, 20, 40), 3, (2, 4), (1, 1), (0, 3), (1, 1)),
    "five rows, dilated": Case((1, 2, 25, 40), 5, (5, 3), (1, 1), (2, 1), (2, 1)),
    "1d, long": Case((2, 1, 300), 4, (30,), (1,), (5,), (1,)),
}


def held(case: Case, precision: Precision = Precision.FLOAT32) -> Case:
    return replace(case, precision=precision, halves=True, held=True)


def pooled(case: Case, precision: Precision = Precision.FLOAT32, across: Across = Across.EACH) -> Program:
    return generated_pooling(held(case, precision), across, SMALL)


def laid_out(program: Program, facts: DeviceFacts = SMALL) -> RegisterStationarySchedule:
    plan = schedule_convolution(multiplying(program), program, facts)
    assert isinstance(plan, RegisterStationarySchedule)
    return plan


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), thinned(itertools.product(HELD, Precision), 3))
@pytest.mark.thinned(5)
def test_values(name: str, precision: Precision) -> None:
    program = pooled(HELD[name], precision)
    laid_out(program)
    check_values(program, SMALL, inputs_of(program), 1e-5)


@needs_compiler
def test_a_sum_of_everything() -> None:
    program = pooled(HELD["many rows"], across=Across.ALL)
    laid_out(program)
    check_values(program, SMALL, inputs_of(program), 1e-5)


_AXIS = st.tuples(*(st.integers(1, 20), st.integers(1, 5), st.integers(0, 2), st.integers(1, 3)))


@needs_compiler
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    dilation, ones = (*dilation[:-1], 1), (1,) * len(axes)
    missing = (0,) * len(axes) if transposed else ()
    case = Case((2, channels, *sizes), out, kernel, ones, padding, dilation, transposed, missing)
    try:
        assume(all(case.result))
    except RuntimeError:  # the kernel is larger than what it should cover
        assume(False)
    program = pooled(case, precision)
    assume(multiplying(program).partials is not None and anchor_of(multiplying(program)).held)
    check_values(program, SMALL, inputs_of(program), 2e-5)


@needs_compiler
@pytest.mark.parametrize("name", ["many rows", "padded"])
def test_what_is_not_finite_is_computed_by_its_definition(name: str) -> None:
    """Results take the place of halves then, and of those behind them that are multiplied by zero."""
    program = pooled(HELD[name])
    inputs = inputs_of(program)
    inputs[program.inputs[0]][77] = np.nan
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    for name in program.outputs:
        finite = np.isfinite(wanted[name])
        assert not finite.all()
        bound = 1e-5 * np.abs(wanted[name][finite]).max()
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5, atol=bound, err_msg=name)


@needs_compiler
def test_channels_of_other_sizes_cost_no_digits() -> None:
    program = pooled(HELD["many rows"])
    inputs = inputs_of(program)
    scales = np.float32(2.0) ** np.array([-12, 0, 5], np.float32)
    inputs["x"].reshape(program.buffer("x").shape)[:] *= scales[None, :, None, None, None]
    inputs["w"].reshape(program.buffer("w").shape)[:] /= scales[None, :, None, None, None]
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    for name in program.outputs:
        bound = 2e-6 * np.abs(wanted[name]).max()
        np.testing.assert_allclose(got[name], wanted[name], atol=bound, err_msg=name)


@needs_compiler
@pytest.mark.parametrize("precision", Precision)
def test_a_channel_that_is_far_smaller_than_another_keeps_its_digits(precision: Precision) -> None:
    """As those of TF32 or float32 numbers, and as plain arithmetic behind the bound."""
    case = HELD["four taps"]
    program = pooled(case, precision)
    assert laid_out(program).channels > 1
    source, exactly = render(program, SMALL), pooled(case)
    for smaller in (BINADES, BINADES + 1):
        inputs = quiet_inputs(case, smaller) | {"bias": np.zeros(case.out_channels, np.float32)}
        got, wanted = emulate(program, source, inputs), interpret(exactly, inputs)
        for name in ("top", "bottom"):
            one, other = (each[name].reshape(case.result[:2])[:, 2] for each in (got, wanted))
            off = np.abs(one / other - 1).max()
            rounded = precision is Precision.TF32 and smaller <= BINADES
            assert (2.0**-18 if rounded else 0) <= off < (2.0**-9 if rounded else 2.0**-20), (name, smaller)


def test_every_weight_is_met_once() -> None:
    for name, case in HELD.items():
        plan = laid_out(pooled(case))
        (phase,) = plan.on.phases
        runs = list(itertools.chain(*plan.runs))
        met = [(tap, run.channel) for run in runs for tap in run.taps if tap is not None]
        assert sorted(met) == sorted(itertools.product(range(len(phase.taps)), range(plan.channels))), name
        assert all(len(step) == STEP_RUNS for step in plan.runs), name
        assert len(plan.runs) == len(plan.places.steps), name


def test_a_schedule_fits_the_device() -> None:
    for precision in Precision:
        program = generated_pooling(held(LARGE["3d, 3 to 16"], precision), Across.EACH)
        plan = laid_out(program, H200)
        assert plan.weight_registers <= MOST_REGISTER_STATIONARY
        assert plan.resident * plan.shared_bytes <= H200.shared_bytes_per_block
        assert plan.on.block_warps % NEIGHBOURS == 0
        assert "sparse products" in describe(program, multiplying(program), H200)
        assert "in registers" in program_text(program)


def test_chosen_by_measurement_alone_where_nothing_is_stored_and_channels_are_few() -> None:
    program = pooled(HELD["2d"])
    assert serves(program, multiplying(program), H200)
    assert not preferred(program, multiplying(program), H200)
    assert not serves(program, multiplying(program), replace(H200, arch="sm_100"))
    stored = generated(held(HELD["2d"]), facts=H200)
    assert isinstance(schedule_convolution(multiplying(stored), stored, H200), ChunkSchedule)
    for name in ("2d, 8 to 40 channels", "transposed 2d"):
        assert not anchor_of(multiplying(generated_pooling(held(CASES[name]), Across.EACH))).held, name


@pytest.mark.parametrize("precision", Precision)
def test_registers_suffice_and_products_overlap(precision: Precision, tmp_path: Path) -> None:
    told = told_by_ptxas(render(generated_pooling(held(LARGE["3d, 3 to 16"], precision), Across.EACH), H200), tmp_path)
    assert "serialized" not in told
    frames = [line for line in told.splitlines() if "spill stores" in line]
    assert frames
    assert all(" 0 bytes stack frame, 0 bytes spill stores" in line for line in frames), told
