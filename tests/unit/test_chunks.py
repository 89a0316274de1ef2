"""Convolutions by scaled halves of a tile of the input: what the kernels compute, every thread run on the host, and how they are laid out."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.convolution import ROWS, ScaledHalves, ScaledWeights
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import describe, render
from fusepass.codegen.render.cuda.contraction.convolution.chunk_tiles import BINADES, BINADES_BY_PARTS
from fusepass.codegen.schedule_convolution import preferred, schedule_convolution, serves
from fusepass.codegen.schedule_convolution.chunks import ChunkSchedule, padded_places, warps_of_a_run
from fusepass.codegen.schedule_convolution.tiles import MOST_ROWS, anchor_of
from fusepass.codegen.toolchain import include_directory
from fusepass.errors import IRError
from tests.support.convolutions import (
    CASES,
    FEW,
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
from tests.support.machine_code import disassembler, instructions
from tests.support.regions import Region, region
from tests.support.thinned import thinned
from tests.support.values import check_values
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)  # its blocks take several tiles one after another


def planned(program: Program, facts: DeviceFacts = H200) -> ChunkSchedule:
    plan = schedule_convolution(multiplying(program), program, facts)
    assert isinstance(plan, ChunkSchedule)
    return plan


def check(program: Program, facts: DeviceFacts = SMALL, tolerance: float = 2e-6) -> None:
    planned(program, facts)
    check_values(program, facts, inputs_of(program), tolerance)


@needs_compiler
@pytest.mark.parametrize(("precision", "name"), thinned(itertools.product(Precision, FEW), 2))
@pytest.mark.thinned(5)
def test_values(name: str, precision: Precision) -> None:
    check(generated(replace(CASES[name], precision=precision, halves=True)))


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 16, 20, 150), 17, (3, 2), (1, 1), (1, 0), (1, 1)),  # two layers of places, rows of several blocks
        Case((2, 12, 9, 20, 40), 9, (2, 2, 3), (1, 1, 1), (1, 0, 1), (1, 1, 1)),  # several planes in a tile, of halves
        Case((1, 12, 5, 20, 40), 9, (2, 1, 3), (1, 1, 1), (1, 0, 1), (1, 1, 1)),  # of the input as it is
    ],
)
def test_values_of_several_tiles(case: Case) -> None:
    check(generated(replace(case, precision=Precision.FLOAT32, halves=True)))


MANY = {
    "2d": Case((1, 24, 7, 20), 70, (2, 3), (1, 1), (1, 1), (1, 2)),
    "transposed, uneven phases": Case((2, 20, 3, 10), 8, (3, 3), (2, 2), (1, 1), (1, 1), True, (1, 1)),
    "transposed 3d, phases with nothing": Case((1, 24, 2, 3, 4), 8, (1, 3, 2), (2, 2, 3), (0, 1, 0), (1, 1, 1), True),
}


def many(case: Case) -> Case:
    """`case`, of many channels, by halves of a tile."""
    return replace(case, precision=Precision.TF32, halves=True, tiled=True)


@needs_compiler
@pytest.mark.parametrize(("name", "vector"), thinned(zip(MANY, (1, 4, 1), strict=True), 2))
def test_values_of_many_channels(name: str, vector: int) -> None:
    program = generated(many(MANY[name]))
    assert planned(program, SMALL).vector == vector
    check(program)


HALVES = {
    "2d": CASES["2d"],
    "2d, 70 channels": CASES["2d, 70 channels"],
    "transposed 2d": CASES["transposed 2d"],
    "1d": CASES["1d"],
    "3d": CASES["3d"],
    **{f"many channels, {name}": many(case) for name, case in MANY.items()},
    "many channels, rows of whole vectors": many(Case((1, 32, 6, 32), 40, (3, 3), (1, 1), (1, 1), (1, 1))),
}


def of_halves(case: Case, dtype: DType) -> Case:
    return replace(case, dtype=dtype, precision=Precision.FLOAT32, halves=True)


def scales_nothing(program: Program) -> bool:
    halves = anchor_of(multiplying(program)).halves
    return isinstance(halves, ScaledHalves) and not halves.scales


ULPS = {DType.F16: 2e-3, DType.BF16: 1.6e-2}
"""Two units in the last place: of the sum, and of the result."""


@needs_compiler
@pytest.mark.parametrize("dtype", ULPS)
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.thinned(5)
def test_values_of_halves(name: str, dtype: DType) -> None:
    """They are multiplied as they are."""
    program = generated(of_halves(HALVES[name], dtype))
    assert scales_nothing(program)
    check(program, tolerance=ULPS[dtype])


@needs_compiler
@pytest.mark.parametrize(
    ("name", "over"), [("2d", Over.SOFTMAX), ("transposed 2d", Over.ARGMAX), ("3d", Over.NORMALISED)]
)
def test_halves_over_channels(name: str, over: Over) -> None:
    program = generated_reduction(of_halves(HALVES[name], DType.F16), over)
    assert scales_nothing(program)
    assert multiplying(program).cols
    check(program, tolerance=4e-3)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "across"), [("2d", Across.EACH), ("transposed 2d", Across.BATCH), ("many channels, 2d", Across.LAYER)]
)
def test_halves_over_positions(name: str, across: Across) -> None:
    program = generated_pooling(of_halves(HALVES[name], DType.BF16), across, SMALL)
    assert scales_nothing(program)
    assert multiplying(program).partials is not None
    check(program, tolerance=3e-2)


@needs_compiler
def test_halves_that_are_not_finite_are_where_they_were() -> None:
    program = generated(of_halves(HALVES["2d"], DType.F16), chain=False)
    inputs = inputs_of(program)
    inputs["x"].reshape(-1)[[11, 300]] = np.inf, np.nan
    inputs["w"].reshape(-1)[40] = -np.inf
    wanted = interpret(program, inputs)
    found = emulate(program, render(program, SMALL), inputs)
    for name in program.outputs:
        assert np.isnan(wanted[name]).any()
        assert np.array_equal(np.isnan(found[name]), np.isnan(wanted[name]))
        assert np.array_equal(np.isinf(found[name]), np.isinf(wanted[name]))


def test_halves_that_lie_in_places_are_read_as_they_lie() -> None:
    case = replace(CASES["2d"], source=(1, 16, 12, 40), channels_last=True, result_last=True)
    program = generated(of_halves(case, DType.F16))
    (product,) = (kernel.anchor for kernel in program.kernels if isinstance(kernel.anchor, Product))
    assert product.left.buffer == "x"


@needs_compiler
def test_tiles_overlap_where_rows_begin_anywhere() -> None:
    """Each stores its own sectors, and each result is counted once; several groups of warps have tiles of their own."""
    case = many(Case((2, 24, 2, 70), 8, (2, 4), (1, 2), (0, 1), (1, 1), True, (0, 1)))
    program = generated_pooling(case, Across.BATCH, SMALL)
    plan = planned(program, SMALL)
    assert multiplying(program).partials is not None
    assert plan.teams > 1
    assert 0 < plan.on.pace < plan.on.tile[-1]
    check(program, tolerance=1e-5)
    even = planned(generated(replace(case, output_padding=())), SMALL)
    assert not even.on.pace
    assert even.vector == 4


@needs_compiler
def test_blocks_share_phases_whose_weights_are_large() -> None:
    """What is reduced over channels there knows its phase; where all results are stored as well, another kernel reduces them."""
    tight = replace(SMALL, shared_bytes_per_block=130 << 10)
    program = generated_reduction(many(Case((1, 40, 3, 5), 33, (6, 4), (3, 2), (1, 1), (1, 1), True)), Over.LOGSUMEXP)
    assert multiplying(program).cols
    assert planned(program, tight).phase_blocks == 3
    check(program, tight, tolerance=1e-5)
    assert not multiplying(generated_reduction(many(MANY["2d"]), Over.SOFTMAX)).cols


def _normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    result = F.conv_transpose2d(x, weight, bias, 2, 1)
    return F.gelu(F.layer_norm(result, result.shape[-1:], scale, scale - 1)) * 2


def _pooled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result = F.conv_transpose3d(x, weight, None, 2, 1, 1)
    return F.avg_pool3d(F.layer_norm(result, result.shape[-1:]), 2)


def _largest(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, weight).relu().amax(-1)


def _softmax(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, weight).softmax(-1)


ALONG = {  # a model, the shapes of its arguments, whether it stores what it finds of a row, and elements
    "normalised": (_normalised, [(2, 24, 3, 20), (24, 20, 4, 4), (20,), (40,)], False, True),
    "largest": (_largest, [(2, 24, 7, 31), (20, 24, 3, 3)], True, False),
    "pooled, which reads the result as well": (_pooled, [(1, 24, 2, 3, 20), (24, 16, 3, 3, 3)], True, True),
}


def along(model: Callable[..., torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> tuple[Region, Program]:
    """`model` of random numbers, with products of scaled halves in tiles."""
    torch.manual_seed(0)
    made = region(model, *(torch.randn(shape) for shape in shapes))
    calls = tuple(replace(call, tf32=True) for call in made.program.calls)
    made = replace(made, program=replace(made.program, calls=calls))
    return made, made.passed(pass_options(SMALL, AnchorSource.TILED_HALVES))


@needs_compiler
@pytest.mark.parametrize("name", thinned(ALONG, 3))
def test_rows_along_the_last_axis(name: str) -> None:
    """A warp has whole rows, so that what reduces them is done before they are stored; what is not finite spreads over its row."""
    model, shapes, per_row, per_element = ALONG[name]
    made, program = along(model, shapes)
    kernel = multiplying(program)
    assert kernel.cols
    assert anchor_of(kernel).column == len(shapes[0]) - 1
    assert (bool(kernel.row_stores), bool(kernel.stores)) == (per_row, per_element)
    verify(program)
    for number in (1.0, np.inf):
        made.arguments[0].view(-1)[50] = number
        memory = made.memory(program)
        got, wanted = emulate(program, render(program, SMALL), memory), interpret(program, memory)
        for output, exact in zip(program.outputs, made.exact(), strict=True):
            np.testing.assert_allclose(got[output], wanted[output], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(np.isnan(got[output]), exact.isnan().numpy().ravel())


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (_softmax, [(2, 24, 7, 30), (20, 24, 3, 3)]),  # two reduction loops
        (_largest, [(2, 24, 7, 70), (20, 24, 3, 3)]),  # rows of three warps
        (_largest, [(2, 24, 7, 12), (20, 24, 3, 3)]),  # half of a warp would be idle
        (_normalised, [(2, 24, 3, 19), (24, 20, 3, 4), (20,), (38,)]),  # no vectors
    ],
)
def test_other_rows_along_the_last_axis_have_a_kernel_of_their_own(
    model: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]]
) -> None:
    made, program = along(model, shapes)
    assert not multiplying(program).cols
    made.check(program, tolerance=5e-3)


_ITERATIONS = Case((2, 3, 12, 70), 50, (3, 2), (1, 1), (1, 1), (1, 1), halves=True)


@needs_compiler
def test_values_of_channels_that_take_iterations() -> None:
    transposed = Case((2, 4, 9, 40), 33, (3, 3), (2, 2), (1, 1), (1, 1), True, (1, 1), halves=True)
    pooled = generated_pooling(_ITERATIONS, Across.EACH, SMALL)
    for program, tolerance in ((generated(_ITERATIONS), 2e-6), (generated(transposed), 2e-6), (pooled, 1e-5)):
        assert planned(program, SMALL).iterations > 1
        check(program, tolerance=tolerance)


@needs_compiler
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(
    ("name", "over"),
    [("2d, 8 to 40 channels", Over.LOGSUMEXP), ("transposed 2d", Over.NORMALISED), ("2d", Over.ARGMAX)],
)
@pytest.mark.thinned(3)
def test_reductions_over_channels(name: str, over: Over, precision: Precision) -> None:
    program = generated_reduction(replace(CASES[name], precision=precision, halves=True), over)
    assert multiplying(program).cols
    check(program, tolerance=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("out", "extreme"),
    [
        (40, lambda y: y.amin(1).tanh()),
        *thinned([(17, lambda y: y.relu().amax(1)), (64, lambda y: torch.stack([y.amin(1), y.amax(1)]))], 2),
    ],
)
def test_extremes_of_channels_are_found_in_registers(out: int, extreme: Callable[[Tensor], Tensor]) -> None:
    """Of numbers that are not finite, too, where results are computed by their definition."""
    x, w, b = torch.randn(2, 9, 11, 45), torch.randn(out, 9, 3, 2), torch.randn(out)
    made = region(lambda x, w, b: extreme(F.conv2d(x, w, b, padding=1)), x, w, b)
    program = made.passed(pass_options(SMALL, AnchorSource.HALVES))
    assert multiplying(program).cols
    source = render(program, SMALL)
    assert "fp::merge_across<1, 4>" in source.text
    check(program)
    inputs = inputs_of(program)
    inputs[program.inputs[0]][777] = np.nan
    inputs[program.inputs[0]][5000] = np.inf
    got, wanted = emulate(program, source, inputs), interpret(program, inputs)
    for name in program.outputs:
        assert np.isnan(wanted[name]).any()
        bound = 2e-6 * np.abs(wanted[name][np.isfinite(wanted[name])]).max()
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-6, atol=bound, err_msg=name)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "across"), thinned([("3d", Across.EACH), ("2d", Across.BATCH), ("transposed 3d", Across.LAYER)], 3)
)
def test_reductions_over_positions(name: str, across: Across) -> None:
    program = generated_pooling(replace(CASES[name], halves=True), across, SMALL)
    assert multiplying(program).partials is not None
    check(program, tolerance=1e-5)


_AXIS = st.tuples(*(st.integers(1, 20), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)))


@needs_compiler
@settings(max_examples=6, deadline=None)
@given(
    st.lists(_AXIS, min_size=1, max_size=3),
    st.integers(1, 16),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from(Precision),
)
def test_any_geometry(
    axes: list[tuple[int, ...]], channels: int, out: int, transposed: bool, precision: Precision
) -> None:
    sizes, kernel, stride, padding, dilation = zip(*axes, strict=True)
    stride = stride if transposed else (1,) * len(axes)
    missing = (0,) * len(axes) if transposed else ()
    case = Case((2, channels, *sizes), out, kernel, stride, padding, dilation, transposed, missing, False, precision)
    try:
        assume(all(case.result))
    except RuntimeError:  # the kernel is larger than what it should cover
        assume(False)
    check(generated(replace(case, halves=True)), tolerance=4e-6)


@needs_compiler
@pytest.mark.parametrize("bits", [0x7F800000, 0xFFFFFFFF, 0x7F7FC99E])
@pytest.mark.parametrize(("precision", "where"), list(itertools.product(Precision, "xw")))
@pytest.mark.thinned(5)
def test_what_is_not_finite_spreads_as_in_plain_arithmetic(bits: int, precision: Precision, where: str) -> None:
    """An infinity, NaN, and a number that is finite but beyond what sums of it can be."""
    # Neighbours are taken one at a time, or, with a result of even width, two.
    case = CASES["2d" if where == "w" else "2d, 8 to 40 channels"]
    spreads(generated(replace(case, precision=precision, halves=True), chain=False), bits, where)


@needs_compiler
def test_an_infinity_meets_no_weight_of_another_phase() -> None:
    spreads(generated(many(MANY["transposed, uneven phases"]), chain=False), 0x7F800000, "x")


def spreads(program: Program, bits: int, where: str) -> None:
    """Hold what becomes of a number, given by its bits in an input, against the interpreter: infinities and NaN at the same places."""
    inputs = inputs_of(program)
    inputs[where][37] = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        wanted = interpret(program, inputs)["conv_out"].astype(np.float32)
        got = emulate(program, render(program, SMALL), inputs)["conv_out"]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted))


@needs_compiler
def test_scales_of_samples_and_channels_cost_no_digits() -> None:
    program = generated(replace(CASES["2d"], halves=True), chain=False)
    inputs, shape = inputs_of(program), program.buffer("x").shape
    x = inputs["x"].reshape(shape)
    x *= np.float32(2.0) ** np.array([-70, 60], np.float32)[:, None, None, None]
    x *= np.float32(2.0) ** np.array([-20, 0, 15], np.float32)[None, :, None, None]
    w = inputs["w"].reshape(program.buffer("w").shape)
    w *= np.float32(2.0) ** np.array([20, 0, -15], np.float32)[None, :, None, None]
    got, wanted = emulate(program, render(program, SMALL), inputs)["conv_out"], interpret(program, inputs)["conv_out"]
    for one, other in zip(got.reshape(2, -1), wanted.reshape(2, -1), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6 * np.abs(other).max())


QUIET = [
    ("2d, 8 to 40 channels", Precision.TF32, BINADES),
    ("2d", Precision.FLOAT32, BINADES),
    ("2d, 8 to 40 channels", Precision.FLOAT32, BINADES_BY_PARTS),
]


@needs_compiler
@pytest.mark.parametrize(("name", "precision", "most"), QUIET)
def test_a_channel_that_is_far_smaller_than_another_keeps_its_digits(
    name: str, precision: Precision, most: int
) -> None:
    """As far as halves have the range; where they do not, results of the tile are computed by their definition."""
    keeps_digits_of_quiet_channels(replace(CASES[name], precision=precision, halves=True), most)


def keeps_digits_of_quiet_channels(case: Case, most: int) -> None:
    """Hold results that come of one input channel alone, so many powers of two smaller than the others, against float64: they are no further off
    than in eager's arithmetic, and are those of plain arithmetic from more than `most` powers on.
    """
    program = generated(case, chain=False)
    exactly = generated(replace(case, precision=Precision.FLOAT32, halves=False, held=False), chain=False)
    source = render(program, SMALL)
    rounded = case.precision is Precision.TF32
    for smaller in (most - 4, most, most + 1, most + 12, 60):
        inputs = quiet_inputs(case, smaller)
        got = emulate(program, source, inputs)["conv_out"]
        wanted = interpret(exactly, inputs)["conv_out"]
        eager = interpret(program, inputs)["conv_out"] if rounded else plainly(case, inputs)
        off, others = (
            np.square((each - wanted).reshape(case.result)[:, 2], dtype=np.float64).mean() ** 0.5
            for each in (got, eager)
        )
        assert off < 2 * others, (smaller, off / others)
        if rounded:  # which halves cannot do
            assert (off < others / 100) == (smaller > most), (smaller, off / others)


def quiet_inputs(case: Case, smaller: int) -> dict[str, np.ndarray]:
    """Numbers whose exponents are 0, and in one channel of the input ``-smaller``; output channel 2 comes of that one alone."""
    random = np.random.default_rng(smaller)
    x, w = (
        (random.uniform(1, 2, shape) * random.choice([-1, 1], shape)).astype(np.float32)
        for shape in (case.source, case.weight)
    )
    x[:, 1] *= np.float32(2.0**-smaller)
    others = [channel for channel in range(case.source[1]) if channel != 1]
    w[(others, 2) if case.transposed else (2, others)] = 0
    return {"x": x.ravel(), "w": w.ravel()}


def plainly(case: Case, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The convolution in float32."""
    x, w = (torch.from_numpy(inputs[name]).reshape(shape) for name, shape in (("x", case.source), ("w", case.weight)))
    stride, padding, dilation, transposed, missing, groups = case.geometry
    return torch.convolution(x, w, None, stride, padding, dilation, transposed, missing, groups).numpy().ravel()


@needs_compiler
def test_inputs_that_start_anywhere() -> None:
    program = generated(replace(CASES["2d, rows of whole vectors"], halves=True))
    inputs = inputs_of(program)
    aligned, anywhere = (render(program, SMALL, aligned=aligned) for aligned in (True, False))
    assert aligned.text != anywhere.text
    got, wanted = emulate(program, anywhere, inputs, shift=1), interpret(program, inputs)
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=2e-6, atol=2e-6 * np.abs(wanted["y"]).max())


def plans() -> Iterator[tuple[Program, ChunkSchedule]]:
    large = [name for name in LARGE if LARGE[name].source[1] <= 16 and "strided" not in name]
    cases = [*(CASES[name] for name in FEW), *(LARGE[name] for name in large)]
    for case, precision in itertools.product(cases, Precision):
        program = generated(replace(case, precision=precision, halves=True))
        yield program, planned(program)
    names = ("2d, 64 to 128", "3d, 32 to 64", "transposed 2d", "transposed 3d", "transposed 2d, 64 to 64")
    for case in (*MANY.values(), *(LARGE[name] for name in names)):
        program = generated(many(case))
        yield program, planned(program)


def test_a_tile_fits_and_products_have_each_place_once() -> None:
    for program, plan in plans():
        assert plan.shared_bytes <= H200.shared_bytes_per_block
        assert plan.blocks % plan.channel_blocks == plan.channel_blocks % plan.phase_blocks == 0
        each = len(plan.slices) // plan.phase_blocks
        assert len({sum(plan.slices[at : at + each]) for at in range(0, len(plan.slices), each)}) == 1
        assert ("halves x 3" in describe(program, multiplying(program), H200)) is (plan.parts == 2)
        for phase, places in zip(plan.on.phases, padded_places(plan), strict=True):
            assert len(places) % 2 == 0
            wanted = set(itertools.product(range(len(phase.taps)), range(plan.layers)))
            assert {(number, layer) for _, real, number, layer in places if real is not None} == wanted
            offsets = [each[0] for each in places]
            assert all(first <= second for first, second in zip(offsets[::2], offsets[1::2], strict=True))
            assert 0 <= min(offsets) <= max(offsets) < min(plan.layers * plan.layer_places, 1 << 14)


def test_a_tile_is_fetched_once_for_channels_that_take_iterations() -> None:
    program = generated(replace(LARGE["2d, 8 to 64"], out_channels=128, halves=True))
    plan = planned(program)
    assert plan.iterations > 1
    assert plan.channel_blocks == 1
    assert plan.covered == 128
    assert plan.weight_bytes == plan.iterations * plan.iteration_bytes
    assert "2 x 64 channels" in describe(program, multiplying(program), H200)


def test_parts_that_have_places_of_their_own_have_products_and_no_sums_of_their_own() -> None:
    large = LARGE["2d, 8 to 64"]
    plan = planned(generated(replace(large, halves=True)))
    assert plan.by_parts
    assert plan.slices == (9 + 5,)
    assert plan.columns == 64
    few = planned(generated(replace(large, source=(128, 4, 128, 128), halves=True)))
    assert not few.by_parts
    assert few.slices == (5,)
    assert few.columns == 2 * ROWS * few.rows


@needs_compiler
def test_warps_store_what_they_have_of_a_channel_one_after_another() -> None:
    """Behind tiles that are whole, and cut off by the result's end; a tile that is not finite in between goes its own way."""
    case = Case((2, 8, 5, 264), 50, (3, 3), (1, 1), (1, 1), (1, 1), halves=True)
    program = generated(case, facts=SMALL)
    assert warps_of_a_run(multiplying(program), planned(program, SMALL)) == 4
    inputs = inputs_of(program)
    inputs[next(iter(inputs))][777] = np.inf
    check_values(program, SMALL, inputs, 2e-6)


def test_states_of_reductions_over_positions_have_a_room() -> None:
    program = generated_pooling(many(LARGE["2d, 64 to 128"]), Across.EACH, H200)
    plan = planned(program)
    assert plan.rows * plan.iterations == MOST_ROWS
    assert "gather_channel" in render(program, H200).text


def test_chosen_by_measurement_alone_and_where_four_warps_multiply() -> None:
    program = generated(replace(CASES["2d"], halves=True))
    kernel = multiplying(program)
    assert serves(program, kernel, H200)
    assert not preferred(program, kernel, H200)
    assert not serves(program, kernel, replace(H200, arch="sm_100"))
    strided = generated(replace(CASES["2d, strided and dilated"], halves=True))
    assert anchor_of(multiplying(strided)).halves is None


def test_operands_of_another_shape_are_refused() -> None:
    program = generated(many(MANY["2d"]))
    kernel = multiplying(program)
    halves = anchor_of(kernel).halves
    assert isinstance(halves, ScaledHalves)
    for broken in (
        replace(halves, source=halves.weight),
        replace(halves, weight=halves.source),
        replace(halves, scales=("x", halves.scales[1])),
        ScaledHalves("x", "w", halves.scales),
    ):
        refused(program, broken)
    unscaled = generated(of_halves(CASES["2d"], DType.F16))
    as_they_are = anchor_of(multiplying(unscaled)).halves
    assert isinstance(as_they_are, ScaledHalves)
    refused(unscaled, replace(as_they_are, scales=("x", "x")), "scales halves")
    program = generated(replace(CASES["2d"], halves=True))
    scaled = anchor_of(multiplying(program)).halves
    assert isinstance(scaled, ScaledWeights)
    assert f"of halves by {scaled.weight}" in program_text(program)
    for wrong in (replace(scaled, weight="w"), replace(scaled, channels=scaled.outs), replace(scaled, outs="x")):
        refused(program, wrong)


def refused(program: Program, halves: ScaledHalves | ScaledWeights, reason: str = "which does not have") -> None:
    kernel = multiplying(program)
    other = replace(kernel, anchor=replace(anchor_of(kernel), halves=halves))
    kernels = tuple(other if each is kernel else each for each in program.kernels)
    with pytest.raises(IRError, match=reason):
        verify(replace(program, kernels=kernels))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *itertools.product(["3d, 8 to 32", "transposed 3d, 16 to 32", "2d, 70 channels"], Precision),
        ("transposed 3d", Precision.TF32),  # of many channels
    ],
)
@pytest.mark.thinned(5)
def test_registers_suffice_and_products_overlap(name: str, precision: Precision, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    program = generated(replace((CASES | LARGE)[name], precision=precision, halves=True, tiled=True))
    source = tmp_path / "kernel.cu"
    source.write_text(render(program, H200).text)
    flags = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", f"-I{include_directory()}"]
    command = [nvcc, *flags, "-cubin", "-o", str(tmp_path / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "serialized" not in done.stderr
    spilled = [line for line in done.stderr.splitlines() if "spill stores" in line]
    assert spilled
    assert all(" 0 bytes spill stores" in line for line in spilled)
    if disassembler() is not None:  # by fours, twos and one, of both tiles, for each phase of a pair: none was left out
        code = instructions(tmp_path / "kernel.cubin")
        products = sum(operation.startswith("HGMMA") for operation, _ in code)
        first = 4 if precision is Precision.FLOAT32 else 0  # which are not added to others
        plan = planned(program)
        once = "fp::sum_up_places" in render(program, H200).text  # or all at once
        assert products == (2 * plan.slices[0] if once else 2 * (first + 4 + 2 + 1) * plan.on.pair)
