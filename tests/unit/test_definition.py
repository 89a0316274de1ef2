"""Results of convolutions that are computed by the definition, every thread run on the host: all of a tile, or those of sums that are not finite."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import render
from tests.support.convolutions import CASES, FEW, GROUPED, Across, Case, generated, generated_pooling
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import region
from tests.support.thinned import thinned
from tests.support.values import check_values
from tests.unit.test_chunks import quiet_inputs
from tests.unit.test_phase_windows import DEVICES, MODELS, passed
from tests.unit.test_register_stationary import HELD, pooled
from tests.unit.test_render_cuda import inputs_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=1)  # its blocks take several tiles one after another
LARGEST = np.float32(np.finfo(np.float32).max)  # which no TF32 number is near


def check(program: Program, facts: DeviceFacts, inputs: Mapping[str, np.ndarray]) -> None:
    """Holds each result by itself against the interpreter: they are of very different sizes."""
    got, wanted = emulate(program, render(program, facts), inputs), interpret(program, inputs)
    for name in program.outputs:
        assert np.isfinite(wanted[name]).all()
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)


SUMS = {
    **{name: CASES[name] for name in ("2d, 8 to 40 channels", "transposed 2d, dilated", "2d, 70 channels")},
    **{name: CASES[name] for name in ("many channels", "1d, strided", "3d, padded", "many channels, transposed 3d")},
    **{name: GROUPED[name] for name in ("3 groups, channels last", "2 groups of many channels, transposed")},
    **{name: GROUPED[name] for name in ("2 groups, transposed 3d", "5 groups of one channel, transposed")},
}


@needs_compiler
@pytest.mark.parametrize(("name", "warps"), thinned(itertools.product(SUMS, (1, 4)), 3))
@pytest.mark.thinned(5)
def test_single_sums(name: str, warps: int) -> None:
    program = generated(replace(SUMS[name], warps=warps))
    inputs = inputs_of(program)
    inputs["x"][37] = LARGEST
    inputs["w"] *= np.float32(2.0**-7)
    check(program, SMALL, inputs)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "device"), thinned(itertools.product(["what no window reaches", "the result itself"], DEVICES), 3)
)
def test_the_largest_of_all_phases(name: str, device: str) -> None:
    made, facts = region(*MODELS[name]), DEVICES[device]
    program = passed(made, facts)
    inputs = inputs_of(program)
    x, w = (inputs[each] for each in program.inputs[:2])
    x[37], w[:] = LARGEST, w * np.float32(2.0**-7)
    check(program, facts, inputs)


@needs_compiler
@pytest.mark.parametrize("name", thinned([name for name in FEW if CASES[name].source[1] > 1], 2))
def test_whole_tiles(name: str) -> None:
    check_quiet(generated(case := replace(CASES[name], halves=True)), case)


@needs_compiler
@pytest.mark.parametrize("name", thinned(["2d", "3d", "channels last"], 2))
def test_whole_tiles_by_warps_that_hold_weights(name: str) -> None:
    check_quiet(pooled(HELD[name]), HELD[name], 1e-5)


@needs_compiler
@pytest.mark.parametrize("name", thinned(["2d, 8 to 40 channels", "2d, 70 channels"], 2))
def test_whole_tiles_that_are_reduced(name: str) -> None:
    case = replace(CASES[name], halves=True)
    for across in (Across.EACH, Across.ALL):
        check_quiet(generated_pooling(case, across, SMALL), case, 1e-5)


def check_quiet(program: Program, case: Case, tolerance: float = 2e-6) -> None:
    """Of an input, one channel of which is too small beside others for halves."""
    check_values(program, SMALL, inputs_of(program) | quiet_inputs(case, 60), tolerance)
