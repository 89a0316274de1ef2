"""Products that make scaled halves of their input themselves (`passes.filled`, `fp_matmul_fill.cuh`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.product import Filling, Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.passes.filled import fill_products
from fusepass.codegen.passes.halves import scales_of
from fusepass.codegen.render import render
from fusepass.codegen.schedule_product import fills
from fusepass.codegen.schedule_product.tiles import TILINGS
from fusepass.errors import IRError
from tests import compile_cuda
from tests.support.convolutions import FILLED as CASES
from tests.support.convolutions import Across, Case, generated_pooling, program_of
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.machine_code import told_by_ptxas
from tests.support.numpy_ops import Array
from tests.support.values import check_values
from tests.unit.test_halved import bound, exact, halved, memory, operands
from tests.unit.test_render_cuda import inputs_of

ONE = replace(DeviceFacts.h200(), multiprocessors=1)
TWO = replace(ONE, multiprocessors=2)
CHAINED = next(tiling for tiling in TILINGS if tiling.chained)


@pytest.fixture(autouse=True)
def guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs of any size; and products are chained."""
    monkeypatch.setitem(scales_of.__kwdefaults__, "least", 0)
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", (CHAINED,))


def filled(case: Case, facts: DeviceFacts = TWO) -> Program:
    return fill_products(halved(case), Builder(), lambda program, kernel: fills(program, kernel, facts))


def products(program: Program) -> list[tuple[Kernel, Product]]:
    return [(each, each.anchor) for each in program.kernels if isinstance(each.anchor, Product)]


def as_is(given: dict[str, Tensor]) -> None:
    pass


def large(given: dict[str, Tensor]) -> None:
    given["x"][1, 3, 0, 5] = 3000.0


def tiny(given: dict[str, Tensor]) -> None:
    given["x"][0] *= 2.0**-140
    given["x"][:, 5] = 0
    given["x"][1, 7, 0, 1] = 1e-30


def unseen(given: dict[str, Tensor]) -> None:
    """A channel, and a sample, of zeros in the rows that are looked at."""
    given["x"][:, 5], given["x"][0] = 0, 0
    given["x"][0, 5, 0, 0] = 1e-3


def nothing(given: dict[str, Tensor]) -> None:
    given["x"][:, 5], given["x"][0] = 0, 0


GIVEN: dict[str, tuple[Callable[[dict[str, Tensor]], None], bool]] = {
    "as it is": (as_is, False),
    "far too large for the guess": (large, True),
    "tiny numbers": (tiny, False),
    "numbers where none were seen": (unseen, True),
    "zeros": (nothing, False),
}


def check(
    case: Case, program: Program, found: dict[str, Array], given: dict[str, Tensor], overflow_flags: bool
) -> None:
    assert (np.abs(found["y"].reshape(case.result) - exact(case, given)) <= bound(case, given)).all()
    (flag,) = {kernel.when for kernel in program.kernels if kernel.when is not None}
    assert flag not in found or bool(found[flag][0]) is overflow_flags


@needs_compiler
@pytest.mark.parametrize("facts", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(5)
def test_values(name: str, facts: DeviceFacts) -> None:
    case = CASES[name]
    program = filled(case)
    verify(program)
    source, given = render(program, facts), operands(case)
    assert source.text.count("tile.fill(") == 1
    inputs = memory(case, given)
    check(case, program, interpret(program, inputs), given, False)
    check(case, program, emulate(program, source, inputs), given, False)


@needs_compiler
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.thinned(3)
def test_an_alarm_where_a_guess_is_wrong(kind: str) -> None:
    """Then the input is packed, and multiplied once more."""
    case = CASES["2d"]
    change, overflow_flags = GIVEN[kind]
    program, given = filled(case), operands(case)
    change(given)
    inputs = memory(case, given)
    check(case, program, interpret(program, inputs), given, overflow_flags)
    check(case, program, emulate(program, render(program, ONE), inputs), given, overflow_flags)


@needs_compiler
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_inputs_that_begin_anywhere(shift: int) -> None:
    case = CASES["2d"]
    program, given = filled(case), operands(case)
    found = emulate(program, render(program, ONE, aligned=False), memory(case, given), shift=shift)
    check(case, program, found, given, False)


@needs_compiler
@pytest.mark.parametrize("emulated", [False, True])
def test_what_is_not_finite_spreads_as_in_the_library(emulated: bool) -> None:
    """An infinite weight makes an infinity of what is too small for a half."""
    case = replace(CASES["2d"], padding=(0, 0))  # libraries differ in what a zero of the border meets
    given = operands(case)
    x, w = given["x"], given["w"]
    x[0, 3, 4, 5], x[1, 7, 8, 10], x[1, 2, 5, 5] = torch.nan, torch.nan, 1e-30
    w[6, 0, 1, 1] = torch.inf
    program = fill_products(halved(case, chain=False), Builder(), lambda program, kernel: True)
    inputs = memory(case, given)
    found = emulate(program, render(program, ONE), inputs) if emulated else interpret(program, inputs)
    actual = torch.from_numpy(found["conv_out"].astype(np.float64)).reshape(case.result)
    wanted = torch.convolution(x, w, None, *case.geometry).double()  # type: ignore[call-overload]
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(actual), kind(wanted))
    assert wanted.isfinite().any()


@needs_compiler
def test_values_that_are_reduced() -> None:
    """Partial results of both products are the same kernel's."""
    program = generated_pooling(CASES["2d"], Across.EACH, ONE)
    assert all(kernel.partials is not None for kernel, _ in products(program))
    check_values(program, ONE, inputs_of(program), 5e-6)


def test_kernels_in_their_order() -> None:
    """What an overflow flag repeats comes behind all that may raise it, the packed input among it."""
    program = filled(CASES["2d"])
    (first, made), (again, read) = products(program)
    assert made.fills
    assert not read.fills
    assert again.when in first.overflow_flags
    place = program.kernels.index(first)
    assert all(kernel.when is None for kernel in program.kernels[: place + 1])
    repeated = program.kernels[place + 1 : program.kernels.index(again) + 1]
    assert all(kernel.when == again.when for kernel in repeated)
    assert [kernel.name for kernel in repeated if read.right.buffer in kernel.writes]
    assert read.right.buffer not in first.buffers
    assert "made of x" in program_text(program)
    (weights,) = (kernel for kernel in program.kernels[:place] if made.left.buffer in kernel.writes)
    assert weights.overflow_flags == first.overflow_flags


@pytest.mark.parametrize(
    "case",
    [
        replace(CASES["2d"], source=(2, 32, 17, 131)),  # rows begin in the middle of four neighbours
        replace(CASES["2d"], out_channels=65),  # places would be made twice
        replace(CASES["2d"], channels_last=True),
        replace(CASES["2d"], source=(2, 28, 17, 132)),  # channels do not fill places
    ],
)
def test_what_is_read_packed(case: Case) -> None:
    assert filled(CASES["2d"]) != halved(CASES["2d"])
    assert not any(product.fills for _, product in products(filled(case)))


def test_large_convolutions_are_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all passes; nothing is patched."""
    monkeypatch.undo()
    case = replace(CASES["2d"], source=(8, 64, 200, 256), out_channels=64)
    program = generate(program_of(case), Builder(), DeviceFacts.h200(), AnchorSource.HALVES).program
    verify(program)
    assert [product.fills for _, product in products(program)] == [True, False]
    for aligned in (False, True):
        compile_cuda.keep(render(program, DeviceFacts.h200(), aligned=aligned))


def test_scales_that_are_no_guesses_are_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scales_of.__kwdefaults__, "least", 1 << 62)
    ((_, product),) = products(filled(CASES["2d"]))
    assert product.filling is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda filling: replace(filling, source="conv_out_halves_weight"), "no buffer of float32"),
        (lambda filling: replace(filling, channel=1), "do not lie there"),
        (lambda filling: replace(filling, image=((17, 1, 20), (132, 1, 134))), "runs do not have"),
        (lambda filling: replace(filling, factors=filling.factors[::-1]), "which is not 2 numbers"),
        (lambda filling: replace(filling, overflow_flag="y"), "no temporary written before"),
    ],
)
def test_a_product_of_something_else_is_refused(change: Callable[[Filling], Filling], told: str) -> None:
    program = filled(CASES["2d"])
    (first, product), _ = products(program)
    assert product.filling is not None
    wrong = replace(first, anchor=replace(product, filling=change(product.filling)))
    kernels = tuple(wrong if kernel is first else kernel for kernel in program.kernels)
    with pytest.raises(IRError, match=told):
        verify(replace(program, kernels=kernels))


def test_sums_stay_in_registers(tmp_path: Path) -> None:
    """Products do not run one by one, and nothing to speak of is spilled."""
    told = told_by_ptxas(render(filled(CASES["2d"]), DeviceFacts.h200()), tmp_path)
    assert "C75" not in told, told
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", told))) <= 64, told


def test_what_is_left_for_nvcc() -> None:
    compile_cuda.keep(render(filled(CASES["3d"]), DeviceFacts.h200()))
