"""Convolutions as kernels: their geometry, what the kernels compute (every thread run on the host), and when they are chosen."""

from __future__ import annotations

import functools
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Kernel, Program, Ref, Role
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorOptions, AnchorSource, generate_anchors
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule_convolution import preferred, schedule_convolution, serves
from fusepass.codegen.schedule_convolution.multistage import MultistageSchedule
from fusepass.codegen.schedule_convolution.shared_stationary import SharedStationarySchedule
from fusepass.codegen.toolchain import include_directory
from fusepass.errors import IRError
from tests import compile_cuda
from tests.support.convolutions import (
    CASES,
    LARGE,
    LARGE_KERNEL,
    REDUCED,
    SAMPLES,
    Case,
    Over,
    generated,
    generated_reduction,
    program_of,
    reduced,
)
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.machine_code import disassembler, instructions, products, written_while_read
from tests.support.thinned import thinned
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
WARPS = (1, 4)  # that multiply together
SMALL = replace(H200, multiprocessors=1)  # its blocks take several tiles one after another


@needs_compiler
@pytest.mark.parametrize(("name", "warps"), thinned(itertools.product(CASES, WARPS), 3))
@pytest.mark.thinned(5)
def test_values(name: str, warps: int) -> None:
    program = generated(replace(CASES[name], warps=warps))
    verify(program)
    assert not program.calls
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=2e-6, atol=2e-6 * np.abs(wanted["y"]).max())


@needs_compiler
@pytest.mark.parametrize("name", [name for name in SAMPLES if "residual" in name])
@pytest.mark.thinned(3)
def test_a_residual_is_added(name: str) -> None:
    """Two neighbours at a time, while the next tile is fetched."""
    program = SAMPLES[name]()
    verify(program)
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, SMALL), inputs)["y"], interpret(program, inputs)["y"]
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6 * np.abs(wanted).max())


@needs_compiler
@pytest.mark.parametrize("name", [name for name in CASES if "rows of whole vectors" in name])
def test_inputs_that_start_anywhere(name: str) -> None:
    program = generated(replace(CASES[name], precision=Precision.TF32, warps=4))
    inputs = inputs_of(program)
    aligned, anywhere = (render(program, SMALL, aligned=aligned) for aligned in (True, False))
    assert aligned.text != anywhere.text
    got, wanted = emulate(program, anywhere, inputs, shift=1), interpret(program, inputs)
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=2e-6, atol=2e-6 * np.abs(wanted["y"]).max())


@needs_compiler
@pytest.mark.parametrize(
    ("name", "warps"),
    [
        *thinned(itertools.product([name for name in CASES if "many channels" in name], WARPS), 3),
        *itertools.product(["2d, channels last", "3d, padded", "transposed 3d"], [4]),
    ],
)
@pytest.mark.thinned(5)
def test_one_product_of_rounded_operands(name: str, warps: int) -> None:
    program = generated(replace(CASES[name], precision=Precision.TF32, warps=warps))
    verify(program)
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=2e-6, atol=2e-6 * np.abs(wanted["y"]).max())


@needs_compiler
@pytest.mark.parametrize(("name", "over", "warps"), thinned(itertools.product(REDUCED, Over, WARPS), 3))
@pytest.mark.thinned(5)
def test_reductions_over_channels(name: str, over: Over, warps: int) -> None:
    program = generated_reduction(replace(CASES[name], warps=warps), over)
    verify(program)
    assert program.kernels[-1].anchor is not None
    assert all(buffer.name != "conv_out" for buffer in program.buffers)
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, SMALL), inputs)["y"], interpret(program, inputs)["y"]
    tolerance = 3e-4 if over is Over.SOFTMAX else 1e-5  # exponentials of numbers in the hundreds
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def test_what_a_block_cannot_reduce_is_reduced_apart() -> None:
    def kernels(case: Case) -> list[bool]:
        choose = functools.partial(serves, facts=H200)
        program = generate_anchors(reduced(case, Over.SOFTMAX), Builder(), AnchorOptions(choose))
        verify(program)
        return [kernel.anchor is not None and not kernel.is_pointwise for kernel in program.kernels]

    case = CASES["many channels"]
    assert kernels(case) == [False, True]
    assert kernels(replace(case, out_channels=128)) == [False, True]
    assert kernels(replace(case, out_channels=129)) == [False, False, False]


@needs_compiler
def test_large_kernels_of_few_channels_share_their_output_channels_among_blocks() -> None:
    program = generated(LARGE_KERNEL)
    plan = schedule_convolution(*_kernel(program)[::-1], H200)
    assert isinstance(plan, SharedStationarySchedule)
    assert (plan.channels, plan.channel_blocks) == (32, 3)
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=2e-6, atol=2e-6 * np.abs(wanted["y"]).max())


@needs_compiler
def test_few_channels_stream_where_a_block_has_no_room_for_the_weights() -> None:
    """A window of pools makes kernels and strides large: 8 x 6 x 6 weights a channel, and 4 x 4 inputs a position."""
    case = Case((1, 8, 22, 134), 64, (6, 6), (4, 4), (0, 0), (1, 1))
    choose = functools.partial(serves, facts=H200)
    assert not serves(*_kernel(generated(case)), H200)
    program = generate_anchors(program_of(case), Builder(), AnchorOptions(choose))
    verify(program)
    assert isinstance(schedule_convolution(program.kernels[1], program, H200), MultistageSchedule)
    assert not preferred(program, program.kernels[1], H200)
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=2e-6, atol=2e-6 * np.abs(wanted["y"]).max())


@pytest.mark.parametrize("name", ["2d, 8 to 64", "3d, 8 to 32", "2d, 64 to 128"])
def test_tiles_are_as_wide_as_rows_that_begin_anywhere(name: str) -> None:
    """Pieces of such rows fill sectors in part at both of their ends."""
    program = generated(replace(LARGE[name], precision=Precision.TF32, warps=4))
    plan = schedule_convolution(program.kernels[-1], program, H200)
    assert plan is not None
    assert plan.on.tiles[-1] == 1


def _kernel(program: Program) -> tuple[Program, Kernel]:
    (kernel,) = program.kernels
    return program, kernel


_AXIS = st.tuples(
    *(st.integers(1, 11), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), st.integers(0, 2))
)


@needs_compiler
@settings(max_examples=12, deadline=None)
@given(
    st.lists(_AXIS, min_size=1, max_size=3),
    st.integers(9, 40),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from(Precision),
    st.sampled_from([1, 3]),
    st.sampled_from(WARPS),
    st.sampled_from([1, 2, 5]),
)
def test_any_geometry(
    axes: list[tuple[int, ...]],
    channels: int,
    out: int,
    transposed: bool,
    precision: Precision,
    processors: int,
    warps: int,
    groups: int,
) -> None:
    channels, out = ceil(channels / groups) * groups, ceil(out / groups) * groups
    sizes, kernel, stride, padding, dilation, missing = zip(*axes, strict=True)
    missing = tuple(m % max(s, d) for m, s, d in zip(missing, stride, dilation, strict=True)) if transposed else ()
    case = Case((2, channels, *sizes), out, kernel, stride, padding, dilation, transposed, missing, False, precision)
    case = replace(case, warps=warps, groups=groups)
    try:
        assume(all(case.result))
    except RuntimeError:  # the kernel is larger than what it should cover
        assume(False)
    program = generated(case)
    verify(program)
    inputs = inputs_of(program)
    got = emulate(program, render(program, replace(H200, multiprocessors=processors)), inputs)
    wanted = interpret(program, inputs)
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=3e-6, atol=3e-6 * np.abs(wanted["y"]).max() + 1e-6)


@needs_compiler
def test_the_result_itself_is_stored_where_it_is_wanted() -> None:
    program = generated(CASES["2d"], chain=False)
    verify(program)
    assert program.buffer("conv_out").role is Role.OUTPUT
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, SMALL), inputs), interpret(program, inputs)
    np.testing.assert_allclose(got["conv_out"], wanted["conv_out"], rtol=2e-6, atol=1e-5)


# Infinities, a NaN, a number that is finite, and NaN of other payloads.
BITS = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FC99E, 0x7FFFFFFF, 0xFFFFFFFF]


@needs_compiler
@pytest.mark.parametrize(("bits", "warps"), thinned(itertools.product(BITS, WARPS), 3))
@pytest.mark.parametrize(
    ("name", "precision", "where"),
    [
        ("2d, 8 to 40 channels", Precision.FLOAT32, "x"),
        # Not the weights of a transposed one: an infinite one meets zeros outside of the input, as in a plain one.
        *itertools.product(["many channels", "many channels, transposed"], Precision, "x"),
        *itertools.product(["many channels"], Precision, "w"),
    ],
)
@pytest.mark.thinned(9)
def test_what_is_not_finite_spreads_as_in_plain_arithmetic(
    bits: int, name: str, precision: Precision, where: str, warps: int
) -> None:
    """Infinities, NaN of all payloads, and a number that is finite but beyond what sums of it can be."""
    program = generated(replace(CASES[name], precision=precision, warps=warps), chain=False)
    inputs = inputs_of(program)
    inputs[where][37] = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        wanted = interpret(program, inputs)["conv_out"].astype(np.float32)
    got = emulate(program, render(program, SMALL), inputs)["conv_out"]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted))


@needs_compiler
@pytest.mark.parametrize(("name", "where"), [("2d, rows of whole vectors", 0), ("transposed 2d", 5)])
def test_what_fills_slices_up_meets_what_is_not_finite(name: str, where: int) -> None:
    """It shares a weight that is there: a zero would make NaN of an infinity, and of results that do not read it."""
    program = generated(replace(CASES[name], precision=Precision.TF32, warps=4), chain=False)
    inputs = inputs_of(program)
    inputs["x"][where] = np.inf
    wanted = interpret(program, inputs)["conv_out"]
    got = emulate(program, render(program, SMALL), inputs)["conv_out"]
    assert np.isinf(wanted).any()
    assert not np.isnan(got).any()
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


@pytest.mark.parametrize("channels", [5, 13, 40])
def test_a_transposed_convolution_of_borders_alone_is_left(channels: int) -> None:
    """No element of the result has a tap: with one output per axis, padding takes away all that has."""

    def generates(case: Case) -> bool:
        program = generate_anchors(program_of(case), Builder(), AnchorOptions(functools.partial(serves, facts=H200)))
        return any(kernel.anchor is not None for kernel in program.kernels)

    case = Case((1, channels, 2, 2), 3, (1, 1), (2, 2), (1, 1), (1, 1), transposed=True)
    assert not generates(case)
    assert generates(replace(case, output_padding=(1, 1)))


def test_chosen_unmeasured_for_few_channels_only() -> None:
    def served(case: Case, facts: DeviceFacts = H200, ask: Callable[..., bool] = preferred) -> bool:
        program = generated(case)
        return ask(program, program.kernels[-1], facts)

    few = Case((128, 8, 64, 64), 64, (3, 3), (1, 1), (0, 0), (1, 1))
    assert served(few)
    assert not served(replace(few, source=(128, 16, 64, 64)))
    assert served(replace(few, source=(128, 16, 64, 64)), ask=serves)
    assert not served(replace(few, source=(128, 16, 64, 64)), replace(H200, arch="sm_75"), serves)
    scattered = replace(few, source=(128, 16, 64, 64), stride=(2, 2), transposed=True)
    assert served(scattered)
    assert not served(replace(scattered, source=(128, 32, 64, 64)))
    assert not served(replace(scattered, stride=(1, 1)))
    assert not served(few, replace(H200, arch="sm_75"))
    huge = replace(few, source=(1, 8, 4096, 64), kernel=(60, 60))  # weights beyond shared memory
    assert not served(huge)
    assert served(replace(few, warps=4))
    assert not served(replace(few, warps=4), replace(H200, arch="sm_100"), serves)


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
    biased = replace(program, calls=(replace(call, args=(*call.args[:2], Ref("bias"), *call.args[3:])),))
    assert generate_anchors(biased, Builder(), AnchorOptions(lambda program, kernel: True)) == biased


@pytest.mark.parametrize("facts", [H200, replace(H200, arch="sm_80", shared_bytes_per_block=163 << 10)])
def test_a_tile_fits_its_device(facts: DeviceFacts) -> None:
    for name in CASES:
        program = generated(CASES[name])
        plan = schedule_convolution(program.kernels[-1], program, facts)
        assert plan is not None
        assert plan.shared_bytes <= facts.shared_bytes_per_block
        assert plan.blocks % plan.channel_blocks == 0
        assert "TF32 x 3" in describe(program, program.kernels[-1], facts)


def multistage_plans() -> Iterator[MultistageSchedule]:
    large = Case((32, 64, 64, 64), 128, (3, 3), (1, 1), (1, 1), (1, 1))
    deep = Case((4, 256, 16, 16), 64, (4, 4), (2, 2), (1, 1), (1, 1), True)
    wide = Case((2, 64, 16, 32, 32), 128, (5, 5, 5), (1, 1, 1), (0, 0, 0), (1, 1, 1))
    few = [CASES[name] for name in CASES if "many channels" in name]
    cases = itertools.product([large, deep, wide, *few], Precision, WARPS)
    for (case, precision, warps), facts in itertools.product(cases, [H200, SMALL]):
        program = generated(replace(case, precision=precision, warps=warps))
        plan = schedule_convolution(program.kernels[-1], program, facts)
        assert isinstance(plan, MultistageSchedule)
        yield plan


def test_weights_that_are_not_in_slices_are_refused() -> None:
    program = generated(CASES["many channels"])
    *before, kernel = program.kernels
    anchor = replace(kernel.anchor, packed="w")  # type: ignore[type-var]
    broken = replace(program, kernels=(*before, replace(kernel, anchor=anchor)))
    with pytest.raises(IRError, match="does not have them in slices"):
        verify(broken)


def test_pieces_cover_each_slice_once() -> None:
    for plan in multistage_plans():
        pieces, slices = plan.pieces(), plan.slices()
        done = [(piece.chunk, piece.first + number) for piece in pieces for number in range(piece.count)]
        assert sorted(done) == sorted(itertools.product(range(plan.chunks), range(len(slices))))
        assert max(piece.count for piece in pieces) <= plan.longest
        assert sum(piece.last for piece in pieces) == len(plan.on.phases) // plan.on.pair


def test_no_copy_overwrites_what_is_still_read() -> None:
    """Piece n waits for its copies, meets the others, begins the copies of piece n + stages - 1, and reads."""
    for plan in multistage_plans():
        pieces = plan.pieces() * 3
        generation = list(itertools.accumulate(piece.loads for piece in pieces))
        for number, coming in enumerate(pieces[plan.stages - 1 :]):
            later = number + plan.stages - 1
            running = range(number, later)  # may be read from now on until `coming` is
            assert later % plan.stages not in {piece % plan.stages for piece in running}
            if coming.loads:
                slot = generation[later] % plan.inputs
                assert slot not in {generation[piece] % plan.inputs for piece in running}


@pytest.mark.parametrize("name", ["2d", "3d, padded", "transposed 3d", "many channels", "many channels, transposed 3d"])
def test_what_is_left_for_nvcc(name: str) -> None:
    compile_cuda.keep(render(generated(CASES[name]), H200))


TOGETHER = [
    *itertools.product(["2d, 64 to 128", "transposed 3d", "3d, 8 to 32"], Precision),
    ("transposed 3d, 3 to 16", Precision.FLOAT32),
]


def compiled(name: str, precision: Precision, folder: Path) -> tuple[Path, str]:
    """Machine code of a convolution by groups of warps, and what the compiler says about it."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    source, cubin = folder / "source.cu", folder / "source.cubin"
    source.write_text(render(generated(replace(LARGE[name], precision=precision, warps=4), facts=H200), H200).text)
    arch = "-gencode=arch=compute_90a,code=sm_90a"
    command = [nvcc, "-O3", "-std=c++17", arch, f"-I{include_directory()}", "-cubin", "-o", str(cubin), str(source)]
    return cubin, subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(("name", "precision"), TOGETHER)
@pytest.mark.thinned(5)
def test_groups_of_warps_multiply_without_waiting_for_each_product(
    name: str, precision: Precision, tmp_path: Path
) -> None:
    """ptxas says where it makes products wait, for registers that are touched while it works or that it lacks."""
    assert "serialized" not in compiled(name, precision, tmp_path)[1]


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize(("name", "precision"), TOGETHER)
def test_nothing_is_written_to_what_products_read(name: str, precision: Precision, tmp_path: Path) -> None:
    code = list(instructions(compiled(name, precision, tmp_path)[0]))
    assert products(code)
    assert not written_while_read(code)


def test_writes_to_what_products_read_are_found() -> None:
    product = ("HGMMA.64x32x8.F32.TF32", "R24, R68, gdesc[UR20], R24")
    wait = ("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
    assert written_while_read([product, ("LDS.64", "R70, [R12]"), wait]) == ["LDS.64 R70, [R12]"]
    assert not written_while_read([product, ("LDS.64", "R72, [R12]"), ("STS", "[R68], R68"), wait, ("MOV", "R68, RZ")])
    assert not written_while_read([("HGMMA.64x32x8.F32", "R24, gdesc[UR20], R24"), ("MOV", "R25, RZ"), wait])
